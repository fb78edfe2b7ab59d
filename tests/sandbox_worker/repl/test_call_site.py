"""`FINAL_VAR(x)` and `FINAL_VAR("x")` are told apart by the source of the call, in a REPL of its own process."""

from collections.abc import Iterator

import pytest

from tests.support.bare_repl import BareRepl, bare_repl


@pytest.fixture(scope="module")
def repl() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        running.run("x = 'Paris'\nPIN = 'x'\nanswer_2 = 'two'\nd = {'k': 'x', 'n': 7}\nclass C: a = 'x'\nc = C()")
        yield running


@pytest.mark.parametrize(
    ("code", "submitted"),
    [
        ("FINAL_VAR(x)", "Paris"),
        ("FINAL_VAR('x')", "Paris"),
        ('FINAL_VAR("x")', "Paris"),
        ("FINAL_VAR(name='x')", "Paris"),
        ("FINAL_VAR(name=x)", "Paris"),
        ("FINAL_VAR('`x`')", "Paris"),
        ("FINAL_VAR(r'x')", "Paris"),
        ("FINAL_VAR(PIN)", "x"),  # the value is also a variable's name, but the source decides
        ("FINAL_VAR(d['k'])", "x"),
        ("FINAL_VAR(c.a)", "x"),
        ("FINAL_VAR(d['n'])", "7"),
        ("FINAL_VAR(d)", '{"k": "x", "n": 7}'),
        ("FINAL_VAR(x.upper())", "PARIS"),
        ("FINAL_VAR(x if d else PIN)", "Paris"),
        ("FINAL_VAR((y := 'x'))", "x"),
        ("FINAL_VAR(f'answer_{1 + 1}')", "two"),
        ("FINAL_VAR(f'It is {x}')", "It is Paris"),
        ("s = 'é' * 3; FINAL_VAR(x); t = 'é'", "Paris"),
        ("s = '''é\né'''; FINAL_VAR(\n    # the answer\n    x,\n)", "Paris"),
        ("try:\n    FINAL_VAR(\n        'x'\n    )\nfinally:\n    pass", "Paris"),
        ("def f():\n    local = 'x'\n    FINAL_VAR(local)\nf()", "x"),
        ("def f():\n    local = 'x'\n    return [FINAL_VAR(each) for each in (local,)]\nf()", "x"),
        ("(lambda text: FINAL_VAR(text))('x')", "x"),
        ("async def f():\n    FINAL_VAR(PIN)\nawait f()", "x"),
        ("[FINAL_VAR(PIN), FINAL_VAR('x')]", "Paris"),
        ("[FINAL_VAR('x'), FINAL_VAR(PIN)]", "x"),
    ],
)
def test_final_var_depends_on_call_source(repl: BareRepl, code: str, submitted: str) -> None:
    ran = repl.run(code)
    assert (ran.result.final_answer, ran.result.error) == (submitted, None)


@pytest.mark.parametrize(
    ("code", "submitted"),
    [
        ("list(map(FINAL_VAR, ['x']))", "Paris"),
        ("list(map(FINAL_VAR, ['no variable']))", "no variable"),
        ("FINAL_VAR(*['x'])", "Paris"),
        ("FINAL_VAR(**{'name': 'no variable'})", "no variable"),
        ("f = FINAL_VAR\nf(x)", "Paris"),
        ("f = FINAL_VAR\nf('x')", "Paris"),
        ("exec('FINAL_VAR(x)')", "Paris"),
        ("import linecache\nlinecache.clearcache()\nFINAL_VAR(x)", "Paris"),
        (
            "import linecache, sys\nfile = sys._getframe().f_code.co_filename\nlinecache.cache[file] = ()\nFINAL_VAR(x)",
            "Paris",
        ),
        ("import threading\nt = threading.Thread(target=FINAL_VAR, args=('x',)); t.start(); t.join()", "Paris"),
    ],
)
def test_final_var_without_source_takes_names(repl: BareRepl, code: str, submitted: str) -> None:
    """If a call has no source, a text that is the name of a variable counts as this name."""
    assert repl.run(code).result.final_answer == submitted


def test_final_var_reads_source_of_earlier_function(repl: BareRepl) -> None:
    """A function of an earlier block is read in its own source."""
    repl.run("def end(value):\n    FINAL_VAR(value)")
    assert repl.run("end('x')\n\n\n'another source'").result.final_answer == "x"


@pytest.mark.parametrize("code", ["FINAL_VAR('y2')", "FINAL_VAR('It is Paris')", "FINAL_VAR(name='y2')"])
def test_final_var_of_unknown_literal_is_an_error(repl: BareRepl, code: str) -> None:
    ran = repl.run(code)
    assert ran.result.final_answer is None
    assert "FINAL_VAR: there is no variable" in (ran.result.error or "")
