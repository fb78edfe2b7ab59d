"""The public names: whole, documented, and with public types in their annotations."""

import ast
import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterator

from scripts.lint.project import FUNCTIONS, PACKAGES, Finding, Project, Source, is_text
from scripts.lint.rooms import public_names

THIRD_PARTY = {"opentelemetry", "pydantic", "starlette.types"}
INTERNAL = {
    "AsyncResource.event_loop ->",
    "AsyncResource.bind_loop ->",
    "Broker.__init__(event_loop)",
    "ReplFiles.__init__(event_loop)",
    "ReplFiles.__init__(worker)",
    "ReplLimits.repl_bounds ->",
    "StoredContext.__init__(pieces)",
    "StoredContext.pieces ->",
}
"""Parameters that only modules of this package pass, and not users."""
FACE = "rlm_broker/__init__.py"


def rules(project: Project) -> Iterator[Finding]:
    """Yield public names that type checkers do not see, that lack a docstring, or that need names of ours."""
    public = public_names(project)
    needs: set[str] = set()
    yield from _face(project, public)
    for name, module in public.items():
        source = project.modules.get(module)
        definition = definition_of(source, name) if source else None
        if source is None or definition is None:
            yield Finding(FACE, 1, f"{name} is not defined in {module}")
            continue
        if not _is_documented(source, definition):
            yield Finding(source.path, definition.lineno, f"{name} is public and has no docstring")
        for where, annotation, home in _annotations(project, source, definition):
            for used in _names(annotation):
                if not _is_public(project, public, home, used):
                    needs.add(where)
                    if where not in INTERNAL:
                        yield Finding(home.path, annotation.lineno, f"{where} needs {used}, which is not public")
    if "rlm_broker" in project.modules and (unused := INTERNAL - needs):
        yield Finding(
            "scripts/lint/public_names.py", 1, f"exceptions that no annotation needs: {', '.join(sorted(unused))}"
        )


def _face(project: Project, public: dict[str, str]) -> Iterator[Finding]:
    """Compare what type checkers see with what is imported when it is used."""
    if "rlm_broker" not in project.modules:
        return
    source = project.modules["rlm_broker"]
    maps = [each.value for each in source.tree.body if isinstance(each, ast.Assign | ast.AugAssign)]
    modules, others, *_ = [ast.literal_eval(each) for each in maps if isinstance(each, ast.Dict)]
    counted = Counter(name for names in modules.values() for name in names.split())
    loaded = {name: f"rlm_broker.{module}" for module, names in modules.items() for name in names.split()} | others
    for name in sorted(public.keys() ^ loaded.keys()) + [name for name in public if loaded.get(name) != public[name]]:
        yield Finding(FACE, 1, f"{name}: the TYPE_CHECKING block and _MODULES differ")
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and public.get(node.names[0].name) == node.module:
            yield from (
                Finding(FACE, node.lineno, f"{alias.name} is imported without `as {alias.name}`, so it is not exported")
                for alias in node.names
                if alias.asname != alias.name
            )
    taken = {name.split(".")[1] for name in project.modules if name.startswith("rlm_broker.")}
    for name in [each for each, times in counted.items() if times > 1] + sorted(taken & counted.keys()):
        yield Finding(FACE, 1, f"{name} is exported twice, or is the name of a module")


def definition_of(source: Source, name: str) -> ast.stmt | None:
    """Return the class, function or assignment of a module that defines a name."""
    body = source.tree.body
    for node in (*body, *(inner for each in body if isinstance(each, ast.If) for inner in each.body)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
    return None


def _is_documented(source: Source, node: ast.stmt) -> bool:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return ast.get_docstring(node) is not None or "__doc__ = " in ast.unparse(node.body[0])
    after = source.tree.body[source.tree.body.index(node) + 1 :]
    return bool(after) and isinstance(after[0], ast.Expr) and is_text(after[0].value)


def origin(source: Source, name: str) -> tuple[str, str]:
    """Return the module and the name there of a name that a module uses."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return (node.module or "", alias.name) if isinstance(node, ast.ImportFrom) else (name, name)
    return source.name, name


def _annotations(project: Project, source: Source, node: ast.stmt) -> Iterator[tuple[str, ast.expr, Source]]:
    """Yield each annotation of a public class, with its bases of ours, function or alias: where, what, and its file."""
    if isinstance(node, FUNCTIONS):
        yield from ((where, each, source) for where, each in _of_function(node.name, node))
    elif isinstance(node, ast.ClassDef):
        has_constructor = False
        for home, kind in _with_bases(project, source, node):
            for where, each in _of_class(kind, _has_fields(project, home, kind), not has_constructor):
                yield where, each, home
            has_constructor = has_constructor or any(getattr(each, "name", "") == "__init__" for each in kind.body)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Subscript | ast.BinOp):
        yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node.value, source


def _with_bases(project: Project, source: Source, kind: ast.ClassDef) -> Iterator[tuple[Source, ast.ClassDef]]:
    yield source, kind
    for base in kind.bases:
        module, name = origin(source, ast.unparse(base).partition("[")[0])
        home = project.modules.get(module)
        definition = definition_of(home, name) if home else None
        if home is not None and isinstance(definition, ast.ClassDef):
            yield from _with_bases(project, home, definition)


def _has_fields(project: Project, source: Source, kind: ast.ClassDef) -> bool:
    kinds = [each for _, each in _with_bases(project, source, kind)]
    made_by = {ast.unparse(part).rpartition(".")[2] for each in kinds for part in (*each.bases, *each.decorator_list)}
    return any(re.match(r"Struct|BaseModel|TypedDict|dataclass", each) for each in made_by)


def _of_class(kind: ast.ClassDef, has_fields: bool, is_constructed: bool) -> Iterator[tuple[str, ast.expr]]:
    made_elsewhere = re.search(r"Made by `|` makes it\b", ast.get_docstring(kind) or "")
    is_constructed = is_constructed and not made_elsewhere  # users get it from a function that its docstring names
    for node in kind.body:
        if isinstance(node, FUNCTIONS):
            if any(ast.unparse(each) == "overload" for each in node.decorator_list):
                continue  # the function behind them has the same arguments
            if node.name == "__call__" or not node.name.startswith("_") or (node.name == "__init__" and is_constructed):
                yield from _of_function(f"{kind.name}.{node.name}", node)
        elif has_fields and isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            yield f"{kind.name}.{ast.unparse(node.target)}", node.annotation


def _of_function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None and each.annotation is not None:
            yield f"{name}({each.arg})", each.annotation
    if node.returns is not None:
        yield f"{name} ->", node.returns


def _names(node: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, without the values of literals and the facts about an annotated type."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _names(ast.parse(node.value, mode="eval").body)
    elif isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Annotated":
        yield from _names(node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice)
    elif not (isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Literal"):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _names(child)


def _is_public(project: Project, public: dict[str, str], source: Source, used: str) -> bool:
    first, _, rest = used.partition(".")
    module, name = origin(source, first)
    if {module, module.partition(".")[0]} & (sys.stdlib_module_names | THIRD_PARTY) or hasattr(builtins, used):
        return True
    if rest and module in project.modules:
        return public.get(rest) == module
    if public.get(name) == module:
        return True
    home = project.modules.get(module)
    definition = definition_of(home, name) if home else None
    if module.partition(".")[0] not in PACKAGES or home is None or definition is None:
        return False
    if not isinstance(definition, ast.Assign | ast.AnnAssign) or definition.value is None:
        return False
    if "TypeVar(" in ast.unparse(definition.value) or "ParamSpec(" in ast.unparse(definition.value):
        return True
    return all(_is_public(project, public, home, each) for each in _names(definition.value))
