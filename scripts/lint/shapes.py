"""Sizes and names: of modules, functions, parameters, files, classes and tests."""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from scripts.lint.project import FUNCTIONS, Figure, Finding, Project, Source, room_of
from scripts.lint.rooms import public_names

LONGEST_MODULE = 600
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_PARAMETERS_OF_CONSTRUCTORS = 12
"""Parameters of a public class's `__init__`; what a user has to write out needs no object around it."""
MAKE_ROWS = ("pytest.mark.parametrize", "table", "tables.table")
"""Decorators that call a test once for each row."""
SMALL_MODULE = 100
"""Lines below which a module with one importer, in its own folder, belongs into that module."""
VERBS = re.compile(
    r"(\w+[^r_]ing|\w+[^es]ed|(?:.*_)?(asked|brought|found|handed|told|held|kept|lost|made|sent|served|shown|stored|sure))"
)
"""File names that are verbs or participles."""
NOUNS = {
    "bell",
    "decoding",
    "embed",
    "encoding",
    "feed",
    "needed",
    "parsing",
    "processing",
    "recording",
    "routing",
    "scoring",
    "seed",
    "string",
    "thing",
}
"""File names of that form which are nouns of the field."""
LEVELS: set[object] = {"strict", "standard", "process"}
"""Names of isolation levels, for users and the wire."""


def rules(project: Project) -> Iterator[Finding]:
    """Yield long modules and functions, and tests whose parameters are source files or names of our own."""
    for source in project.modules.values():
        if source.lines > LONGEST_MODULE:
            yield Finding(
                source.path, 1, f"has {source.lines} lines, of at most {LONGEST_MODULE}: find its two stories"
            )
        for node in source.nodes:
            if isinstance(node, FUNCTIONS) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION:
                yield Finding(source.path, node.lineno, f"{node.name} has {lines} lines, of at most {LONGEST_FUNCTION}")
            if isinstance(node, ast.Compare) and _literals(node) & LEVELS:
                yield Finding(source.path, node.lineno, "compares the name of a level: ask the level for a fact")
    for source in project.python("tests"):
        yield from _parametrized_by_files(source)


def _literals(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


def _parametrized_by_files(source: Source) -> Iterator[Finding]:
    """Yield tests that run once for each file or public name, which a rule of this command checks in one go."""
    made_of_files = {
        target.id
        for node in source.tree.body
        if isinstance(node, ast.Assign) and _names_our_files(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "pytest.mark.parametrize",
            "table",
            "tables.table",
        ):
            used = {each.id for part in node.args[1:] for each in ast.walk(part) if isinstance(each, ast.Name)}
            if made_of_files & used or any(map(_names_our_files, node.args[1:])):
                yield Finding(source.path, node.lineno, "a parameter is a source file or a name of ours: write a rule")


def _names_our_files(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute)
        and (each.attr == "__all__" or (each.attr in ("glob", "rglob") and ".py" in ast.unparse(node)))
        for each in ast.walk(node)
    )


def figures(project: Project) -> Iterator[Figure]:
    """Yield sizes of rooms and tests, and counts of what may only become less."""
    for room, sources in _by_room(project).items():
        yield Figure(room, "lines", sum(each.lines for each in sources))
        yield Figure(room, "code", sum(each.code for each in sources))
        yield Figure(room, "modules", len(sources))
        yield _counted(room, "verbs", [each.path for each in sources if _is_verb(each.name)])
        yield _counted(room, "parameters", [place for each in sources for place in _long_signatures(project, each)])
        yield _counted(room, "handed_on", [place for each in sources for place in _handed_on(each)])
        yield _counted(room, "mergeable", [each.path for each in sources if _merges(project, each)])
    yield Figure(
        "rlm_broker", "root_modules", sum(name.count(".") == 1 for name in project.modules if _is_root(project, name))
    )
    for name, paths in _classes(project).items():
        if len(paths) > 1:
            yield Figure(f"class:{name}", "same_names", len(paths), tuple(paths))
    folders: Counter[str] = Counter()
    for source in project.python("tests"):
        folders["/".join(source.path.split("/")[: min(3, source.path.count("/"))])] += source.lines
    yield from (Figure(folder, "test_lines", lines) for folder, lines in folders.items())


def _by_room(project: Project) -> dict[str, list[Source]]:
    found: dict[str, list[Source]] = defaultdict(list)
    for name, source in project.modules.items():
        found[name.partition(".")[0] if _is_root(project, name) else room_of(name)].append(source)
    return found


def _is_root(project: Project, name: str) -> bool:
    return name.count(".") == 0 or (name.count(".") == 1 and not project.modules[name].path.endswith("__init__.py"))


def _counted(subject: str, kind: str, places: list[str]) -> Figure:
    return Figure(subject, kind, len(places), tuple(places))


def _is_verb(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name not in NOUNS and VERBS.fullmatch(name) is not None


def _long_signatures(project: Project, source: Source) -> Iterator[str]:
    """Yield functions with more parameters than a reader keeps in mind; public constructors may have more."""
    public = {name for name, module in public_names(project).items() if module == source.name}
    constructors = {
        each
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and node.name in public
        for each in node.body
        if isinstance(each, FUNCTIONS) and each.name == "__init__"
    }
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [each for each in parameters if each.arg not in ("self", "cls")]
            if len(named) > (MOST_PARAMETERS_OF_CONSTRUCTORS if node in constructors else MOST_PARAMETERS):
                yield f"{source.path}:{node.lineno} {node.name} takes {len(named)}"


def _handed_on(source: Source) -> Iterator[str]:
    """Yield functions that take `**given: Any` only to hand it on, so that the types of the arguments are lost."""
    for node in source.nodes:
        if isinstance(node, FUNCTIONS) and (given := node.args.kwarg) and given.annotation is not None:
            inner = [each for statement in node.body for each in ast.walk(statement)]
            uses = [each for each in inner if isinstance(each, ast.Name) and each.id == given.arg]
            keywords = [each.value for each in inner if isinstance(each, ast.keyword) and each.arg is None]
            if ast.unparse(given.annotation) == "Any" and uses and all(use in keywords for use in uses):
                yield f"{source.path}:{node.lineno} {node.name}"


def _merges(project: Project, source: Source) -> bool:
    """Return whether a small module has one importer, in its own folder, into which it would fit."""
    importers = _importers(project).get(source.name, set())
    if source.lines >= SMALL_MODULE or len(importers) != 1 or source.path.endswith("__init__.py"):
        return False
    (other,) = importers
    return _folder(other) == _folder(source) and other.lines + source.lines <= LONGEST_MODULE


def _folder(source: Source) -> str:
    return source.path.rpartition("/")[0]


@functools.cache
def _importers(project: Project) -> dict[str, set[Source]]:
    found: dict[str, set[Source]] = defaultdict(set)
    for source in project.modules.values():
        for _, name in source.imports():
            if target := project.module_of(name):
                found[target].add(source)
    return found


def _classes(project: Project) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for source in project.modules.values():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{source.path}:{node.lineno}")
    return found
