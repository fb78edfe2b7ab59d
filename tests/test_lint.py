"""Each rule of `scripts.lint`, on a small tree that breaks it. The command itself reads this repository, and no test does."""

import re
import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rlm_broker
from scripts.lint import documents, examples, patterns, prose, public_names, ratchet, rooms, shapes
from scripts.lint.project import Figure, Finding, Project
from tests.support.tables import table

TABLE = """
| room | subject | floor | packages |
| --- | --- | --- | --- |
| `sandbox_worker` | code in a sandbox | 1 | |
| `sandbox_worker.wire` | messages | 2 | msgspec |
| `sandbox_worker.init` | pid 1 | 3 | numpy |
| `sandbox_worker.zygote` | the fork server | 4 | |
| `rlm_broker` | values | 3 | |
| `rlm_broker.run` | runs | 4 | |
| `rlm_broker.rlm`, `engine` | the front door | 5 | |
| `rlm_broker.batch` | batches | 6 | |
"""
FACE = """
if TYPE_CHECKING:
    from rlm_broker.run.run import Run as Run
_MODULES = {"run.run": "Run"}
_PUBLIC |= {}
"""
PUBLIC = '''
from rlm_broker.run.tree import Tree
Alias = Tree | None
class Run:
    """A run."""
    def tree(self, deep: "list[int]") -> int:
        """Return it."""
'''
CLEAN = {
    "ARCHITECTURE.md": TABLE,
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n### Added\n- A door.\n",
    "rlm_broker/__init__.py": FACE,
    "rlm_broker/run/run.py": PUBLIC,
    "rlm_broker/run/tree.py": 'class Tree:\n    """A tree."""\n',
    "rlm_broker/rlm.py": "from rlm_broker.run.run import Run\n",
    "sandbox_worker/wire/frames.py": "import msgspec\n",
    "sandbox_worker/init/main.py": "from sandbox_worker.wire.frames import x\n",
    "sandbox_worker/zygote/main.py": "import sandbox_worker.init.main\n",
    "sandbox_worker/__init__.py": "RELEASE = 1\n",
    "rlm_broker/batch/batch.py": "from rlm_broker import rlm\n",
    "docs/page.md": "# A page\n\n## Two words\n",
    "tests/test_run.py": "def test_run() -> None: ...\n",
}


def project(root: Path, **changed: str) -> Project:
    for path, text in (CLEAN | changed).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Project(root)


def findings(found: Iterator[Finding]) -> list[str]:
    return [str(each) for each in found]


def counted(figures: Iterator[Figure]) -> dict[tuple[str, str], int]:
    return {(figure.subject, figure.kind): figure.value for figure in figures if figure.value}


@table("rule", [prose, rooms, shapes, documents, public_names, patterns])
def test_tree_that_holds_the_rules_has_no_findings(tmp_path: Path, rule: object) -> None:
    rules: Callable[[Project], Iterator[Finding]] = getattr(rule, "rules")  # noqa: B009 - of a module
    found = findings(rules(project(tmp_path)))
    exceptions = [each for each in found if "exceptions that no annotation needs" in each]
    assert found == exceptions


LONG = "def f() -> None:\n" + "    x = 1\n" * 60
RUN = "rlm_broker/run/run.py"
BREAKS = [
    (prose, "rlm_broker/run/tree.py", '"""Tell everybody."""', ":1: says 'everybody': name the actor"),
    (prose, "scripts/x.py", "def for_whoever() -> None: ...", ":1: says 'whoever': name the actor"),
    (prose, "scripts/x.py", "x = 1  # as nobody knows", ":1: says 'nobody'"),
    (prose, "scripts/x.py", "raise ValueError('anybody')", ":1: says 'anybody'"),
    (prose, "examples/x.py", 'class A:\n    """What it is."""', ":2: begins with 'What'"),
    (prose, "docs/page.md", "Nothing is " + "very " * 500, "docs:1: has 1.99 indefinite pronouns"),
    (prose, "docs/page.md", f"| a | {'b' * 121} |", ":1: a cell has more than 120 characters"),
    (rooms, "rlm_broker/new/a.py", "x = 1", ":1: its folder has no row"),
    (rooms, "ARCHITECTURE.md", f"{TABLE}| `rlm_broker.gone` | old | 7 | |\n", ":1: the table names rlm_broker.gone"),
    (rooms, RUN, f"import numpy\n{PUBLIC}", ":1: imports numpy, which the row of rlm_broker.run"),
    (rooms, RUN, f"from . import tree\n{PUBLIC}", ":1: relative import"),
    (rooms, RUN, "from rlm_brokers import x", ":1: imports rlm_brokers"),
    (rooms, RUN, "import sandbox_worker.init.main", ":1: imports sandbox_worker.init.main, which runs in another"),
    (rooms, "sandbox_worker/init/main.py", "import numpy", ":1: imports numpy: code of a worker has"),
    (rooms, "sandbox_worker/init/main.py", "import rlm_broker", ":1: imports rlm_broker, which runs in another"),
    (
        rooms,
        "sandbox_worker/init/main.py",
        "import sandbox_worker.zygote.main",
        "init/main.py:1: imports sandbox_worker.zy",
    ),
    (shapes, RUN, "x = 1\n" * 601, ":1: has 601 lines, of at most 600"),
    (shapes, RUN, LONG, ":1: f has 61 lines, of at most 60"),
    (shapes, RUN, "if level.name == 'strict': ...", ":1: compares the name of a level"),
    (
        shapes,
        "tests/test_a.py",
        "@pytest.mark.parametrize('n', rlm_broker.__all__)\ndef test(n): ...",
        ":1: a parameter is",
    ),
    (
        shapes,
        "tests/test_a.py",
        "P = sorted(X.rglob('*.py'))\n@table('n', P)\ndef test(n): ...",
        ":2: a p",
    ),
    (documents, "docs/page.md", "[a](gone.md)", "](gone.md): no such file"),
    (documents, "docs/page.md", "# One word\n[a](#two-words)", ":2: ](#two-words): no such anchor"),
    (documents, "docs/page.md", "`rlm_broker/gone.py`", ": no such file"),
    (documents, "docs/page.md", "`rlm_broker/run/run.py:Walk`", "it does not define Walk"),
    (documents, "docs/page.md", "`run/run.py:Run.walk`", ": no such function"),
    (documents, "docs/page.md", "```\npython -m scripts.gone\n```", ":2: python -m scripts.gone: no such script"),
    (documents, "docs/page.md", "`test_nothing_of_it`", ": no such test"),
    (documents, "CHANGELOG.md", "# Changelog\n\n## 1.0\n", ":3: the first release is [Unreleased]"),
    (documents, "CHANGELOG.md", "## [Unreleased]\n### Fixed\n- x\n### Added\n- x\n", ":4: each section once"),
    (documents, "CHANGELOG.md", "## [Unreleased]\n### Fixed\n\n### Security\n- x\n", ":2: a section without entries"),
    (documents, "CHANGELOG.md", "## [Unreleased]\n### Fixed\nx\n", ":3: an entry begins with"),
    (public_names, RUN, "class Walk: ...", "Run is not defined in rlm_broker.run.run"),
    (public_names, RUN, "class Run: ...", ":1: Run is public and has no docstring"),
    (public_names, RUN, PUBLIC.replace("-> int", "-> Alias"), "Run.tree -> needs Alias, which is not public"),
    (public_names, RUN, PUBLIC.replace("list[int]", "list[Tree]"), "Run.tree(deep) needs Tree, which is not public"),
    (public_names, "rlm_broker/__init__.py", FACE.replace('": "Run', '": "Walk'), ":1: Walk: the TYPE_CHECKING block"),
    (public_names, "rlm_broker/__init__.py", FACE.replace(" as Run", ""), "imported without `as Run`"),
    (public_names, "rlm_broker/__init__.py", FACE.replace('"Run"', '"Run Run"'), "Run is exported twice"),
    (examples, RUN, PUBLIC, "Run is public and has no example"),
    (examples, RUN, PUBLIC, "0 of 1 public methods have an example"),
    (examples, RUN, PUBLIC.replace("A run.", ">>> Run()"), "scripts/lint/examples.py:1: exceptions that do not hold"),
]


@table("rule, path, text, said", BREAKS)
def test_rule_finds_what_breaks_it(tmp_path: Path, rule: object, path: str, text: str, said: str) -> None:
    rules: Callable[[Project], Iterator[Finding]] = getattr(rule, "rules")  # noqa: B009 - of a module
    found = findings(rules(project(tmp_path, **{path: text})))
    assert any(said in each for each in found), found


def test_arrows_floors_and_circles_are_counted(tmp_path: Path) -> None:
    clean = counted(rooms.figures(project(tmp_path / "clean")))
    run = "from rlm_broker.rlm import RLM\ndef f() -> None:\n    import rlm_broker.run.tree\n"
    changed = counted(rooms.figures(project(tmp_path / "changed", **{RUN: run})))
    assert {what: changed[what] for what in changed.keys() - clean.keys()} == {
        ("rlm_broker.run->rlm_broker.rlm", "up"): 1,
        ("all", "arrows_up"): 1,
        ("all", "circles"): 1,
        ("all", "rooms_in_circles"): 2,
        ("rlm_broker.run", "imports_in_functions"): 1,
    }
    assert changed["all", "arrows"] == clean["all", "arrows"] + 1
    assert (clean["all", "floors"], changed["all", "floors"]) == (3, 3)
    assert clean["all", "rooms"] == 8


def test_internal_names_that_the_ring_imports_are_counted(tmp_path: Path) -> None:
    text = "from rlm_broker.run.run import Run\nfrom rlm_broker.run.tree import Tree\nfrom rlm_broker.batch import x\n"
    found = counted(rooms.figures(project(tmp_path, **{"rlm_broker/batch/batch.py": text})))
    assert found["rlm_broker.batch", "internal_names"] == 1


TOO_MANY = f"def f({', '.join('abcdefghi')}): ..."
CONSTRUCTOR = f'class Run:\n    """A."""\n    def __init__(self, {", ".join("abcdefghijkl")}): ...'
SHAPES = [
    ("rlm_broker.run", "parameters", {RUN: TOO_MANY}, 1),
    ("rlm_broker.run", "parameters", {RUN: CONSTRUCTOR}, None),
    ("rlm_broker.run", "parameters", {RUN: CONSTRUCTOR.replace("self,", "self, m,")}, 1),
    ("rlm_broker.run", "handed_on", {RUN: "def f(**given: Any):\n    g(**given)"}, 1),
    ("rlm_broker.run", "handed_on", {RUN: "def f(**given: Any):\n    g(given)"}, None),
    ("rlm_broker.run", "verbs", {"rlm_broker/run/telling.py": "", "rlm_broker/run/brought.py": ""}, 2),
    ("rlm_broker.run", "verbs", {"rlm_broker/run/string.py": "", "rlm_broker/run/routing.py": ""}, None),
    ("rlm_broker.run", "mergeable", {}, 1),
    ("rlm_broker.run", "mergeable", {"rlm_broker/run/tree.py": "x = 1\n" * 101}, None),
    ("rlm_broker.run", "mergeable", {RUN: PUBLIC + "x = 1\n" * 595}, None),
    ("rlm_broker.run", "mergeable", {"rlm_broker/rlm.py": "import rlm_broker.run.tree"}, None),
    ("rlm_broker.run", "modules", {"rlm_broker/run/x.py": ""}, 3),
    ("rlm_broker.run", "code", {RUN: '"""A."""\n\n# b\nx = 1\ny = """\n\nz"""\n'}, 5),
    ("rlm_broker.run", "lines", {RUN: '"""A."""\n\n# b\nx = 1\n'}, 6),
    ("rlm_broker", "root_modules", {"rlm_broker/engine.py": ""}, 2),
    ("class:Tree", "same_names", {RUN: "class Tree: ..."}, 2),
    ("tests", "test_lines", {}, 1),
]


@table("subject, kind, changed, value", SHAPES)
def test_shapes_are_counted(
    tmp_path: Path, subject: str, kind: str, changed: dict[str, str], value: int | None
) -> None:
    assert counted(shapes.figures(project(tmp_path, **changed))).get((subject, kind)) == value


def test_ratchet_refuses_more_and_writes_less(tmp_path: Path) -> None:
    """A figure above the ratchet is found, `write` lowers and never raises, and doubles of a merge count once."""
    tree = project(tmp_path)
    file = tmp_path / ratchet.FILE
    file.parent.mkdir(parents=True)
    ratchet.write(tree, [Figure("a", "lines", 75), Figure("b", "verbs", 3), Figure("c", "verbs", 1)])
    assert ratchet.read(tree) == {("a", "lines"): (100, 4), ("b", "verbs"): (3, 5), ("c", "verbs"): (1, 6)}
    grown = [Figure("a", "lines", 101), Figure("b", "verbs", 2), Figure("d", "verbs", 1, ("d.py",))]
    assert findings(ratchet.rules(tree, grown)) == [
        f"{ratchet.FILE}:4: a has 101 lines, not 100: merge, shorten, or remove what it replaces",
        f"{ratchet.FILE}:1: d has 1 file names that are verbs or participles, not 0: name a thing (d.py)",
    ]
    file.write_text(file.read_text() + "b verbs 5  # a reason\n")
    assert ratchet.read(tree)["b", "verbs"] == (5, 7)
    ratchet.write(tree, grown)
    assert {what: value for what, (value, _) in ratchet.read(tree).items()} == {("a", "lines"): 100, ("b", "verbs"): 2}


def test_possessive_groups_are_found_in_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = project(tmp_path, **{"rlm_broker/bad_patterns.py": "import re\nBAD = re.compile('(?:ab?c)++')\n"})
    monkeypatch.setattr(rlm_broker, "__path__", [*rlm_broker.__path__, str(tmp_path / "rlm_broker")])
    (found,) = findings(patterns.rules(tree))
    assert found.startswith("rlm_broker/bad_patterns.py:1: rlm_broker.bad_patterns.BAD: write (?>")


@table(
    "pattern, text",
    [("(?:ab?c)++", "aca"), (r"(?:[^-]|-(?!----))*+", "a-----"), (r"(?:\.[a-z]++)++", ".a."), ("(?:(a)|b)*+", "ab")],
)
def test_faults_of_3_11_2_are_recognized(pattern: str, text: str) -> None:
    """Patterns that CPython 3.11.2 matches otherwise are recognized, and atomic forms of them are not."""
    assert not all(map(patterns.goes_back, patterns.groups(parser.parse(pattern))))
    atomic = re.compile(f"(?>{pattern[:-1]})")
    assert not list(patterns.groups(parser.parse(atomic.pattern)))
    assert atomic.match(text)
