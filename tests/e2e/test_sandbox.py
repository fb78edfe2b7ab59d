"""Blocks in real sandboxed processes: what comes back, what survives, what ends."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlm_broker.limits import Limits, ReplLimits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.init.usage_watch import SLOWEST_S
from sandbox_worker.wire.level import LevelName
from sandbox_worker.wire.messages import Query, Slot
from tests.support.forked_python import Python, python
from tests.support.processes import lives, living_below
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until_now


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(interrupt_grace_s=WAIT_S, max_output_bytes=10_000, max_repl_restarts=50), warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl(context="the context") as opened:
        yield opened


def test_descriptor_output_of_subprocesses_is_captured(repl: SandboxedRepl) -> None:
    """Output that C code and subprocesses write is captured."""
    block = repl.execute("import os, subprocess\nos.write(1, b'raw ')\nsubprocess.run(['echo', 'child'])\nNone")
    assert block.stdout == "raw child\n"
    assert repl.execute("print('next')").stdout == "next\n"


@table(
    "code",
    [
        "raise KeyboardInterrupt",
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import _thread; _thread.interrupt_main()",
    ],
)
def test_keyboard_interrupt_of_code_is_an_error(repl: SandboxedRepl, code: str) -> None:
    """A KeyboardInterrupt that code raises itself is an ordinary error."""
    block = repl.execute(code)
    assert (block.status, block.error, block.limit) == ("error", "KeyboardInterrupt", None)


def test_interrupt_never_hits_the_next_block(repl: SandboxedRepl) -> None:
    for _ in range(30):
        repl.execute("import time\nend = time.monotonic() + 0.02\nwhile time.monotonic() < end: pass", timeout_s=0.02)
        assert repl.execute("1").stdout == "1\n"


@table(
    "code, reason",
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os; os.close(4); llm_query('?')", ""),
        ("import os, time; os.write(4, b'garbage!' * 9); time.sleep(1000)", "protocol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
def test_repl_that_exits_is_replaced(repl: SandboxedRepl, code: str, reason: str) -> None:
    block = repl.execute(code)
    assert block.status == "killed"
    assert reason in (block.error or "")
    assert repl.execute("print(context)").stdout == "the context\n"


def test_host_environment_and_descriptors_stay_outside(repl: SandboxedRepl) -> None:
    """The REPL has no variable of the host's environment and no further descriptor."""
    block = repl.execute("import os\nprint(sorted(os.environ))\nprint(len(os.listdir('/proc/self/fd')))")
    names, descriptors = block.stdout.splitlines()
    ours = "PATH LOGNAME USER HOME TMPDIR LANG LC_CTYPE GLIBC_TUNABLES"
    assert {*eval(names)} <= {*ours.split(), "JE_ARROW_MALLOC_CONF", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}
    # stdio, the connection, where its stack goes, what it is handed, /dev/null as stdin's file, the listing itself
    assert int(descriptors) <= 8


@pytest.mark.skipif(not Path("/etc/fonts/fonts.conf").exists(), reason="fontconfig is not installed")
def test_fonts_configuration_is_read_only(repl: SandboxedRepl) -> None:
    block = repl.execute("print(len(open('/etc/fonts/fonts.conf').read()) > 0)\nopen('/etc/fonts/new', 'w')")
    assert block.stdout == "True\n"
    assert (block.error or "").startswith(("OSError: [Errno 30]", "PermissionError: [Errno 13]"))


def test_sandbox_leaves_no_process() -> None:
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


@table(
    "level, end",
    [
        ("strict", "time.sleep(1000)"),  # until SIGKILL
        ("standard", "time.sleep(1000)"),
        ("strict", "os.kill(os.getpid(), signal.SIGTERM)"),
        ("strict", "os.kill(os.getpid(), signal.SIGINT)"),
        ("strict", "os._exit(3)"),
        ("strict", "os.abort()"),
        ("strict", "1 / 0"),
    ],
    at_once=4,
)
def test_orchestrator_end_ends_all_processes(level: LevelName, end: str) -> None:
    with (
        Python(["-c", ORCHESTRATOR, level, end], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # whatever fails here
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= (4 if level == "strict" else 3)
        process.stdin.write("\n")
        process.stdin.flush()
        if end.startswith("time.sleep"):
            process.kill()
        process.wait(WAIT_S)
    until_now(lambda: not any(map(lives, below)))


@table("level", ["strict", "standard"])
def test_init_that_died_is_replaced_with_context(level: LevelName) -> None:
    """An init that ended between two blocks is replaced, with the context."""
    others = living_below()
    with Sandbox(Limits(interrupt_grace_s=0.1), level) as sandbox, sandbox.repl("the context") as repl:
        running = next(process for process in living_below() - others if not process.children())
        init = psutil.Process(running.ppid())
        assert repl.execute("import os; os._exit(1)").status == "killed"
        init.kill()
        assert repl.execute("print(context)").stdout == "the context\n"


def test_repl_before_first_block_costs_no_cpu() -> None:
    def switches() -> list[int]:
        return [process.num_ctx_switches().voluntary for process in started]

    with Sandbox(warm=0) as sandbox, sandbox.repl():
        before = living_below()
        with sandbox.repl():
            started = list(living_below() - before)
            assert len(started) == 2
            deadline = time.monotonic() + WAIT_S
            seen: list[int] = []
            while seen != (seen := switches()):
                assert time.monotonic() < deadline, seen
                time.sleep(2.5 * SLOWEST_S)  # the watch would look every 10 ms, and ever more rarely


def test_answers_and_prompts_keep_their_limits(sandbox: Sandbox) -> None:
    seen: list[int] = []

    async def answer(query: Query) -> list[Slot]:
        seen.extend(len(text) for text in query.texts)
        return [Slot(text="ok")]

    with sandbox.repl(answer=answer) as repl:
        block = repl.execute("FINAL('\U0001f600' * 4_000_000)")
        assert block.final_answer == "\U0001f600" * 4_000_000
        refused = repl.execute("FINAL('x' * 17_000_000)")
        assert (refused.status, refused.final_answer) == ("error", None)
        assert "the final answer is too large" in (refused.error or "")
        assert repl.execute("llm_query('x' * 4_000_000)").stdout == "'ok'\n"
        assert "4,194,304 at most" in repl.execute("llm_query('x' * 4_200_000)").stdout
        assert seen == [4_000_000]


def test_fork_of_code_forgets_its_threads(repl: SandboxedRepl) -> None:
    """The fork server and init do without this at their own forks, since they have no threads."""
    if repl.isolation.level != "strict":
        pytest.skip("no processes at this level")
    block = repl.execute(
        "import os, threading\n"
        "stop, (read_end, write_end) = threading.Event(), os.pipe()\n"
        "threading.Thread(target=stop.wait).start()\n"
        "if os.fork() == 0:\n    os.write(write_end, b'%d' % threading.active_count())\n    os._exit(0)\n"
        "print(os.read(read_end, 9).decode(), threading.active_count())\n"
        "stop.set()"
    )
    assert block.stdout == "1 2\n"


GROUPS = {
    "popen": "p = subprocess.Popen(['sleep', '100'], start_new_session=True)",
    "preexec": "p = subprocess.Popen(['sleep', '100'], preexec_fn=os.setsid)",
    "fork": (
        "class p: pid = os.fork()\n"
        "if p.pid == 0:\n    os.setsid()\n    time.sleep(100)\n"
        "while os.getpgid(p.pid) == os.getpgrp(): time.sleep(0.001)"
    ),
}


@table("child", GROUPS)
def test_child_session_is_not_the_repls(repl: SandboxedRepl, child: str) -> None:
    """The process group of a child that asked for a session is not the REPL's."""
    if repl.isolation.level != "strict":
        pytest.skip("no processes at this level")
    code = (
        f"import os, signal, subprocess, time\n{GROUPS[child]}\n"
        "os.killpg(os.getpgid(p.pid), signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(p.pid, 0)[1]))"
    )
    assert repl.execute(code).stdout == "-15\n"


def test_subprocess_finds_this_python(repl: SandboxedRepl) -> None:
    if repl.isolation.level != "strict":
        pytest.skip("no processes at this level")
    code = (
        "import subprocess, sys\n"
        "for name in ('python', 'python3', sys.executable):\n"
        "    subprocess.run([name, '-c', 'import sys, msgspec; print(sys.version)'], check=True)\n"
        "print(sys.version)"
    )
    block = repl.execute(code)
    assert block.stdout.splitlines() == [sys.version] * 4, block.error


def test_user_has_a_name_and_a_home(repl: SandboxedRepl) -> None:
    code = "import getpass, os\nprint(getpass.getuser(), os.path.expanduser('~') == os.getcwd())"
    assert repl.execute(code).stdout == "rlm True\n"


CLOSES_AT_EXIT = """
import atexit, sys, tempfile, warnings
warnings.simplefilter("ignore")
tempfile.tempdir = sys.argv[2]
from rlm_broker import Sandbox
from sandbox_worker.wire.level import LevelName
sandbox = Sandbox(isolation=sys.argv[1])
sandbox.__enter__()
repl = sandbox.repl("x" * 200_000)
repl.__enter__()
template = sandbox.template(setup="y = 1")
template.__enter__()
of_template = template.repl()
of_template.__enter__()
print(repl.execute("print(len(context)); open('f', 'w').write('x')").stdout, of_template.execute("y").stdout)
atexit.register(sandbox.close)
"""


@table("level", ["strict", "standard", "process"], at_once=3)
def test_sandbox_closed_at_exit_is_silent(level: LevelName, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    ended = python("-c", CLOSES_AT_EXIT, level, tmp_path, takes_down=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "200000\n1\n 1\n\n", "")
    assert list(tmp_path.iterdir()) == []


def test_seed_fixes_numbers_and_orders() -> None:
    code = (
        "print({word for word in 'alpha beta gamma delta epsilon zeta'.split()})\n"
        "import random, numpy\nprint(random.random(), numpy.random.rand())"
    )
    with Sandbox(seed=7, warm=0) as sandbox, sandbox.repl() as repl:
        told = [repl.execute(code).stdout]
    with (
        Sandbox(seed=7, warm=0) as sandbox,
        sandbox.template(imports=["random", "numpy"]) as template,
        template.repl(limits=ReplLimits(max_replay_s=0)) as repl,
    ):
        told.append(repl.execute(code).stdout)
        repl.execute("import os; os._exit(3)")
        told.append(repl.execute(code).stdout)
    assert "{" in told[0]
    assert set(told) == {told[0]}
