"""`scripts.mutation` on a small module with one test module, which it mutates in a copy."""

import json
from pathlib import Path

import pytest

from scripts.mutation import __main__ as command
from scripts.mutation import table, trials
from scripts.mutation.mutants import mutants_of, sampled
from scripts.mutation.table import MODULES, Survivor
from scripts.mutation.trials import FailsAnyway, Tried, try_all
from tests.support import tables
from tests.support.places import PROJECT

SMALL = """
def is_allowed(spent, most, is_strict=True):
    if is_strict and spent >= most:
        return False
    return True


def waits(spent):
    while spent > 0:
        spent -= 1
    return spent
"""
TESTS = """
import small

def test_allowed():
    assert small.is_allowed(1, 2) is True
    assert small.is_allowed(3, 2) is False

def test_waits():
    assert small.waits(3) == 0
"""


TRIED = ("spent >= most", "is_strict and spent >= most", "True", "spent -= 1")
"""Texts of the module that are changed."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "small.py").write_text(SMALL)
    (folder / "test_small.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def tried(root: Path) -> list[Tried]:
    with pytest.MonkeyPatch.context() as patched:  # each fault that is tried is a process
        patched.setattr(trials, "mutants_of", lambda source: [each for each in mutants_of(source) if each.was in TRIED])
        return try_all(root, {"small.py": ["test_small.py"]}, jobs=2)


def changes(tried: list[Tried], outcome: str) -> list[tuple[str, str]]:
    return [(each.mutant.was, each.mutant.becomes) for each in tried if each.verdict.outcome == outcome]


def test_unnoticed_fault_survives(tried: list[Tried], root: Path) -> None:
    """A fault that no test notices survives, and the module stays unchanged."""
    assert changes(tried, "passed") == [("spent >= most", "(spent > most)")]
    assert {("True", "False"), ("is_strict and spent >= most", "(is_strict or spent >= most)")} <= {
        *changes(tried, "failed")
    }
    assert (root / "small.py").read_text() == SMALL
    assert [each.mutant.line for each in tried if each.survived] == [3]


def test_endless_fault_is_ended_and_noticed(tried: list[Tried]) -> None:
    assert ("spent -= 1", "pass") in changes(tried, "too slow")


def test_failing_tests_are_no_proof(root: Path) -> None:
    (root / "test_wrong.py").write_text("def test_wrong(): assert False")
    with pytest.raises(FailsAnyway, match=r"test_wrong.py: failed without any fault in small.py"):
        try_all(root, {"small.py": ["test_wrong.py"]})


def test_known_survivors_are_explained(tried: list[Tried]) -> None:
    """A known survivor is explained; one that died or is gone is reported."""
    known = Survivor("small.py", "is_allowed", "spent >= most", "(spent > most)", "an example")
    died = Survivor("small.py", "waits", "spent -= 1", "pass", "an example")
    gone = Survivor("small.py", "was_here", "1", "(2)", "an example")
    other = Survivor("other.py", "was_here", "1", "(2)", "an example")
    assert [each.mutant.was for each in table.unexplained(tried, [])] == ["spent >= most"]
    assert table.unexplained(tried, [known, other]) == []
    assert table.outdated(tried, [known, died, gone, other], all_were_tried=True) == [died, gone]
    assert table.outdated(tried, [known, died, gone, other], all_were_tried=False) == [died]


MUTATED = [
    ("x = a < b", ["x = (a <= b)", "x = (a >= b)"]),
    ("x = a < b == c", ["x = (a <= b == c)", "x = (a >= b == c)", "x = (a < b != c)"]),
    ("x = a and b", ["x = (a or b)"]),
    ("x = not a", ["x = (a)"]),
    ("x = 5", ["x = (6)", "x = (4)"]),
    ("x = a + b", ["x = (a - b)"]),
    ("x = 'a' + b", []),
    ("x = f'{a < 1}'", []),
    ("x = max(a, b)", ["x = min(a, b)"]),
    ("f(a, b)", ["pass", "f(b, a)"]),
    ("x = f(a, a)", []),
    ("x.y = a", ["pass"]),
    ("x: Annotated[int, Field(ge=1)]", ["x: Annotated[int, Field(ge=(2))]", "x: Annotated[int, Field(ge=(0))]"]),
    ("if a: raise b", ["if a: pass", "if (not a): raise b"]),
    ("def f(a=True): return a", ["def f(a=False): return a", "def f(a=True): return None"]),
    ("async def f(): return await g()", ["async def f(): return None", "async def f(): return (g())"]),
    ("x = 'ä' if a else 1 < 2", ["x = 'ä' if (not a) else 1 < 2", "x = 'ä' if a else (1 <= 2)"]),
    ("import a\nassert a == 1", []),
]


@tables.table("source, expected", MUTATED)
def test_each_kind_of_fault(source: str, expected: list[str]) -> None:
    mutated = [each.source for each in mutants_of(source)]
    assert mutated[: len(expected)] == expected
    if not expected:
        assert mutated == []


def test_equal_faults_are_numbered() -> None:
    """Faults of equal text are told apart by a number."""
    assert [each.key for each in mutants_of("def f():\n    a(not b)\n    a(not b)") if each.was == "not b"] == [
        ("f", "not b", "(b)", 1),
        ("f", "not b", "(b)", 2),
    ]


def test_sample_is_fixed_by_its_seed() -> None:
    mutants = mutants_of(SMALL)
    assert sampled(mutants, 3, 1) == sampled(mutants, 3, 1)
    assert len(sampled(mutants, 3, 1)) == 3
    assert sampled(mutants, 3, 1) != sampled(mutants, 3, 2)
    assert sampled(mutants, None, 1) == sampled(mutants, 10_000, 1) == mutants


def test_table_names_existing_modules_and_tests() -> None:
    for module, tests in MODULES.items():
        assert tests
        assert all((PROJECT / path).is_file() for path in [module, *tests])
    for known in table.accepted():
        assert known.reason
        keys = [each.key for each in mutants_of((PROJECT / known.module).read_text())]
        assert (known.where, known.was, known.becomes, known.number) in keys, known


def test_command_prints_and_writes_each_fault(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tried.json"
    known = Survivor("small.py", "is_allowed", "spent >= most", "(spent < most)", "an example")
    monkeypatch.setattr(command, "PROJECT", root)
    monkeypatch.setattr(table, "MODULES", {"small.py": ["test_small.py"], "other.py": []})
    monkeypatch.setattr(table, "accepted", lambda: [known])
    sampled_alone = [each for each in mutants_of(SMALL) if each.was == "spent >= most"]
    monkeypatch.setattr(trials, "mutants_of", lambda _: sampled_alone)
    assert command.main(["small", "--json", str(file)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "small.py:3 survived, in is_allowed",
        "    -    if is_strict and spent >= most:",
        "    +    if is_strict and (spent > most):",
        f"{'small.py':45}    1 of    2 killed   50.0%, 0 known survivors",
        "no longer a survivor: small.py is_allowed: spent >= most -> (spent < most)",
    ]
    assert [each["outcome"] for each in json.loads(file.read_text())] == ["passed", "failed"]


def test_unknown_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["planet"]) == 2
    assert "no module of the table is named like that" in capsys.readouterr().err
