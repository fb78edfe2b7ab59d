"""Variables that a block has made or changed, in a REPL of its own process."""

from collections.abc import Iterator

import pytest

from sandbox_worker.wire.messages import MAX_VARIABLES
from tests.support.bare_repl import BareRepl, bare_repl
from tests.support.tables import table

Told = list[tuple[str, str, object]]
BEGIN = """
n, text, rows, table = 1000, 'x' * 5000, [0] * 5, {'a': 1}
class Odd: pass
odd = Odd()
def double():
    global n, rows
    n *= 2
    rows = [each for each in rows]
"""


@pytest.fixture
def repl() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        yield running


def told(repl: BareRepl, code: str) -> Told:
    ran = repl.run(code, tells_variables=True)
    return [(each.name, each.type, each.size) for each in ran.result.variables]


def test_new_variables_have_type_and_size(repl: BareRepl) -> None:
    assert told(repl, BEGIN) == [
        ("Odd", "type", None),
        ("double", "function", None),
        ("n", "int", None),
        ("odd", "Odd", None),
        ("rows", "list", 5),
        ("table", "dict", 1),
        ("text", "str", 5000),
    ]


def test_sizes_are_those_of_built_in_containers(repl: BareRepl) -> None:
    code = (
        "from collections import Counter as C\n"
        "class L(list):\n    def __len__(self): 1 / 0\n"
        "a, b, c, d, e = b'12', (1, 2, 3), {1}, C('aab'), L([1])\nf = range(3)\ng = True"
    )
    sizes = {name: (kind, size) for name, kind, size in told(repl, code)}
    assert [sizes[name] for name in "abcdefg"] == [
        ("bytes", 2),
        ("tuple", 3),
        ("set", 1),
        ("Counter", 2),
        ("L", 1),
        ("range", None),
        ("bool", None),
    ]


@table(
    "code, names",
    [
        ("print(n, text, rows)", []),
        ("n = n", []),
        ("n = n + 1", ["n"]),
        ("n += 1; n += 1; n += 1; n += 1", ["n"]),
        ("rows.append(1)", ["rows"]),
        ("rows.append(1); rows.pop()", []),
        ("rows[0] = 1", []),
        ("table['b'] = 2", ["table"]),
        ("rows = [1] * 5", ["rows"]),
        ("rows = [each for each in rows]\nrows = [each for each in rows]", ["rows"]),
        ("for _i in range(4): rows = [_i] * 5", ["_i", "rows"]),
        ("text = 'y' * 5000", ["text"]),
        ("text = text.upper(); text = text.lower()", ["text"]),
        ("odd.x = 5", []),
        ("odd = Odd()", ["odd"]),
        ("double()", ["n", "rows"]),
        ("class N:\n    rows = 5", ["N"]),
        ("def f():\n    rows = 5\nf()", ["f"]),
        (
            "def f():\n    def g():\n        global rows\n        rows = [each for each in rows]\n    g(); g()\nf()",
            ["f", "rows"],
        ),
        ("del odd", []),
        ("import json as text", ["text"]),
        ("z = 1\n1 / 0", ["z"]),
        ("x = = 1", []),
        ("globals()['w'] = 3", ["w"]),
        ("globals()['not a name'] = 3", []),
        ("globals()['long' * 16] = globals()['\\ud800'] = 3", []),
        ("context = 5; llm_query = 6; answer['content'] = 7; _ = 8; __x = 9", []),
        ("lines = search", ["lines"]),
        ("lines = [1]", ["lines"]),
    ],
)
def test_changed_variables_are_told(repl: BareRepl, code: str, names: list[str]) -> None:
    repl.run(BEGIN)
    assert [name for name, _, _ in told(repl, code)] == names


def test_changes_are_not_told_unless_asked(repl: BareRepl) -> None:
    assert repl.run("x = 1").result.variables == []


def test_changes_told_are_bounded(repl: BareRepl) -> None:
    code = "for _i in range(100): globals()[f'v{_i:03}'] = _i\nkind = type('K' * 100, (), {})()"
    found = told(repl, code)
    assert [name for name, _, _ in found] == ["_i", "kind", *(f"v{n:03}" for n in range(MAX_VARIABLES - 2))]
    assert found[1][1] == "K" * 60


def test_values_run_no_code(repl: BareRepl) -> None:
    code = (
        "class Meta(type):\n    def __getattribute__(self, name): print('meta')\n"
        "    def __eq__(self, other): print('meta eq')\n    def __hash__(self): print('meta hash')\n"
        "class Loud(metaclass=Meta):\n"
        "    def __getattribute__(self, name): print('loud')\n"
        "    def __len__(self): print('len')\n"
        "    def __eq__(self, other): print('eq')\n"
        "loud = Loud()"
    )
    ran = repl.run(code, tells_variables=True)
    assert ("loud", "Loud") in [(each.name, each.type) for each in ran.result.variables]
    assert repl.run("loud.x = 1", tells_variables=True).stdout == ran.stdout == ""


def test_dropped_object_is_freed_within_its_block(repl: BareRepl) -> None:
    repl.run("import weakref\nclass Big(list): pass\nbig = Big([0]); seen = weakref.ref(big)")
    assert repl.run("del big\nprint(seen())", tells_variables=True).stdout == "None\n"


def test_arrays_and_tables_have_their_shape(repl: BareRepl) -> None:
    pytest.importorskip("pandas")
    code = "import numpy, pandas\na = numpy.zeros((3, 4)); s = pandas.Series([1]); d = pandas.DataFrame({'x': [1, 2]})"
    assert told(repl, code)[0:2] == [("a", "ndarray", (3, 4)), ("d", "DataFrame", (2, 1))]
    assert ("s", "Series", (1,)) in told(repl, "s = s + 1; s = s + 1")
    assert told(repl, "pandas.DataFrame.shape = property(lambda self: 1 / 0)\nd = d + 1") == [("d", "DataFrame", None)]
    assert told(repl, "b = numpy.zeros((1,) * 9)") == [("b", "ndarray", None)]
