"""Blocks in real sandboxed processes: what comes back, what survives, what ends."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlm_broker.errors import ConfigurationError, ReplClosed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.watch import SLOWEST_S
from tests.processes import kill_below, living_below

IGNORES_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(interrupt_grace_s=0.5, max_output_bytes=10_000, max_repl_restarts=50), warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl(context="the context") as opened:
        yield opened


def test_variables_persist_and_the_last_expression_is_shown(repl: SandboxedRepl) -> None:
    assert repl.execute("x = 41").status == "ok"
    assert repl.execute("x + 1").stdout == "42\n"


def test_a_traceback_names_the_models_own_lines_and_no_other(repl: SandboxedRepl) -> None:
    block = repl.execute("def f():\n    return 1 / 0\nf()")
    assert block.status == "error"
    assert block.error == "ZeroDivisionError: division by zero"
    assert "return 1 / 0" in block.stderr
    assert "sandbox_worker" not in block.stderr


def test_a_syntax_error_is_an_outcome(repl: SandboxedRepl) -> None:
    block = repl.execute("x = = 1")
    assert block.status == "error"
    assert "SyntaxError" in block.stderr


def test_await_works_at_the_top_level(repl: SandboxedRepl) -> None:
    assert repl.execute("import asyncio\nawait asyncio.sleep(0, 'done')").stdout == "'done'\n"


def test_overwritten_names_are_back_in_the_next_block(repl: SandboxedRepl) -> None:
    repl.execute("context = llm_query = FINAL = answer = None")
    block = repl.execute("print(context, callable(llm_query), answer)\nFINAL(1)")
    assert block.stdout == "the context True {'content': '', 'ready': False}\n"
    assert block.final_answer == "1"


@pytest.mark.parametrize(
    "code",
    [
        "FINAL('the answer')",
        "v = 'the answer'\nFINAL_VAR('v')",
        "answer['content'] = 'the answer'; answer['ready'] = True",
        "answer['ready'] = True; answer['content'] = 'the answer'",
        "answer.update(content='the answer', ready=True)",
        "answer |= {'content': 'the answer', 'ready': True}",
        "answer = {'content': 'the answer', 'ready': True}",
        "SUBMIT('the answer')",
    ],
)
def test_every_way_to_submit_is_taken(repl: SandboxedRepl, code: str) -> None:
    assert repl.execute(code).final_answer == "the answer"


def test_final_var_of_an_unknown_name_is_an_error_that_lists_the_variables(repl: SandboxedRepl) -> None:
    repl.execute("known = 1")
    block = repl.execute("FINAL_VAR('unknown')")
    assert block.final_answer is None
    assert "no variable 'unknown'; variables: known" in block.stderr


def test_what_c_code_and_subprocesses_write_is_captured(repl: SandboxedRepl) -> None:
    block = repl.execute("import os, subprocess\nos.write(1, b'raw ')\nsubprocess.run(['echo', 'child'])\nNone")
    assert block.stdout == "raw child\n"
    assert repl.execute("print('next')").stdout == "next\n"


def test_output_past_the_limit_keeps_head_and_tail_and_names_the_cut(repl: SandboxedRepl) -> None:
    block = repl.execute("for i in range(100_000): print(i)\nimport os\nNone")
    assert block.stdout.startswith("0\n1\n")
    assert block.stdout.endswith("99999\n")
    assert "more cut" in block.stdout
    assert len(block.stdout) < 11_000


def test_output_arrives_while_the_block_still_runs(repl: SandboxedRepl) -> None:
    async def scenario() -> None:
        seen = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(_stream: str, _text: str) -> None:
            loop.call_soon_threadsafe(seen.set)

        code = "print('first')\nimport time\nwhile True: time.sleep(0.05)"
        block = asyncio.create_task(repl.aexecute(code, timeout_s=30, on_output=note))
        await asyncio.wait_for(seen.wait(), 20)
        assert not block.done()
        block.cancel()
        await asyncio.wait({block}, timeout=20)
        assert block.cancelled()

    asyncio.run(scenario())
    assert repl.execute("print(context)").stdout == "the context\n"


def test_variables_survive_an_interrupt(repl: SandboxedRepl) -> None:
    assert repl.execute("x = 41\nwhile True: pass", timeout_s=0.3).status == "interrupted"
    assert repl.execute("x + 1").stdout == "42\n"


def test_after_a_kill_the_context_is_back_and_the_variables_are_gone(repl: SandboxedRepl) -> None:
    block = repl.execute(f"x = 1\n{IGNORES_SIGINT}", timeout_s=0.3)
    assert block.status == "killed"
    assert "did not react to the interrupt" in (block.error or "")
    assert repl.execute("print(context, 'x' in globals())").stdout == "the context False\n"


def test_an_interrupt_never_hits_the_next_block(repl: SandboxedRepl) -> None:
    for _ in range(30):
        repl.execute("import time\nend = time.monotonic() + 0.02\nwhile time.monotonic() < end: pass", timeout_s=0.02)
        assert repl.execute("1").stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os; os.close(4); llm_query('?')", ""),
        ("import os, time; os.write(4, b'garbage!' * 9); time.sleep(60)", "protocol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
    ids=["exits", "crashes", "closes_its_door", "scribbles_on_its_door", "kills_itself"],
)
def test_a_repl_that_ends_itself_is_reported_and_replaced(repl: SandboxedRepl, code: str, reason: str) -> None:
    block = repl.execute(code, timeout_s=20)
    assert block.status == "killed"
    assert reason in (block.error or "")
    assert repl.execute("print(context)").stdout == "the context\n"


def test_sys_exit_ends_the_block_and_not_the_repl(repl: SandboxedRepl) -> None:
    block = repl.execute("x = 1\nimport sys; sys.exit('bye')")
    assert (block.status, block.error, block.exit_code) == ("exited", "bye", 1)
    assert repl.execute("x").stdout == "1\n"


def test_a_forked_child_that_falls_through_does_not_answer_for_its_parent(repl: SandboxedRepl) -> None:
    block = repl.execute("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')")
    assert "parent" in block.stdout
    assert repl.execute("'next'").stdout == "'next'\n"


def test_a_repl_is_restarted_only_so_often() -> None:
    limits = Limits(max_repl_restarts=1)
    with Sandbox(limits) as sandbox, sandbox.repl() as repl:
        assert repl.execute("import os; os._exit(1)").status == "killed"
        assert repl.execute("import os; os._exit(1)").status == "killed"
        with pytest.raises(ReplClosed, match="max_repl_restarts = 1"):
            repl.execute("1")


def test_nothing_of_the_host_and_no_other_descriptor_is_inside(repl: SandboxedRepl) -> None:
    block = repl.execute("import os\nprint(sorted(os.environ))\nprint(len(os.listdir('/proc/self/fd')))")
    names, descriptors = block.stdout.splitlines()
    assert set(eval(names)) <= {
        "PATH",
        "LANG",
        "HOME",
        "TMPDIR",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "GLIBC_TUNABLES",
        "LC_CTYPE",
    }
    assert int(descriptors) <= 7  # stdio, the door, where its stack goes, /dev/null as stdin's file, the listing itself


def test_the_network_and_the_door_cannot_be_used_to_reach_anybody(repl: SandboxedRepl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        address = canary.getsockname()
        for attempt in (
            f"socket.create_connection({address!r})",
            f"socket.socket(fileno=os.dup(4)).connect({address!r})",
            "socket.socket(fileno=os.dup(4)).listen()",
            f"socket.socket(fileno=os.dup(4)).sendto(b'x', 0x20000000, {address!r})",
        ):
            block = repl.execute(f"import os, socket\n{attempt}")
            assert "PermissionError" in (block.error or ""), attempt
        canary.setblocking(False)
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_a_sandbox_leaves_no_process_behind() -> None:
    before = living_below()
    with Sandbox() as sandbox, sandbox.repl() as repl:
        repl.execute("import os\nfor _ in range(5): os.fork() or (os.setsid(), __import__('time').sleep(1000))")
        assert living_below() - before
    assert not living_below() - before


ORCHESTRATOR = """
import os, signal, sys, time
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.limits import Limits
code = "import os, time\\nfor _ in range(3):\\n    if os.fork() == 0:\\n        os.setsid()\\n        while True: time.sleep(1)"
with Sandbox(Limits(), sys.argv[1]) as sandbox, sandbox.repl() as repl:
    repl.execute(code)
    print("up", flush=True)
    sys.stdin.readline()
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("level", "end"),
    [
        ("strict", "time.sleep(1000)"),  # until SIGKILL
        ("standard", "time.sleep(1000)"),
        ("strict", "os.kill(os.getpid(), signal.SIGTERM)"),
        ("strict", "os.kill(os.getpid(), signal.SIGINT)"),
        ("strict", "os._exit(3)"),
        ("strict", "os.abort()"),
        ("strict", "1 / 0"),
    ],
    ids=["sigkill", "sigkill_at_standard", "sigterm", "sigint", "exit", "abort", "exception"],
)
def test_an_orchestrator_that_ends_in_any_way_takes_everything_with_it(level: str, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, level, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path.cwd(),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= (4 if level == "strict" else 3)
        process.stdin.write(b"\n")
        process.stdin.flush()
        if end.startswith("time.sleep"):
            process.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []


def test_a_dead_fork_server_is_noticed_and_replaced(tmp_path: Path) -> None:
    del tmp_path
    with Sandbox() as sandbox:
        with sandbox.repl() as repl:
            kill_below()
            block = repl.execute("1")
            assert block.status == "killed"
        with sandbox.repl() as repl:
            assert repl.execute("1").stdout == "1\n"


@pytest.mark.parametrize("level", ["strict", "standard"])
def test_an_init_that_ended_between_two_blocks_is_replaced_with_the_context(level: str) -> None:
    others = living_below()
    with Sandbox(Limits(interrupt_grace_s=0.1), level) as sandbox, sandbox.repl("the context") as repl:
        running = next(process for process in living_below() - others if not process.children())
        init = psutil.Process(running.ppid())
        assert repl.execute("import os; os._exit(1)").status == "killed"
        init.kill()
        assert repl.execute("print(context)").stdout == "the context\n"


def test_until_its_first_block_a_repl_costs_no_cpu_time() -> None:
    def switches() -> list[int]:
        return [process.num_ctx_switches().voluntary for process in started]

    with Sandbox(warm=0) as sandbox, sandbox.repl():
        before = living_below()
        with sandbox.repl():
            started = list(living_below() - before)
            assert len(started) == 2
            deadline = time.monotonic() + 30
            seen: list[int] = []
            while seen != (seen := switches()):
                assert time.monotonic() < deadline, seen
                time.sleep(2.5 * SLOWEST_S)  # the watch would look every 10 ms, and ever more rarely


def test_an_unknown_level_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match="no isolation level 'vault'; choose one of: auto, strict, standard, process"
    ):
        Sandbox(isolation="vault")


def test_the_level_process_runs_code_and_warns() -> None:
    with pytest.warns(UserWarning, match="no security boundary"):
        unprotected = Sandbox(isolation="process")
    with unprotected, unprotected.repl("text") as repl:
        assert repl.execute("print(context)").stdout == "text\n"
        started = time.monotonic()
        assert repl.execute(IGNORES_SIGINT, timeout_s=0.2).status == "killed"
        assert time.monotonic() - started < 20
        assert repl.execute("print(context)").stdout == "text\n"
