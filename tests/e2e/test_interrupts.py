"""Blocks that are interrupted, cancelled, bounded in wall time or given something to read; and one at a time."""

import asyncio
import contextlib
import threading

import pytest

from rlm_broker import ConfigurationError, ReplBusy, ReplLimits, Sandbox, SandboxedRepl
from rlm_broker.results import Block
from sandbox_worker.wire.level import LevelName
from sandbox_worker.wire.messages import Query, Slot
from tests.support.processes import living_below
from tests.support.tables import table
from tests.support.waiting import WAIT_S, for_ever

PATIENT = ReplLimits(interrupt_grace_s=100 * WAIT_S)
QUICK = ReplLimits(interrupt_grace_s=0.1)
LOOPS = "print('begun')\nwhile True: pass"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + LOOPS
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:The test .* is marked with"),  # some are not async
    pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning"),
]


async def begun(repl: SandboxedRepl, code: str) -> "asyncio.Task[Block]":
    """A task that runs a block which has printed something."""
    printed = asyncio.Event()
    task = asyncio.create_task(repl.aexecute(code, on_output=lambda *_: printed.set()))
    await asyncio.wait_for(printed.wait(), WAIT_S)
    return task


async def never(_query: Query) -> list[Slot]:
    await for_ever()


async def cancelled(task: "asyncio.Task[Block]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=WAIT_S)
    assert task.cancelled()


async def test_second_block_is_refused_as_busy(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=PATIENT) as repl:
        task = await begun(repl, LOOPS)
        with pytest.raises(ReplBusy, match="runs a block already: one at a time") as refused:
            await repl.aexecute("1")
        assert isinstance(refused.value, ConfigurationError)
        assert not task.done()
        await repl.ainterrupt()
        assert (await task).status == "interrupted"


@table("level", ["strict", "standard", "process"])
async def test_interrupt_keeps_variables(level: LevelName) -> None:
    async with Sandbox(PATIENT, level) as sandbox, sandbox.repl() as repl:
        await repl.aexecute("x = 41")
        task = await begun(repl, LOOPS)
        await repl.ainterrupt()
        block = await task
        assert (block.status, block.limit, block.error) == ("interrupted", None, "it was interrupted by its caller")
        assert block.stdout == "begun\n"
        assert (await repl.aexecute("x + 1")).stdout == "42\n"


async def test_block_ignoring_the_interrupt_is_killed(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=QUICK) as repl:
        task = await begun(repl, DEAF)
        await repl.ainterrupt()
        block = await task
        assert (block.status, block.limit) == ("killed", None)
        assert "it was interrupted by its caller, and did not react to the interrupt" in (block.error or "")
        assert (await repl.aexecute("1")).stdout == "1\n"


async def test_interrupt_without_block_is_harmless() -> None:
    async with Sandbox() as sandbox:
        repl = sandbox.repl()
        await repl.ainterrupt()
        async with repl:
            await repl.ainterrupt()
            assert (await repl.aexecute("1")).stdout == "1\n"
            for _ in range(20):
                await repl.ainterrupt()
                assert (await repl.aexecute("2")).stdout == "2\n"
                await repl.ainterrupt()
        await repl.ainterrupt()


async def test_interrupt_while_the_repl_is_replaced_runs_no_block(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl() as repl:
        await repl.aexecute("import os; os._exit(1)")
        task = asyncio.create_task(repl.aexecute("open('ran', 'w')"))
        await asyncio.sleep(0)
        await repl.ainterrupt()
        block = await task
        assert (block.status, block.error) == ("interrupted", "it was interrupted by its caller")
        assert (await repl.aexecute("import os; os.path.exists('ran')")).stdout == "False\n"


async def test_interrupt_ends_a_block_that_waits_for_an_answer(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(answer=never, limits=PATIENT) as repl:
        task = await begun(repl, "x = 1\nprint('asks', flush=True)\nllm_query('?')")
        await repl.ainterrupt()
        assert (await task).status == "interrupted"
        assert (await repl.aexecute("x")).stdout == "1\n"


def test_interrupt_from_another_thread_ends_a_block(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=PATIENT) as repl:
        printed = threading.Event()

        def interrupt() -> None:
            printed.wait(WAIT_S)
            repl.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        block = repl.execute(LOOPS, on_output=lambda *_: printed.set())
        thread.join()
        assert block.status == "interrupted"


async def test_cancelled_block_is_interrupted_and_variables_stay(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=PATIENT) as repl:
        await repl.aexecute("x = 41")
        processes = living_below()
        await cancelled(await begun(repl, LOOPS))
        assert (await repl.aexecute("x + 1")).stdout == "42\n"
        assert living_below() == processes


async def test_block_cancelled_at_any_moment_keeps_variables(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=PATIENT) as repl:
        await repl.aexecute("x = 41\nimport time")
        for wait_ms in range(40):
            code = "time.sleep(0.01)\nwhile True: pass" if wait_ms % 2 else "import os; os.write(1, b'.'); 1"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(repl.aexecute(code), (wait_ms + 1) / 4000)
            assert (await repl.aexecute("x")).stdout == "41\n"


async def test_cancelled_deaf_block_is_replaced(loop_sandbox: Sandbox) -> None:
    """A cancelled block that does not react is killed, and a fresh REPL runs the earlier blocks again."""
    async with loop_sandbox.repl("the context", limits=QUICK) as repl:
        await repl.aexecute("x = 1")
        await cancelled(await begun(repl, DEAF))
        assert (await repl.aexecute("print(context, 'x' in globals())")).stdout == "the context True\n"


async def test_close_does_not_wait_for_grace() -> None:
    async with Sandbox(PATIENT, warm=0) as sandbox:
        repl = await sandbox.repl().__aenter__()
        idle = living_below()
        task = await begun(repl, DEAF)
        task.cancel()
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):  # the grace is longer
            await repl.aclose()
            await asyncio.wait({task})
        assert task.cancelled()
        assert living_below() < idle


async def test_repl_close_does_not_wait_for_grace(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=PATIENT) as repl:
        repl.kills_when_cancelled = True
        async with asyncio.timeout(WAIT_S):
            await cancelled(await begun(repl, DEAF))


async def test_cancelled_block_ends_its_queries(loop_sandbox: Sandbox) -> None:
    ended: list[str] = []
    asked = asyncio.Event()

    async def answer(_query: Query) -> list[Slot]:
        asked.set()
        try:
            await for_ever()
        finally:
            ended.append("query")

    async with loop_sandbox.repl(answer=answer, limits=PATIENT) as repl:
        task = asyncio.create_task(repl.aexecute("x = 1; llm_query('?')"))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        await cancelled(task)
        assert ended == ["query"]
        assert (await repl.aexecute("x")).stdout == "1\n"


@table("name", ["timeout_s", "wall_timeout_s"])
@table("given", [0, -1, True, "1", float("nan"), float("inf")])
def test_times_must_be_positive_numbers(open_sandbox: Sandbox, name: str, given: object) -> None:
    with (
        open_sandbox.repl() as repl,
        pytest.raises(ConfigurationError, match=f"{name} = .*: give a positive number of seconds, or None"),
    ):
        repl.execute("1", **{name: given})  # type: ignore[arg-type]


async def test_wall_time_holds_while_a_block_waits(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(answer=never, limits=PATIENT) as repl:
        block = await repl.aexecute("llm_query('?')", wall_timeout_s=0.2)
        assert (block.status, block.limit) == ("interrupted", "block_wall_timeout_s")
        assert "block_wall_timeout_s = 0.2 s" in (block.error or "")


async def test_stdin_of_a_block_is_read_to_its_end(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl() as repl:
        code = "first = input('? ')\nimport sys\nrest = sys.stdin.read()\nprint([first, rest])"
        block = await repl.aexecute(code, stdin="one\ntwo \N{SNOWMAN}\nthree")
        assert block.stdout == "? ['one', 'two \N{SNOWMAN}\\nthree']\n"
        assert (await repl.aexecute("input(); input()", stdin="one\n")).error == "EOFError: EOF when reading a line"
        assert (await repl.aexecute("input()")).error == "EOFError: EOF when reading a line"
        assert (await repl.aexecute("sys.stdin.buffer.read()", stdin="\xe9")).stdout == "b'\\xc3\\xa9'\n"
        assert (await repl.aexecute("input()", stdin="")).error == "EOFError: EOF when reading a line"


async def test_stdin_may_be_a_function_that_is_called_when_code_reads(loop_sandbox: Sandbox) -> None:
    shown: list[str] = []
    pieces: list[str | bytes] = ["one\n", b"tw", b"o\xff\x00", "x" * (1 << 17), ""]

    async def more() -> str | bytes:
        shown.append("asked")
        return pieces.pop(0)

    async with loop_sandbox.repl() as repl:
        assert (await repl.aexecute("1", stdin=more)).stdout == "1\n"
        assert not shown  # code that reads nothing takes nothing
        code = "first = input('? ')\nimport sys\nrest = sys.stdin.buffer.read()\n[first, rest[:5], len(rest), sys.stdin.read()]"
        block = await repl.aexecute(code, stdin=more, on_output=lambda _, text: shown.append(text))
        assert block.stdout == f"? ['one', b'two\\xff\\x00', {5 + (1 << 17)}, '']\n"
        assert shown[:2] == ["? ", "asked"]  # a prompt is shown before the caller is asked
        assert shown.count("asked") == 5  # nothing ends it, and then it is not called again


async def test_stdin_of_a_function_that_fails_is_an_error_of_the_code(loop_sandbox: Sandbox) -> None:
    async def of_another_type() -> str:
        return 7  # type: ignore[return-value]

    unasked = "llm_query.__self__.more_input()"
    twice = "llm_query.__self__._answers('input', Query(id='', want='stdin', prompts=['', '']))[1]"
    twice = f"from sandbox_worker.wire.messages import Query\n{twice}"
    async with loop_sandbox.repl(limits=ReplLimits(max_frame_bytes=1 << 12)) as repl:
        assert (
            await repl.aexecute("input()", stdin=of_another_type)
        ).error == "OSError: stdin must return text or bytes, not int"
        assert (await repl.aexecute("input()", stdin=lambda: "7")).error == (  # type: ignore[arg-type]
            "OSError: stdin must be an async function, and this one is none"
        )
        assert (await repl.aexecute(unasked)).error == "OSError: this block has no stdin to ask for"
        assert "no stdin to ask for" in (await repl.aexecute(twice, stdin=of_another_type)).stdout

        async def controls() -> str:
            return "\0" * 5_000  # six bytes each in a message, of which none may have more than 4,096

        assert (await repl.aexecute("import sys\nlen(sys.stdin.read(5_000))", stdin=controls)).stdout == "5000\n"


async def test_code_that_waits_for_stdin_is_off_the_clock_and_can_be_interrupted(loop_sandbox: Sandbox) -> None:
    async def silent() -> str:
        await asyncio.Event().wait()
        return ""

    async with loop_sandbox.repl() as repl:
        block = await repl.aexecute("x = 1\ninput()", timeout_s=0.1, wall_timeout_s=0.4, stdin=silent)
        assert (block.status, block.limit) == ("interrupted", "block_wall_timeout_s")
        assert (await repl.aexecute("x")).stdout == "1\n"


async def test_stdin_that_cannot_be_given_is_refused(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl(limits=ReplLimits(max_frame_bytes=1 << 12)) as repl:
        with pytest.raises(ConfigurationError, match="stdin must be text, an async function or None, not bytes"):
            await repl.aexecute("1", stdin=b"x")  # type: ignore[arg-type]
        assert "too long" in ((await repl.aexecute("1", stdin="x" * (1 << 13))).error or "")
        assert "UnicodeEncodeError" in ((await repl.aexecute("1", stdin="\ud800")).error or "")
        assert (await repl.aexecute("1")).stdout == "1\n"


SCRIBBLES = """
import ctypes, os
for line in open('/proc/self/maps'):
    fields = line.split()
    if fields[1] == 'rw-s' and 'zero' in line:
        start, end = (int(part, 16) for part in fields[0].split('-'))
        if end - start == 4096:
            ctypes.c_uint64.from_address(start + 8).value = 2
            print('written')
"""


async def test_forged_interrupt_ends_only_its_own_block(loop_sandbox: Sandbox) -> None:
    async with loop_sandbox.repl() as repl, loop_sandbox.repl() as other:
        assert "written" in (await repl.aexecute(SCRIBBLES)).stdout
        block = await repl.aexecute("1")
        assert (block.status, block.error, block.limit) == ("error", "KeyboardInterrupt", None)
        assert (await repl.aexecute("1")).stdout == "1\n"
        assert (await other.aexecute("1")).stdout == "1\n"
        assert (await other.aexecute("1")).stdout == "1\n"
