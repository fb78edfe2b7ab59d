"""Which names stand in the annotations of what is public, as its source says them."""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar, get_args, is_typeddict

import msgspec
import pydantic

OURS = ("rlm_broker", "sandbox_worker")


def annotations_of(name: str, public: Any) -> Iterator[tuple[str, ast.expr, ModuleType]]:
    """Yield each annotation of a public class or function: where it stands, its expression, its module."""
    if inspect.isfunction(public):
        yield from _of_function(name, _tree(public), sys.modules[public.__module__])
    elif inspect.isclass(public):
        made_by = next(kind for kind in public.__mro__ if "__init__" in vars(kind))
        for kind in public.__mro__:
            if kind.__module__.split(".")[0] in OURS:
                yield from _of_class(kind, is_constructed=kind is made_by)


def named(expression: ast.expr, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield each name in an annotation, with what it stands for in its module."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield from named(ast.parse(expression.value, mode="eval").body, module)
    elif isinstance(expression, ast.Name | ast.Attribute):
        text = ast.unparse(expression)
        yield text, eval(text, vars(module))
    elif isinstance(expression, ast.Subscript) and ast.unparse(expression.value) in ("Literal", "typing.Literal"):
        return
    elif isinstance(expression, ast.Subscript) and ast.unparse(expression.value) == "Annotated":
        parts = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
        yield from named(parts[0], module)
    else:
        for child in ast.iter_child_nodes(expression):
            if isinstance(child, ast.expr):
                yield from named(child, module)


def within(alias: Any) -> Iterator[type]:
    """Yield the classes that a type is made of: of a union its members, of a generic its arguments."""
    for part in get_args(alias):
        yield from _classes(part)


def _classes(part: Any) -> Iterator[type]:
    if isinstance(part, list):
        for each in part:
            yield from _classes(each)
    elif isinstance(part, type) and not get_args(part):
        yield part
    elif not isinstance(part, TypeVar):
        yield from within(part)


def _of_class(kind: type, *, is_constructed: bool) -> Iterator[tuple[str, ast.expr, ModuleType]]:
    module, name = sys.modules[kind.__module__], kind.__name__
    has_fields = dataclasses.is_dataclass(kind) or is_typeddict(kind)
    has_fields = has_fields or issubclass(kind, msgspec.Struct | pydantic.BaseModel)
    for node in _tree(kind).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_constructor = node.name == "__init__" and is_constructed and not _is_made_elsewhere(kind)
            if is_constructor or node.name == "__call__" or not node.name.startswith("_"):
                yield from _of_function(f"{name}.{node.name}", node, module)
        elif has_fields and isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            yield f"{name}.{ast.unparse(node.target)}", node.annotation, module


def _is_made_elsewhere(kind: type) -> bool:
    """Return whether users get it from a function that its documentation names, and do not make it themselves."""
    return re.search(r"Made by `|` makes it\b", kind.__doc__ or "") is not None


def _of_function(name: str, node: Any, module: ModuleType) -> Iterator[tuple[str, ast.expr, ModuleType]]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None and argument.annotation is not None:
            yield f"{name}({argument.arg})", argument.annotation, module
    if node.returns is not None:
        yield f"{name} ->", node.returns, module


@functools.cache
def _tree(what: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]
