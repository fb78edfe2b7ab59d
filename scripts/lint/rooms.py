"""The table of rooms in ARCHITECTURE.md and the imports of the code agree.

A row names a room, that is a folder below a package, or modules at a package's root; its subject; its floor; and the
packages of others that it may import.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from scripts.lint.project import FUNCTIONS, PACKAGES, Figure, Finding, Project

NEVER = {
    "rlm_broker": ("sandbox_worker.zygote", "sandbox_worker.init", "sandbox_worker.repl", "sandbox_worker.isolation"),
    "sandbox_worker": ("rlm_broker",),
    "sandbox_worker.repl": ("sandbox_worker.init", "sandbox_worker.zygote", "sandbox_worker.isolation"),
    "sandbox_worker.init": ("sandbox_worker.zygote",),
    "rlm_broker.broker": ("rlm_broker.run", "rlm_broker.sandbox"),
    "rlm_broker.broker.transport": ("rlm_broker.broker.broker", "rlm_broker.broker.routing", "rlm_broker.sandbox"),
}
"""Imports that no change of the table may allow: security rests on which code runs in which process."""
WORKER_MAY_IMPORT = {"msgspec", "jsonschema"}
"""Packages of others that may run in a worker; what else it loaded, each fork would pay for."""
RING = ("serve", "batch", "cli", "evaluation")
"""Rooms that are built on the public names."""
ROW = re.compile(r"^\| (`[\w., `]+`) \|[^|]*\| (\d+) \|([^|]*)\|$", re.MULTILINE)


class Row(NamedTuple):
    """A room, as the table has it."""

    room: str
    floor: int
    packages: frozenset[str]


@functools.cache
def table(project: Project) -> dict[str, Row]:
    """Return the row of each name in the first column. Modules that share a row share a room."""
    rows: dict[str, Row] = {}
    for names, floor, packages in ROW.findall((project.root / "ARCHITECTURE.md").read_text()):
        first, *others = re.findall(r"[\w.]+", names)
        prefixes = [first, *(f"{first.rpartition('.')[0] or first}.{each}" for each in others)]
        row = Row(first, int(floor), frozenset(re.findall(r"\w+", packages)))
        rows |= dict.fromkeys(prefixes, row)
    return rows


def row_of(project: Project, module: str) -> Row | None:
    """Return the row of the longest name that a module is, or lies in; one of a package stands for its root alone."""
    rows = table(project)
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    found = next((name for name in names if name in rows), None)
    is_unknown_folder = found in PACKAGES and ".".join(parts[:2]) in project.folders
    return None if found is None or is_unknown_folder else rows[found]


def rules(project: Project) -> Iterator[Finding]:
    """Yield modules without a row, rows without a module, and imports that no table may allow or that ours does not."""
    used = set()
    for module, source in project.modules.items():
        row = row_of(project, module)
        if row is None:
            yield Finding(source.path, 1, "its folder has no row in the table of ARCHITECTURE.md")
            continue
        used.add(row.room)
        for node, name in source.imports():
            yield from (Finding(source.path, node.lineno, fault) for fault in _faults(module, row, name))
    missing = {row.room for row in table(project).values()} - used
    yield from (Finding("ARCHITECTURE.md", 1, f"the table names {room}, which is no room") for room in missing)


def _faults(module: str, row: Row, name: str) -> Iterator[str]:
    package = name.partition(".")[0]
    if name.startswith("."):
        yield "relative import: write the whole name"
    elif package not in PACKAGES:
        if package not in row.packages:
            yield f"imports {package}, which the row of {row.room} in ARCHITECTURE.md does not name"
        if module.startswith("sandbox_worker") and package not in WORKER_MAY_IMPORT:
            yield f"imports {package}: code of a worker has the standard library and msgspec alone"
    for room, others in NEVER.items():
        if f"{module}.".startswith(f"{room}.") and f"{name}.".startswith(tuple(f"{other}." for other in others)):
            yield f"imports {name}, which runs in another process or stands on what imports it: no table may allow that"


def figures(project: Project) -> Iterator[Figure]:
    """Yield what is counted of imports: arrows, floors, circles, imports in functions, internal names of the ring."""
    arrows: dict[tuple[Row, Row], list[str]] = defaultdict(list)
    inner: dict[str, list[str]] = defaultdict(list)
    internal: dict[str, set[str]] = defaultdict(set)
    public = public_names(project)
    for module, source in project.modules.items():
        row = row_of(project, module)
        if row is None:
            continue
        nested = {each for node in source.nodes if isinstance(node, FUNCTIONS) for each in ast.walk(node)}
        for node, name in source.imports():
            target = project.module_of(name)
            other = row_of(project, target) if target else None
            if node in nested and not module.startswith("rlm_broker.cli."):
                inner[row.room].append(f"{source.path}:{node.lineno}")
            if other is None or other == row:
                continue
            arrows[row, other].append(f"{source.path}:{node.lineno}")
            is_public = target in (public.get(name.rpartition(".")[2]), "rlm_broker")
            if _is_ring(module) and not _is_ring(name) and not is_public:
                internal[row.room].add(name)
    yield from (Figure(room, "imports_in_functions", len(at), tuple(at)) for room, at in inner.items())
    yield from (Figure(room, "internal_names", len(names), tuple(sorted(names))) for room, names in internal.items())
    for (row, other), places in arrows.items():
        if other.floor >= row.floor:
            yield Figure(f"{row.room}->{other.room}", "up", len(places), tuple(places))
    edges: dict[str, set[str]] = {row.room: set() for row in table(project).values()}
    for row, other in arrows:
        edges[row.room].add(other.room)
    circles = [sorted(circle) for circle in _circles(edges) if len(circle) > 1]
    yield Figure("all", "rooms", len(edges))
    yield Figure("all", "arrows", len(arrows))
    yield Figure("all", "arrows_up", sum(other.floor >= row.floor for row, other in arrows))
    yield Figure("all", "circles", len(circles), tuple(map(" ".join, circles)))
    yield Figure("all", "rooms_in_circles", sum(map(len, circles)))
    yield Figure("all", "floors", _floors(edges))


def public_names(project: Project) -> dict[str, str]:
    """Return the module of each public name, as `rlm_broker/__init__.py` shows it to type checkers."""
    source = project.modules.get("rlm_broker")
    nodes = [node for block in source.tree.body if isinstance(block, ast.If) for node in block.body] if source else []
    return {alias.name: node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def _is_ring(name: str) -> bool:
    return name.split(".")[:2] in [["rlm_broker", room] for room in RING]


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found


def _circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the rooms in groups, each of which reaches itself by imports; a room by itself is a group as well."""
    reached = {room: _reached(edges, room) for room in edges}
    return {frozenset({room, *(each for each in there if room in reached[each])}) for room, there in reached.items()}


def _floors(edges: dict[str, set[str]]) -> int:
    """Return the length of the longest way down, where each circle is one step."""
    circle_of = {room: circle for circle in _circles(edges) for room in circle}

    @functools.cache
    def height(circle: frozenset[str]) -> int:
        below = {circle_of[other] for room in circle for other in edges[room]} - {circle}
        return 1 + max(map(height, below), default=0)

    return max(map(height, circle_of.values()), default=0)
