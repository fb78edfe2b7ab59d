"""Submissions in a REPL of its own process. `test_repl.py` tests each way to submit."""

from collections.abc import Iterator

import pytest
from msgspec import UNSET, Raw

from sandbox_worker.wire.messages import MAX_DRAFT_CHARS, Provide, Reply, Slot, Submit
from sandbox_worker.wire.values import decode, encode
from tests.support.bare_repl import BareRepl, bare_repl
from tests.support.tables import table


@pytest.fixture
def repl() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        yield running


ENDS = [
    "try:\n    SUBMIT('done')\nexcept Exception:\n    print('caught')\nprint('after')",
    "FINAL('done')\nprint('after')",
    "x = 'done'\ndef deep(n):\n    return deep(n - 1) if n else FINAL_VAR('x')\ndeep(50)\nprint('after')",
    "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    SUBMIT('done')\nawait f()\nprint('after')",
    "async with asyncio.TaskGroup() as group:\n    group.create_task(f())\nprint('after')",
    "await asyncio.gather(f(), asyncio.sleep(1000))\nprint('after')",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor() as pool: list(pool.map(SUBMIT, ['done']))\nprint('after')",
]


@table("code", ENDS)
def test_submit_ends_its_block_unless_it_is_to_go_on(repl: BareRepl, code: str) -> None:
    ran = repl.run(code, submit=[])
    assert (ran.result.status, ran.result.final_answer, ran.stdout, ran.stderr) == ("ok", "done", "", "")
    if code in ENDS[:3]:
        ran = repl.run(code)
        assert (ran.result.status, ran.result.final_answer, ran.stdout) == ("ok", "done", "after\n")


@table(
    "code, answer, stdout",
    [
        ("try:\n    SUBMIT(1)\nfinally:\n    print('tidy')", "1", "tidy\n"),
        (  # it ends the thread, and not the block
            "import threading\nt = threading.Thread(target=SUBMIT, args=(1,)); t.start(); t.join()\nprint('after')",
            "1",
            "after\n",
        ),
        ("print('after')", None, "after\n"),
    ],
)
def test_submit_ends_only_its_own_thread(repl: BareRepl, code: str, answer: str | None, stdout: str) -> None:
    ran = repl.run(code, submit=[])
    assert (ran.result.status, ran.result.final_answer, ran.stdout, ran.stderr) == ("ok", answer, stdout, "")


def takes_numbers(asked: Submit) -> list[Slot]:
    return [Slot() if type(decode(bytes(asked.fields)).get("n")) is int else Slot(error="n: not a number")]


@table(
    "code",
    [
        "SUBMIT(n=1, why='x')",
        "SUBMIT(1, why='x')",
        "SUBMIT(1, 'x')",
        "FINAL({'n': 1, 'why': 'x'})",
        "v = {'n': 1, 'why': 'x'}\nFINAL_VAR('v')",
        "answer['content'] = {'n': 1, 'why': 'x'}; answer['ready'] = True",
        "try: SUBMIT(n='one', why='x')\nexcept TypeError: SUBMIT(n=1, why='x')",
    ],
)
def test_fields_are_submitted(repl: BareRepl, code: str) -> None:
    checked: list[bytes] = []

    def check(asked: Submit) -> list[Slot]:
        checked.append(bytes(asked.fields))
        return takes_numbers(asked)

    ran = repl.run(code, check, submit=["n", "why"])
    assert (ran.result.status, ran.result.final_answer, ran.result.final_value) == ("ok", "", UNSET)
    assert checked[-1] == b'{"n":1,"why":"x"}'


@table(
    "code, error",
    [
        ("SUBMIT(n='one', why='x')", "TypeError: SUBMIT(): n: not a number"),
        ("SUBMIT(1, 'x', 2)", "TypeError: SUBMIT() takes 2 positional arguments but 3 were given"),
        ("SUBMIT(1, n=2)", "TypeError: SUBMIT() got multiple values for argument 'n'"),
        ("SUBMIT(n=object(), why=1)", "TypeError: SUBMIT()['n'] is an object, which does not cross"),
        (
            "answer['content'] = {'n': 'one', 'why': 'x'}; answer['ready'] = True",
            "the answer cannot be read: TypeError: SUBMIT(): n: not a number",
        ),
    ],
)
def test_wrong_fields_are_an_error(repl: BareRepl, code: str, error: str) -> None:
    ran = repl.run(code, takes_numbers, submit=["n", "why"])
    assert (ran.result.status, ran.result.error, ran.result.final_answer) == ("error", error, None)


@table("code", ["SUBMIT({'a': 1})", "SUBMIT(rows={'a': 1})", "SUBMIT({'rows': {'a': 1}})"])
def test_single_dict_field_is_positional_or_named(repl: BareRepl, code: str) -> None:
    repl.begin(code, submit=["rows"])
    asked = repl.hear()
    assert isinstance(asked, Submit)
    assert bytes(asked.fields) == b'{"rows":{"a":1}}'
    repl.say(Reply(asked.id, [Slot()]))
    repl.finish()


def test_draft_is_the_content_of_answer(repl: BareRepl) -> None:
    assert repl.run("1").result.draft is None
    assert repl.run("answer['content'] = 'so far'").result.draft == "so far"
    assert repl.run("1").result.draft == "so far"
    assert repl.run("answer['content'] = {'n': 1}").result.draft == '{"n": 1}'
    assert repl.run("answer['content'] = 'x' * 100_000").result.draft == "x" * MAX_DRAFT_CHARS
    assert repl.run("answer['ready'] = True").result.draft is None
    assert repl.run("answer['content'] = '\\ud800'").result.draft == "\\ud800"


def test_unreadable_draft_is_a_block_error(repl: BareRepl) -> None:
    code = "class Bad:\n    def __str__(self): raise ValueError\nanswer['content'] = Bad()"
    assert repl.run(code).result.error == "the answer cannot be read: ValueError"
    assert repl.run("1").result.status == "ok"


def test_tools_come_and_go_between_blocks(repl: BareRepl) -> None:
    def printed(code: str, **tools: list[str]) -> str:
        return repl.run(code, lambda query: [Slot(text=encode(query.tool, "it").decode())], **tools).stdout

    assert printed("print(one(), two())", tools=["one", "two"]) == "one two\n"
    assert printed("print(one(), two())") == "one two\n"
    assert printed("two = 2\nprint('one' in globals(), two)", tools=["two"]) == "False 2\n"
    assert printed("print(two())") == "two\n"
    assert printed("two = 2") == ""
    assert printed("print(two)", tools=[]) == "2\n"  # a variable of code by then


def test_value_is_given_once_or_restored(repl: BareRepl) -> None:
    repl.say(Provide("once", Raw(b"1"), is_restored=False))
    repl.say(Provide("always", Raw(b"1")))
    assert repl.run("once += 1; always += 1; print(once, always)").stdout == "2 2\n"
    assert repl.run("print(once, always)").stdout == "2 1\n"
    repl.say(Provide("always", Raw(b"5"), is_restored=False))
    assert repl.run("always += 1; print(always)").stdout == "6\n"
    assert repl.run("print(always)").stdout == "6\n"


@table("code", ["FINAL(child)", "FINAL_VAR('child')", "FINAL([child])", "FINAL({'a': child})", "SUBMIT(child)"])
def test_child_is_no_answer(repl: BareRepl, code: str) -> None:
    ran = repl.run(f"child = rlm_start('count')\n{code}")
    assert (ran.result.error, ran.result.final_answer) == (
        "TypeError: the answer has a child in place of what it found: submit child.result()",
        None,
    )


@table("code", ["def answer(): pass", "answer = open", "import json as answer", "class answer: pass"])
def test_definition_named_answer_is_not_an_answer(repl: BareRepl, code: str) -> None:
    ran = repl.run(code)
    assert (ran.result.final_answer, ran.result.draft) == (None, None)
    assert "choose another one" in ran.stderr
    assert repl.run("answer['content'] = 'text'").result.draft == "text"


@pytest.fixture(scope="module")
def started() -> Iterator[BareRepl]:
    with bare_repl(context="the text") as running:
        running.run("x = 'Paris'\nPIN = 'x'\nanswer_2 = 'two'\nd = {'k': 'x', 'n': 7}\nclass C: a = 'x'\nc = C()")
        yield running


@table(
    "code, submitted",
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
def test_final_var_depends_on_call_source(started: BareRepl, code: str, submitted: str) -> None:
    ran = started.run(code)
    assert (ran.result.final_answer, ran.result.error) == (submitted, None)


@table(
    "code, submitted",
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
def test_final_var_without_source_takes_names(started: BareRepl, code: str, submitted: str) -> None:
    """If a call has no source, a text that is the name of a variable counts as this name."""
    assert started.run(code).result.final_answer == submitted


def test_final_var_reads_source_of_earlier_function(started: BareRepl) -> None:
    started.run("def end(value):\n    FINAL_VAR(value)")
    assert started.run("end('x')\n\n\n'another source'").result.final_answer == "x"


@table("code", ["FINAL_VAR('y2')", "FINAL_VAR('It is Paris')", "FINAL_VAR(name='y2')"])
def test_final_var_of_unknown_literal_is_an_error(started: BareRepl, code: str) -> None:
    ran = started.run(code)
    assert ran.result.final_answer is None
    assert "FINAL_VAR: there is no variable" in (ran.result.error or "")
