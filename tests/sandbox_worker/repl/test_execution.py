"""Blocks in this process. Tests that need a process of their own are in `test_repl.py`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_worker.repl.execution import BlockOutcome, Executor
from sandbox_worker.repl.memory_reserve import Reserve
from tests.support.tables import table


class Prompt:
    """An executor with its complaints, which numbers its blocks."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.complaints: list[str] = []
        self.executor = Executor(self.namespace, self.complaints.append, Reserve())
        self._number = 0

    def run(self, code: str) -> BlockOutcome:
        self._number += 1
        return self.executor.run(self._number, code)

    def complaint(self, code: str) -> str:
        """Run a block that raises, and return its error."""
        self.complaints.clear()
        assert self.run(code).status != "ok"
        return "".join(self.complaints)


@pytest.fixture
def prompt() -> Iterator[Prompt]:
    made = Prompt()
    yield made
    if made.executor._loop is not None:
        made.executor._loop.close()
        asyncio.set_event_loop(None)


@table(
    "code, shown",
    [
        ("1; 2", "2\n"),
        ("x = 5\nx", "5\n"),
        ("x = 5", ""),
        ("'text'", "'text'\n"),
        ("'text'; None", ""),
        ("if True:\n    3", ""),
        ("for i in range(3): i", ""),
        ("", ""),
        ("# nothing", ""),
        ("'''a docstring'''\nx = 1", ""),
        ("(y := 4)", "4\n"),
        ("1 # with a comment", "1\n"),
        ("1;", "1\n"),
        ("lambda: (yield)\n'after'", "'after'\n"),
    ],
)
def test_last_expression_is_shown_alone(
    prompt: Prompt, capsys: pytest.CaptureFixture[str], code: str, shown: str
) -> None:
    assert prompt.run(code).status == "ok"
    assert capsys.readouterr().out == shown


def test_underscore_is_the_last_shown_value(prompt: Prompt) -> None:
    """The value shown last is `_`, and None does not take its place."""
    for code in ("6 * 7", "None", "x = 1"):
        prompt.run(code)
    assert prompt.namespace["_"] == 42


def test_variables_of_a_failed_block_are_kept(prompt: Prompt) -> None:
    assert prompt.run("x = 1\n_hidden = 2\n1 / 0\nx = 3").status == "error"
    assert (prompt.namespace["x"], prompt.namespace["_hidden"]) == (1, 2)


def test_function_sees_the_globals_of_later_blocks(prompt: Prompt, capsys: pytest.CaptureFixture[str]) -> None:
    for code in ("def f(): return g()", "def g(): return 'late'", "f()"):
        assert prompt.run(code).status == "ok"
    assert capsys.readouterr().out == "'late'\n"


@table(
    "code",
    [
        "await asyncio.sleep(0, 'done')",
        "done = await asyncio.sleep(0, 'done')\ndone",
        "(await asyncio.gather(asyncio.sleep(0, 'done')))[0]",
        "[await asyncio.sleep(0, x) for x in ['done']][0]",
        "async def f():\n    yield 'done'\nasync for x in f(): pass\nx",
        "async with asyncio.timeout(60):\n    x = 'done'\nx",
        "asyncio.run(asyncio.sleep(0, 'done'))",
        "await asyncio.to_thread(lambda: 'done')",
    ],
)
def test_await_works_at_top_level(prompt: Prompt, capsys: pytest.CaptureFixture[str], code: str) -> None:
    assert prompt.run(f"import asyncio\n{code}").status == "ok"
    assert capsys.readouterr().out == "'done'\n"


def test_interrupted_asyncio_import_is_repaired() -> None:
    code = """if True:
        import sys
        from sandbox_worker.repl.execution import Executor
        from sandbox_worker.repl.memory_reserve import Reserve

        class Interrupting:
            def find_spec(self, name, *_others):
                if name == "asyncio.locks":
                    raise KeyboardInterrupt

        assert "asyncio" not in sys.modules
        block = "async def f(): return 5\\nawait f()"
        executor = Executor({}, lambda text: None, Reserve())
        sys.meta_path.insert(0, Interrupting())
        assert executor.run(1, block).status == "interrupted"
        del sys.meta_path[0]
        outcome = executor.run(2, block)
        assert outcome.status == "ok", outcome.error
        executor._loop.close()
    """
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")  # and no warning of a coroutine that was never awaited


def test_task_goes_on_in_next_awaiting_block(prompt: Prompt, capsys: pytest.CaptureFixture[str]) -> None:
    prompt.run("import asyncio\ntask = asyncio.create_task(asyncio.sleep(0, 'done'))\nawait asyncio.sleep(0)")
    prompt.run("asyncio.run(asyncio.sleep(0))")
    assert prompt.run("await task").status == "ok"
    assert capsys.readouterr().out == "'done'\n"


def test_future_annotations_hold_for_later_blocks(prompt: Prompt) -> None:
    """An import of `annotations` from `__future__` holds for the blocks that follow."""
    evaluated = "def f(x: Unknown): pass\nf.__annotations__"  # since 3.14, not before they are looked at
    assert prompt.run(evaluated).status == "error"
    assert prompt.run("from __future__ import annotations").status == "ok"
    assert prompt.run(evaluated).status == "ok"


def test_traceback_shows_own_lines_and_carets(prompt: Prompt) -> None:
    carets = "~^^^" if sys.version_info >= (3, 13) else "^^^^"
    prompt.run("def f(x):\n    return 1 / x")
    assert prompt.complaint("y = 1\nprint(f(0))") == (
        "Traceback (most recent call last):\n"
        '  File "<block 2>", line 2, in <module>\n'
        "    print(f(0))\n"
        f"          {carets}\n"
        '  File "<block 1>", line 2, in f\n'
        "    return 1 / x\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )


@table("separator", ["\u2028", "\x0c", "\x1c", "\x85", "\r\n"])
def test_traceback_counts_lines_as_python_does(prompt: Prompt, separator: str) -> None:
    assert "    1 / 0\n" in prompt.complaint(f"s = '''a{separator}b'''\nx = 1\n1 / 0")


@table(
    "code, library",
    [
        ("import json\njson.loads('{')", "decoder.py"),
        ("import asyncio\nawait asyncio.wait_for(asyncio.sleep(60), 0.001)", "tasks.py"),
    ],
)
def test_traceback_shows_library_frames_and_omits_ours(prompt: Prompt, code: str, library: str) -> None:
    complaint = prompt.complaint(code)
    assert library in complaint
    assert "base_events.py" not in complaint
    assert "execution.py" not in complaint


def test_traceback_causes_omit_our_frames(prompt: Prompt) -> None:
    prompt.namespace["ours"] = Prompt().executor._shown  # prints a value, whose `__repr__` raises through it
    prompt.run("class Bites:\n    def __repr__(self): raise ValueError('inner')")
    for code in (
        "try:\n    ours(Bites())\nexcept ValueError as error:\n    raise KeyError('outer') from error",
        "try:\n    ours(Bites())\nexcept ValueError:\n    1 / 0",
        "try:\n    ours(Bites())\nexcept ValueError as error:\n    raise ExceptionGroup('several', [error])",
    ):
        complaint = prompt.complaint(code)
        assert "raise ValueError('inner')" in complaint
        assert "execution.py" not in complaint


@table(
    "code, error",
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise ValueError", "ValueError"),
        ("raise ValueError('first\\nsecond')", "ValueError: first"),
        ("e = ValueError('said')\ne.add_note('a note')\nraise e", "ValueError: said"),
        ("raise ValueError('x' * 5000)", f"ValueError: {'x' * 988}"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
        ("raise ExceptionGroup('several', [ValueError(1), KeyError(2)])", "ExceptionGroup: several (2 sub-exceptions)"),
        ("raise BaseException('base')", "BaseException: base"),
        ("class Own(BaseException): pass\nraise Own('own')", "Own: own"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise StopIteration", "StopIteration"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("return 5", "SyntaxError: 'return' outside function"),
        ("if True:\nx = 1", "IndentationError: expected an indented block after 'if' statement on line 1"),
        ("x = '\0'", ""),  # the class of this error changed within 3.11
        ("async def f(): raise ValueError('awaited')\nawait f()", "ValueError: awaited"),
    ],
)
def test_raised_object_is_an_outcome_of_one_line(prompt: Prompt, code: str, error: str) -> None:
    outcome = prompt.run(code)
    assert outcome.status == "error"
    assert (outcome.error or "").startswith(error)
    assert len((outcome.error or "").splitlines()) == 1
    assert len(outcome.error or "") <= 1000
    assert error[:980] in "".join(prompt.complaints)


@table("code", ["!ls", "x = 1\n%matplotlib inline", "pip install six"])
def test_command_of_a_shell_is_an_error_with_advice(prompt: Prompt, code: str) -> None:
    assert prompt.run(code).status == "error"
    assert "SyntaxError: invalid syntax\nthis is plain Python" in "".join(prompt.complaints)


@table("method", ["__str__", "__repr__"])
def test_exception_that_cannot_be_shown_is_an_outcome(prompt: Prompt, method: str) -> None:
    code = f"class Bites(Exception):\n    def {method}(self): raise self\nBites.__str__ = Bites.{method}\nraise Bites"
    assert prompt.run(code).error == "Bites: <exception str() failed>"
    assert "raise Bites" in "".join(prompt.complaints)


def test_exception_with_hostile_class_is_an_outcome(prompt: Prompt) -> None:
    code = (
        "class Meta(type):\n    def __getattribute__(cls, name): 1 / 0\n"
        "class Bites(Exception, metaclass=Meta): pass\nraise Bites"
    )
    assert prompt.run(code).error == "Bites"
    assert prompt.complaints == ["Bites (its traceback cannot be shown: ZeroDivisionError)\n"]


@table(
    "code, line",
    [
        *(("x = 1\nreturn 5", "    return 5\n"), ("x = 1\nyield x", "    yield x\n")),
        ("x = = 1", "    x = = 1\n        ^\n"),
    ],
)
def test_syntax_error_shows_its_line(prompt: Prompt, code: str, line: str) -> None:
    assert line in prompt.complaint(code)


@table(
    "code, error, exit_code",
    [
        ("sys.exit()", "sys.exit(0)", 0),
        ("sys.exit(3)", "sys.exit(3)", 3),
        ("sys.exit(True)", "sys.exit(1)", 1),
        ("sys.exit(-1)", "sys.exit(-1)", -1),
        ("sys.exit('bye')", "bye", 1),
        ("sys.exit([1, 2])", "[1, 2]", 1),
        ("raise SystemExit", "sys.exit(0)", 0),
        ("async def f(): sys.exit(4)\nawait f()", "sys.exit(4)", 4),
        ("sys.exit(10 ** 5000)", "sys.exit(2147483647)", 2147483647),
        (
            "class Bites(int):\n    def __bool__(self): 1 / 0\n    __str__ = __bool__\nsys.exit(Bites(3))",
            "a Bites whose",
            1,
        ),
        ("class Bites:\n    def __str__(self): 1 / 0\nsys.exit(Bites())", "a Bites whose text cannot be shown", 1),
    ],
)
def test_sys_exit_ends_the_block(prompt: Prompt, code: str, error: str, exit_code: int) -> None:
    prompt.complaints.clear()
    outcome = prompt.run(f"import sys\n{code}")
    assert (outcome.status, outcome.exit_code) == ("exited", exit_code)
    assert (outcome.error or "").startswith(error)
    assert bool(prompt.complaints) == (not error.startswith("sys.exit"))
    assert prompt.run("1").status == "ok"


def test_keyboard_interrupt_is_no_error(prompt: Prompt) -> None:
    outcome = prompt.run("raise KeyboardInterrupt")
    assert (outcome.status, outcome.error) == ("interrupted", "KeyboardInterrupt")
    assert "line 1, in <module>" in "".join(prompt.complaints)


def test_interrupted_await_names_its_line(prompt: Prompt) -> None:
    code = (
        "import asyncio\n"
        "async def raises(): raise KeyboardInterrupt\n"
        "raising = asyncio.create_task(raises())\n"
        "try:\n"
        "    await asyncio.sleep(60)\n"
        "finally:\n"
        "    cleaned_up = True\n"
    )
    assert "line 5, in <module>\n    await asyncio.sleep(60)\n" in prompt.complaint(code)
    assert prompt.namespace["cleaned_up"]
    assert prompt.run("await asyncio.sleep(0)").status == "ok"
