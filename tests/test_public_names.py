"""The exports of `rlm_broker`: seen by type checkers, whole, and documented."""

import ast
import builtins
import importlib
import inspect
import sys
from collections import Counter
from typing import Annotated, Any, TypeVar, get_args, get_origin

import pytest

import rlm_broker
from tests.support.places import PROJECT
from tests.support.public_types import annotations_of, named, within

THIRD_PARTY = {"opentelemetry", "pydantic"}
INTERNAL = {
    "AsyncResource.event_loop ->",
    "AsyncResource.bind_loop ->",
    "Broker.__init__(event_loop)",
    "ReplFiles.__init__(event_loop)",
    "ReplFiles.__init__(worker)",
    "ReplLimits.repl_bounds ->",
    "Query.contexts",
    "StoredContext.__init__(pieces)",
    "StoredContext.pieces ->",
}
"""Parameters that only modules of this package pass, and not users."""


def shown_to_type_checkers() -> dict[str, str]:
    """Name -> module, of the imports that only type checkers see."""
    tree = ast.parse((PROJECT / "rlm_broker/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # else it is not exported
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_see_all_public_names() -> None:
    assert shown_to_type_checkers() == rlm_broker._PUBLIC


def test_public_names_are_unique() -> None:
    counted = Counter(name for names in rlm_broker._MODULES.values() for name in names.split())
    assert max(counted.values()) == 1
    submodules = {path.stem for path in (PROJECT / "rlm_broker").iterdir()}
    assert submodules & counted.keys() == set()


@pytest.mark.parametrize("name", rlm_broker.__all__)
def test_public_name_is_documented(name: str) -> None:
    public = getattr(rlm_broker, name)
    if inspect.isclass(public) or inspect.isfunction(public):
        assert vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
        return
    source = inspect.getsource(importlib.import_module(rlm_broker._PUBLIC[name]))
    body = ast.parse(source).body
    targets = [node.targets[0] if isinstance(node, ast.Assign) else None for node in body]
    (place,) = [number for number, target in enumerate(targets) if target is not None and ast.unparse(target) == name]
    assert isinstance(body[place + 1], ast.Expr), f"{name} has no docstring"


@pytest.mark.parametrize("name", rlm_broker.__all__)
def test_types_in_public_annotations_are_public(name: str) -> None:
    for where, expression, module in annotations_of(name, getattr(rlm_broker, name)):
        if where not in INTERNAL:
            for text, what in named(expression, module):
                assert is_public(text.rpartition(".")[2], what), f"{where} needs {text}, which is not public"


@pytest.mark.parametrize("name", rlm_broker.__all__)
def test_classes_in_a_public_alias_are_public(name: str) -> None:
    for kind in within(getattr(rlm_broker, name)):
        assert is_public(kind.__name__, kind), f"{name} needs {kind.__name__}, which is not public"


def test_exceptions_name_existing_names() -> None:
    every = (annotations_of(name, getattr(rlm_broker, name)) for name in rlm_broker.__all__)
    assert {where for found in every for where, _, _ in found} >= INTERNAL


def is_public(name: str, what: Any) -> bool:
    if name in rlm_broker.__all__:
        return bool(getattr(rlm_broker, name) == what)
    if get_origin(what) is Annotated:
        what = get_args(what)[0]
    if isinstance(what, TypeVar) or getattr(builtins, getattr(what, "__name__", ""), None) is what:
        return True
    return str(getattr(what, "__module__", "")).partition(".")[0] in sys.stdlib_module_names | THIRD_PARTY
