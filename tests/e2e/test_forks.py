"""Forks of a live REPL: the same variables, and from then on nothing of the other's."""

import asyncio
import os
from collections.abc import Iterator

import psutil
import pytest

from rlm_broker import ConfigurationError, ForkRefused, ReplBusy, ReplClosed, ReplLimits, Sandbox, SandboxFailed
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire.messages import Query, Slot
from tests.e2e.test_checkpoints import CHECK, EXPECTED, SPOILS, STATE
from tests.support.launcher import needs_strict
from tests.support.processes import living_below
from tests.support.waiting import until, until_now

pytestmark = needs_strict
LIMITS = ReplLimits(block_timeout_s=20, interrupt_grace_s=0.2, memory_bytes=512 << 20, max_processes=48)
PROCESSES = "import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))"

KILLS = {
    "exit": "os._exit(3)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "processes": "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "time, with the GIL held in C": "sum(itertools.repeat(1))",
    "signal": "os.kill(os.getpid(), 9)",
    "orphans": "if os.fork() == 0:\n    os.setpgid(0, 0)\n    if os.fork() == 0:\n        while True: pass\n    os._exit(0)\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
}


@pytest.fixture
def repl(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl("the context", limits=LIMITS) as opened:
        opened.execute("import itertools, os, signal, time\nx = [0]")
        yield opened


def test_each_has_variables_of_every_kind_and_none_of_the_others(repl: SandboxedRepl) -> None:
    assert repl.execute(STATE).status == "ok"
    with repl.fork() as one, repl.fork() as other:
        assert one.execute(SPOILS).status == "ok"
        assert repl.execute(CHECK).stdout == EXPECTED
        with other.fork() as last:
            assert last.execute(CHECK).stdout == EXPECTED
            assert other.execute(CHECK).stdout == EXPECTED
        draw = "print(random.random())"
        assert one.execute(draw).stdout == repl.execute(draw).stdout  # also the state of `random`


def test_two_hundred_forks_answer_from_their_own_variables(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("the context", limits=LIMITS.replace(max_processes=500, memory_bytes=4 << 30)) as repl:
        repl.execute("x = [0]; large = bytearray(b'x') * (20 << 20)")
        before = psutil.Process().num_fds()
        forks = [repl.fork() for _ in range(200)]
        for number, fork in enumerate(forks):
            assert fork.execute(f"x.append({number})\nlarge[5] = {number}").status == "ok"
        for number, fork in enumerate(forks):
            assert fork.execute("x, large[5]", value=True).value == ([0, number], number)
        forks[7].execute("import os; os._exit(1)")
        assert forks[8].get("x") == [0, 8]
        for fork in forks:
            fork.close()
        assert repl.get("x") == [0]
        assert psutil.Process().num_fds() == before
        until_now(lambda: repl.execute(PROCESSES).stdout == "3\n")  # init, its keeper and itself


@pytest.mark.parametrize("code", list(KILLS.values()), ids=list(KILLS))
def test_killed_fork_takes_no_other_with_it(repl: SandboxedRepl, code: str) -> None:
    with repl.fork() as killed, repl.fork() as other, killed.fork() as younger:
        for number, each in enumerate((repl, killed, other, younger)):
            each.execute(f"x.append({number})")
        before = int(other.execute(PROCESSES).stdout)
        block = killed.execute(code, timeout_s=0.4)
        assert block.status == "killed", block
        assert [each.get("x") for each in (repl, other, younger)] == [[0, 0], [0, 2], [0, 3]]
        until_now(lambda: int(other.execute(PROCESSES).stdout) <= before - 2)  # its keeper and itself, and all below
        assert block.blocks_undone == 1
        assert killed.execute("print(context, x)").stdout == "the context [0, 1]\n"
        assert (killed.replayed.blocks, killed.pid == repl.pid) == (2, False)


def test_killed_original_takes_no_fork_with_it(repl: SandboxedRepl) -> None:
    with repl.fork() as fork:
        pid = repl.pid
        assert repl.execute("os._exit(3)").status == "killed"
        assert fork.get("x") == [0]
        assert repl.execute("print(context, x)").stdout == "the context [0]\n"
        assert (fork.pid, repl.pid != pid) == (pid, True)


async def test_each_has_a_record_of_its_own_and_pays_for_no_answer_twice() -> None:
    asked: list[str] = []

    async def answer(query: Query) -> list[Slot]:
        asked.extend(query.texts)
        return [Slot(f"answer {len(asked)}") for _ in query.prompts]

    async with Sandbox(LIMITS, warm=0) as sandbox, sandbox.repl("first", answer) as repl:
        for code in (
            "import os, random\nx = [llm_query('a')]; drawn = random.random()",
            "open('file', 'w').write('text')",
        ):
            assert (await repl.aexecute(code)).status == "ok"
        async with await repl.afork() as fork:
            before = fork.record
            assert before.blocks == repl.record.blocks == 2
            repl.provide({"given": 1})
            fork.provide({"given": 2})
            await repl.aexecute("x.append(given)")
            await fork.aexecute("x += [given, llm_query('b')]")
            drawn, parent = await repl.aget("drawn"), repl.record.blocks
            block = await fork.aexecute("os._exit(1)")
            assert (block.status, block.blocks_undone) == ("killed", 1)
            assert (before.blocks, fork.record.blocks, repl.record.blocks) == (2, 3, parent)
            assert await fork.aget("x", "drawn") == (["answer 1", 2, "answer 2"], drawn)
            assert (await fork.aexecute("print(open('file').read(), given)")).stdout == "text 2\n"
            assert await repl.aget("x", "given") == (["answer 1", 1], 1)
            block = await repl.aexecute("os._exit(1)")
            assert (block.status, await repl.aget("x")) == ("killed", ["answer 1", 1])
    assert asked == ["a", "b"]


def test_family_cannot_be_rolled_back_and_goes_on(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS.replace(checkpoint="each", keep_checkpoints=3)) as repl:
        for number in range(3):
            repl.execute(f"x = {number}")
        assert repl.rollback() == 1
        with repl.fork() as fork:
            for each in (fork, repl):
                with pytest.raises(ConfigurationError, match="to go back to: it was forked, or is a fork"):
                    each.rollback()
                assert each.get("x") == 1
            assert fork.record.blocks == 2


def test_fork_that_comes_too_late_is_ended(open_sandbox: Sandbox) -> None:
    hook = "n = []\ndef slow():\n    if len(n) == 1: time.sleep(4)\n"
    hook += "os.register_at_fork(before=lambda: n.append(1), after_in_child=slow)"
    with open_sandbox.repl(limits=LIMITS.replace(start_timeout_s=2)) as repl:
        repl.execute("import os, time\nx = [0]\n" + hook)
        with pytest.raises(SandboxFailed, match="did not answer within 2 s"):
            repl.fork()
        until_now(lambda: repl.execute(PROCESSES).stdout == "3\n")  # init, its keeper and itself
        assert repl.get("x") == [0]
        with repl.fork() as fork:
            assert fork.get("x") == [0]


def test_cpu_time_is_bounded_for_each(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS.replace(cpu_s=0.2)) as original, original.fork() as fork:
        for repl in (fork, original):
            block = repl.execute("while True: pass")
            assert (block.status, block.limit) == ("killed", "cpu_s")
            assert block.post_mortem is not None
            assert block.post_mortem.cpu_s > 0.2


def test_cpu_time_of_an_ended_fork_counts_for_no_other(open_sandbox: Sandbox) -> None:
    computes = "until = time.process_time() + 0.4\nwhile time.process_time() < until: pass"
    with open_sandbox.repl(limits=LIMITS.replace(cpu_s=0.6)) as original:
        original.execute("import time")
        forks = [original.fork() for _ in range(3)]
        original.execute("1")  # with the end of the hub, init waits for the keepers
        for fork in forks[1:]:
            assert fork.execute(computes).status == "ok"
            fork.close()
        assert [each.execute("time.sleep(0.2)").status for each in (forks[0], original)] == ["ok", "ok"]
        for _ in range(2):
            assert forks[0].execute(computes).status == "ok"
        with forks[0].fork() as younger:  # the process of the older one becomes a hub
            assert [each.execute("time.sleep(0.2)").status for each in (younger, forks[0])] == ["ok", "ok"]


def test_memory_counts_for_all_and_ends_the_one_that_grows(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS.replace(memory_bytes=300 << 20)) as repl:
        repl.execute("import time; shared = bytearray(b'x') * (100 << 20)")
        forks = [repl.fork() for _ in range(6)]
        for fork in forks:  # each sees 100 MB, and has little of its own
            assert fork.execute("import time; shared[0] = 1; time.sleep(0.05)").status == "ok"
        writes = "for at in range(0, len(shared), 4096): shared[at] = 1\ntime.sleep(0.5)"
        assert forks[0].execute(writes).status == "ok"
        block = forks[1].execute("own = bytearray(b'y') * (150 << 20)\ntime.sleep(20)")
        assert (block.status, block.limit) == ("killed", "memory_bytes")
        assert forks[0].execute("shared[4096]", value=True).value == 1
        assert forks[2].execute("shared[4096]", value=True).value == ord("x")


async def test_blocks_run_at_the_same_time_with_queries_of_their_own() -> None:
    both = asyncio.Barrier(2)

    async def answer(query: Query) -> list[Slot]:
        await both.wait()
        return [Slot("the parent's") for _ in query.prompts]

    async def answer_fork(query: Query) -> list[Slot]:
        await both.wait()
        return [Slot("the fork's") for _ in query.prompts]

    async with Sandbox(LIMITS, warm=0) as sandbox, sandbox.repl("the context", answer) as repl:
        await repl.aexecute("child = rlm_start('?')")
        fork, heir = await repl.afork(answer_fork), await repl.afork()
        code = "import os; os.write(1, b'raw '); print(llm_query('?'))"  # by two ways, in any order
        blocks = await asyncio.gather(repl.aexecute("print(child.result())"), fork.aexecute(code))
        assert [sorted(block.stdout.split()) for block in blocks] == [["parent's", "the"], ["fork's", "raw", "the"]]
        blocks = await asyncio.gather(heir.aexecute(code), fork.aexecute(code))
        assert [sorted(block.stdout.split()) for block in blocks] == [
            ["parent's", "raw", "the"],
            ["fork's", "raw", "the"],
        ]
        block = await heir.aexecute("print(child.done, child.result())")
        assert block.stdout.startswith("True Error: cancelled: it is a child of the REPL from which")


def test_interrupts_reach_their_own_block(repl: SandboxedRepl) -> None:
    with repl.fork() as fork:
        for each, other in ((fork, repl), (repl, fork)):
            block = each.execute("x.append(1)\nwhile True: pass", timeout_s=0.3)
            assert block.status == "interrupted"
            assert other.execute("1").status == "ok"
        assert fork.get("x") == repl.get("x") == [0, 1]
        located = fork.execute("signal.signal(signal.SIGINT, signal.SIG_IGN)\n\nwhile True: pass", timeout_s=0.3)
        assert "line 3 of the block" in (located.error or "")


def test_files_and_programs_are_shared_and_contexts_and_values_are_not(open_sandbox: Sandbox) -> None:
    limits = LIMITS.replace(later_context_bytes=1 << 20)
    with open_sandbox.repl("first", values={"given": 1}, limits=limits) as repl:
        repl.add_context("second")
        repl.execute("x = context_1")
        repl.provide({"more": 2})
        with repl.fork() as fork:
            repl.provide({"given": 3})
            assert fork.execute("print(given, more, x)").stdout == "1 2 second\n"
            assert fork.add_context("third") == repl.add_context("fourth") == "context_2"
            assert fork.execute("print(context, context_2)").stdout == "first third\n"
            assert repl.execute("print(given, context_2)").stdout == "3 fourth\n"
            fork.files.write("file", b"text")
            assert repl.execute("print(open('file').read())").stdout == "text\n"
            assert fork.run(["cat", "file"]).stdout == "text"
            fork.execute("import os; os._exit(1)")
            assert fork.execute("print(context, context_2, given)").stdout == "first third 1\n"


def test_forks_end_with_their_parent_unless_detached(open_sandbox: Sandbox) -> None:
    before = living_below()
    with open_sandbox.repl(limits=LIMITS) as repl:
        repl.execute("x = 1")
        fork, detached = repl.fork(), repl.fork(detached=True)
        below = detached.fork()
        detached.files.write("file", b"text")
    with pytest.raises(ReplClosed):
        fork.execute("1")
    assert detached.execute("print(x, open('file').read())").stdout == "1 text\n"
    assert detached.files.read("file") == b"text"
    detached.close()
    assert below.is_closed
    assert living_below() == before


def test_closed_sandbox_ends_forks() -> None:
    before = living_below()
    with Sandbox(LIMITS, warm=0) as sandbox:
        repl = sandbox.repl()
        repl.__enter__()
        fork = repl.fork(detached=True)
    assert living_below() == before
    assert fork.execute("1").status == "killed" or fork.is_closed
    fork.close()
    repl.close()


REFUSED = {
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "thread",
    ),
    "processes": ("if os.fork() == 0: time.sleep(99)", "processes that an earlier block has left"),
    "orphans": (
        "pid = os.fork()\nif pid == 0:\n    os.fork() or time.sleep(99)\n    os._exit(0)\nos.waitpid(pid, 0)",
        "processes that an earlier block has left",
    ),
}


@pytest.mark.parametrize(("code", "why"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_a_block_has_left_running_refuses_a_fork(repl: SandboxedRepl, code: str, why: str) -> None:
    assert repl.execute(code).status == "ok"
    with pytest.raises(ForkRefused, match=why):
        repl.fork()
    assert repl.execute("print(x)").stdout == "[0]\n"


def test_refused_fork_leaves_the_repl_as_it_was(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(
        "the context", limits=LIMITS.replace(max_processes=5, checkpoint="each", max_replay_s=0)
    ) as repl:
        repl.execute("x = [0]")
        repl.fork()
        with pytest.raises(ForkRefused, match="max_processes leaves no room"):
            repl.fork()
        assert repl.execute("x.append(1); print(x)").stdout == "[0, 1]\n"
        block = repl.execute("import os; os._exit(1)")
        assert "it was forked, or is a fork" in (block.error or "")


def test_checkpoints_that_are_about_to_end_take_no_process_from_forks(open_sandbox: Sandbox) -> None:
    limits = LIMITS.replace(max_processes=5, checkpoint="each")
    for _ in range(5):
        with open_sandbox.repl(limits=limits) as repl:
            repl.execute("x = bytearray(100_000_000)")  # whose pages make the end of a copy take time
            repl.execute("y = 1")
            with repl.fork() as fork:
                assert fork.execute("print(len(x), y)").stdout == "100000000 1\n"


def test_lone_repl_that_cannot_be_forked_goes_on(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("the context", limits=LIMITS.replace(max_processes=4)) as repl:
        repl.execute("x = [0]")
        for _ in range(3):  # for the same reason: no try leaves a process behind
            with pytest.raises(ForkRefused, match="max_processes leaves no room"):
                repl.fork()
        assert "ChildProcessError" in (repl.execute("import os; os.waitpid(-1, os.WNOHANG)").error or "")
        assert repl.execute("x.append(1); print(x)").stdout == "[0, 1]\n"
        assert repl.execute("import os; os._exit(1)").status == "killed"
        assert repl.execute("print(context)").stdout == "the context\n"


def test_seven_moments_can_follow_one_another(repl: SandboxedRepl) -> None:
    line = [repl]
    for number in range(7):
        line[-1].execute(f"x.append({number})")
        line.append(line[-1].fork())
    with pytest.raises(ForkRefused, match="seven moments"):
        line[-1].fork()
    assert [each.get("x") for each in line] == [[0, *range(min(number + 1, 7))] for number in range(8)]
    for _ in range(6):
        repl.execute("1")
        repl.fork().close()
    assert repl.get("x") == [0, 0]


def test_fork_at_another_level_is_refused() -> None:
    with Sandbox(isolation="standard", warm=0) as sandbox, sandbox.repl() as repl:
        with pytest.raises(ForkRefused, match="that needs isolation level 'strict', and it has 'standard'"):
            repl.fork()
        assert repl.execute("1").status == "ok"


async def test_busy_repl_is_not_forked_and_cancelled_fork_leaves_nothing() -> None:
    async with Sandbox(LIMITS, warm=0) as sandbox, sandbox.repl() as repl:
        begun = asyncio.Event()
        busy = asyncio.create_task(repl.aexecute("while True: print()", 1.0, lambda *_: begun.set()))
        await begun.wait()
        with pytest.raises(ReplBusy):
            await repl.afork()
        repl.interrupt()
        await busy
        cancelled = asyncio.create_task(repl.afork())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await repl.aexecute("1")).status == "ok"
        await until(lambda: len(psutil.Process(repl.pid).children(recursive=True)) <= 2)  # its keeper and itself


def test_end_of_init_ends_all(repl: SandboxedRepl) -> None:
    with repl.fork() as fork:
        assert repl.pid is not None
        os.kill(repl.pid, 9)
        for each in (repl, fork):
            assert each.execute("time.sleep(20)").status == "killed"  # a short block may end before its process
            assert each.execute("print(context, x)").stdout == "the context [0]\n"


def test_fork_before_the_first_block_and_of_a_ready_repl() -> None:
    with Sandbox(LIMITS, warm=1) as sandbox, sandbox.repl("small") as repl, repl.fork() as fork:
        assert fork.execute("print(context)").stdout == repl.execute("print(context)").stdout == "small\n"
