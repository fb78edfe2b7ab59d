"""REPLs without names of our own, functions of the host for code, and variables by name: as a caller has them."""

import asyncio
import contextvars
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from rlm_broker import ConfigurationError, Limits, Sandbox, ValueUnavailable
from rlm_broker.errors import ReplBusy
from rlm_broker.sandbox.repl import SandboxedRepl
from tests.support.tables import table
from tests.support.waiting import WAIT_S

NAMES = "print(*sorted(name for name in globals() if not name.startswith('__')))"
EXIT = "import os; os._exit(1)"
who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
def repl(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl(scaffold=False, limits=Limits(max_repl_restarts=50)) as opened:
        yield opened


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_are_those_that_the_caller_gave(open_sandbox: Sandbox) -> None:
    given: dict[str, Any] = {
        "tools": {"llm_query": lambda: "asked", "FINAL": lambda of: len(of)},
        "values": {"input": 1, "history": 2},
    }
    with open_sandbox.repl("text", scaffold=False, **given) as repl:
        for _ in range(2):
            assert repl.execute(NAMES).stdout == "FINAL context history input llm_query\n"
            assert repl.execute("print(llm_query(), FINAL([1]), context, input)").stdout == "asked 1 text 1\n"
            assert repl.execute(EXIT).status == "killed"


def test_no_variable_of_code_is_restored(repl: SandboxedRepl) -> None:
    repl.execute("answer = 42\nbudget = FINAL_VAR = context = search = _ = 1\n'shown'")
    assert repl.execute("print(answer, budget, FINAL_VAR, context, search, _)").stdout == "42 1 1 1 1 1\n"
    block = repl.execute("answer = {'content': 'x', 'ready': True}")
    assert (block.final_answer, block.draft, block.stderr) == (None, None, "")
    repl.execute("del _\n'shown'")
    assert repl.execute("print(_)").stdout == "shown\n"


def test_submit_is_there_if_a_block_shall_submit(repl: SandboxedRepl) -> None:
    assert repl.execute("SUBMIT({'output': 5})", submit={"output": int}).final_value == {"output": 5}
    assert repl.execute("SUBMIT").error == "NameError: name 'SUBMIT' is not defined"
    repl.execute("SUBMIT = 1")
    assert repl.execute("print(SUBMIT)").stdout == "1\n"
    assert list(repl.variables()) == ["SUBMIT"]


def test_template_and_added_context_keep_their_names(open_sandbox: Sandbox) -> None:
    limits = Limits(later_context_bytes=1 << 20)
    made = open_sandbox.template([1], setup="answer, search = context, 2")
    with made as template, template.repl(scaffold=False, limits=limits) as repl:
        repl.add_context("more")
        assert repl.execute(NAMES).stdout == "answer context context_1 search\n"
        assert repl.execute("print(answer, context, context_1, search)").stdout == "[1] [1] more 2\n"


# -- functions of the host --------------------------------------------------------------------------------------------


def test_functions_are_called_with_the_callers_context(open_sandbox: Sandbox) -> None:
    async def waits() -> str:
        await asyncio.sleep(0)
        return who.get()

    functions = {"plain": lambda: [who.get(), threading.current_thread() is threading.main_thread()], "waits": waits}
    with open_sandbox.repl(tools=functions) as repl:
        for name in ("Ada", "Bob"):
            who.set(name)
            assert repl.execute("print(plain(), waits())").stdout == f"['{name}', False] {name}\n"
        repl.set_tools({"other": lambda: who.set("changed") and None})
        assert repl.execute("other()\nprint('plain' in globals())").stdout == "False\n"
        assert who.get() == "Bob"


def test_tools_change_with_the_next_block(repl: SandboxedRepl) -> None:
    def changes() -> None:
        repl.set_tools({"other": lambda: 2})

    repl.set_tools({"changes": changes, "other": lambda: 1})
    assert repl.execute("changes()\nprint(other())\nchanges()").stdout == "1\n"
    assert repl.execute("print(other(), 'changes' in globals())").stdout == "2 False\n"


def raises() -> None:
    raise LookupError("no such part")


def exits() -> None:
    raise SystemExit(3)


@table(
    "function, error",
    [
        (raises, "f() raised LookupError: no such part"),
        (exits, "f() raised RuntimeError: SystemExit: 3"),
        (lambda: iter([1]), "f(): its result is a list_iterator, which does not cross: return a list"),
        (lambda: "x" * (1 << 30), "f(): its result has 1,073,741,824 bytes, more than max_frame_bytes = 67,108,864"),
        (lambda: ["x" * (70 << 20)], "f(): its result has 73,400,324 bytes, more than max_frame_bytes = 67,108,864"),
    ],
)
def test_failure_of_a_function_is_one_sentence(repl: SandboxedRepl, function: Any, error: str) -> None:
    repl.set_tools({"f": function})
    assert (
        repl.execute("try: f()\nexcept RuntimeError as error: print(str(error).splitlines()[0])").stdout == f"{error}\n"
    )


def test_function_that_hangs_is_left_alone(repl: SandboxedRepl) -> None:
    stop = threading.Event()
    repl.set_tools({"hangs": stop.wait, "name": lambda: "next"})
    try:
        block = repl.execute("x = 1\nhangs()", wall_timeout_s=0.3)
        assert (block.status, block.limit) == ("interrupted", "block_wall_timeout_s")
        assert repl.execute("print(x, name())").stdout == "1 next\n"
    finally:
        stop.set()


def test_closed_repl_leaves_no_thread_of_its_functions(open_sandbox: Sandbox) -> None:
    threads: list[threading.Thread] = []
    with open_sandbox.repl() as repl:

        def reads() -> Any:
            threads.append(threading.current_thread())
            return repl.get("n")

        repl.set_tools({"reads": reads})
        assert repl.execute("n = 1\nprint(reads())").stdout == "1\n"
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()


def test_function_may_not_use_its_own_repl_for_a_block(repl: SandboxedRepl) -> None:
    repl.set_tools({"again": lambda: repl.execute("1").stdout})
    assert "ReplBusy: this REPL runs a block already" in (repl.execute("again()").error or "")


def test_function_outlives_a_killed_repl(repl: SandboxedRepl) -> None:
    begun, stop = threading.Event(), threading.Event()

    def waits() -> bool:
        begun.set()
        return stop.wait()

    repl.set_tools({"waits": waits})
    block = repl.execute("import os, threading\nthreading.Timer(0.1, os._exit, [5]).start()\nwaits()")
    assert (block.status, begun.is_set()) == ("killed", True)
    stop.set()
    assert repl.execute("print(waits())").stdout == "True\n"


# -- variables --------------------------------------------------------------------------------------------------------


def test_variables_have_values_or_reasons(repl: SandboxedRepl) -> None:
    repl.provide({"given": 1}, restore=False)
    repl.execute("n, _hidden, lock = 3, 4, object()\ndef f(): pass")
    found = repl.variables()
    assert {name: value for name, value in found.items() if not isinstance(value, ValueUnavailable)} == {
        "given": 1,
        "n": 3,
    }
    assert {name: str(found[name]) for name in ("f", "lock")} == {
        "f": "f is a function, which does not cross",
        "lock": "lock is an object, which does not cross",
    }
    named = repl.variables("n", "_hidden", "missing")
    assert (named["n"], named["_hidden"], str(named["missing"])) == (3, 4, "there is no variable 'missing'")
    with pytest.raises(ConfigurationError, match="no variable can be called 'a b'"):
        repl.variables("a b")


def test_variables_share_a_message(repl: SandboxedRepl) -> None:
    repl.execute("a, b, c, d = 'a' * (9 << 20), 'b' * (9 << 20), [0] * 900_000, [0] * 900_000\ne = 1")
    found = repl.variables()
    assert {name for name, value in found.items() if isinstance(value, ValueUnavailable)} == {"b", "d"}
    assert str(found["b"]) == "b has no room in a message beside the others: read it alone"
    assert [len(value) for value in repl.variables("b", "d").values()] == [9 << 20, 900_000]
    repl.execute("b = 'b' * (16 << 20)")
    assert re.fullmatch(r"b has [\d,]+ bytes, more than a message: [\d,]+", str(repl.variables("b")["b"]))


async def test_function_reads_variables_of_its_block() -> None:
    async with Sandbox(warm=0) as sandbox, sandbox.repl(scaffold=False) as repl:

        async def awaited(name: str) -> Any:
            return (await repl.avariables(name))[name]

        repl.set_tools({"awaited": awaited, "plain": lambda name: repl.variables(name)[name], "get": repl.get})
        code = "n, names = [1, (2,)], ['awaited', 'plain', 'get'] * 20\nprint(awaited('n'), plain('n'), get('n'))"
        assert (await repl.aexecute(code)).stdout == "[1, (2,)] [1, (2,)] [1, (2,)]\n"
        threads = (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
            "    print({str(each) for each in pool.map(lambda name: globals()[name]('n'), names)})"
        )
        assert (await repl.aexecute(threads)).stdout == "{'[1, (2,)]'}\n"


def test_reading_ends_with_the_wait(repl: SandboxedRepl) -> None:
    """A function reads while its block waits, and is told when the block has gone on, or computes."""
    said: list[BaseException] = []
    ended, read = threading.Event(), threading.Event()

    def reads() -> None:
        ended.wait()
        try:
            repl.variables()
        except (ReplBusy, ValueUnavailable) as error:
            said.append(error)
        read.set()

    repl.set_tools({"reads": reads, "go_on": ended.set, "last": read.wait})
    deaf = (
        "import threading, time, gc\n"
        "channel = next(each for each in gc.get_objects() if type(each).__name__ == 'Channel')\n"
        "channel._answer_reads = lambda: channel._reads.clear()\n"
        "threading.Thread(target=reads, daemon=True).start()\ntime.sleep(0.2)\ngo_on()"
    )
    assert repl.execute(deaf).status == "ok"
    read.wait()
    assert len(said) == 1


# -- values given again -----------------------------------------------------------------------------------------------


def test_value_given_again_is_as_it_was_given(repl: SandboxedRepl) -> None:
    text = "x" * (1 << 17)
    for restore in (False, True, False):
        for _ in range(3):
            repl.provide({"text": text, "numbers": [1]}, restore=restore)
            assert repl.execute("print(len(text), numbers)\nnumbers.append(2)\ntext = 0").stdout == "131072 [1]\n"
    assert repl.execute("print(text)").stdout == "0\n"
    repl.execute(EXIT)
    repl.provide({"text": text}, restore=False)
    assert repl.execute("print(len(text))").stdout == "131072\n"
    repl.provide({"text": "short"}, restore=False)
    repl.provide({"text": text}, restore=False)
    assert repl.execute("print(len(text))").stdout == "131072\n"


def test_image_crosses_as_a_picture(repl: SandboxedRepl) -> None:
    image = Image.new("CMYK", (3, 2))
    repl.provide({"picture": image})
    repl.execute("image = picture.resize((6, 4)); image.putpixel((5, 3), (1, 2, 3))")
    found = repl.get("image")
    assert (found.mode, found.size, found.getpixel((5, 3))) == ("RGB", (6, 4), (1, 2, 3))
