"""Programs that are run in real sandboxes: their results, their bounds, and the end of all that they start."""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker import (
    ConfigurationError,
    FileRefused,
    IsolationUnavailable,
    ProgramNotStarted,
    ProgramResult,
    ReplBusy,
    ReplClosed,
    ReplLimits,
    Sandbox,
    SandboxedRepl,
    SandboxFailed,
)
from sandbox_worker.wire.control import MAX_ARGUMENT_BYTES
from sandbox_worker.wire.level import LevelName
from tests.support.forked_python import python
from tests.support.launcher import needs_strict
from tests.support.places import PROJECT
from tests.support.processes import living_below
from tests.support.scratch import TEMPORARY
from tests.support.skips import NEEDS_ROOT
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until

pytestmark = [needs_strict, pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")]
DAEMONS = "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) ; sleep 1000"
BURN = "while :; do :; done"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(isolation="strict", warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl(env={"GIVEN": "to the REPL"}) as opened:
        assert opened.execute("kept = 1").status == "ok"
        assert opened.run(["true"]).exit_code == 0  # its launcher stays
        yield opened
        assert opened.execute("kept").stdout == "1\n"


@contextmanager
def nothing_more() -> Iterator[None]:
    """Check that no process and no descriptor is left in addition to those before."""
    before, files = living_below(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a number
    yield
    assert len(living_below()) <= len(before)  # a launcher that was killed has a successor
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208


def sleeping() -> list[psutil.Process]:
    return [each for each in living_below() if each.name() == "sleep"]


# -- what a program says ---------------------------------------------------------------------------------------------


def test_end_output_and_time_are_told(repl: SandboxedRepl) -> None:
    with nothing_more():
        result = repl.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert result.execution_time > 0
        expected = ProgramResult(
            result.argv, "ended", 3, None, b"out\n", b"err\n", execution_time=result.execution_time
        )
        assert result == expected
        assert repl.run(["true"]).exit_code == 0
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
        result = repl.run(["sh", "-c", f"kill -{int(number)} $$"])
        assert (result.status, result.exit_code, result.signal, result.limit) == ("ended", None, number, None)


def test_input_and_binary_output_go_through_as_bytes(repl: SandboxedRepl) -> None:
    data = bytes(range(256)) * 2000
    repl.files.write("data", data)
    assert repl.run(["cmp", "-", "data"], input=data).exit_code == 0
    shown = [
        repl.run(["cat"], input="héé"),
        repl.run(["cat"]),
        repl.run(["printf", r"a\377b"]),
        repl.run(["printf", r"\303"]),
    ]
    assert [result.stdout for result in shown] == ["héé", "", "a\ufffdb", "\ufffd"]
    assert [result.stdout_bytes for result in shown] == ["héé".encode(), b"", b"a\xffb", b"\xc3"]
    assert repl.run(["cat", "data"], max_output_bytes=1 << 20).stdout_bytes == data
    assert repl.run(["sh", "-c", r"printf '\377' >&2"]).stderr_bytes == b"\xff"
    with nothing_more():  # input that is not read holds nothing up
        assert repl.run(["true"], input=bytes(10 << 20)).exit_code == 0
        assert repl.run(["sh", "-c", "head -c 5; sleep 0"], input=b"x" * (1 << 20)).stdout == "xxxxx"


def test_much_output_keeps_its_ends_and_costs_no_memory(repl: SandboxedRepl) -> None:
    code = "import sys; sys.stdout.write('first\\n'); sys.stdout.flush()\nfor _ in range(1600): sys.stdout.buffer.write(bytes(65536))\nprint('last')"
    repl.run(["true"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = repl.run(["python3", "-c", code], max_output_bytes=1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # kilobytes
    assert result.stdout.startswith("first\n\0")
    assert result.stdout.endswith("\0last\n")
    assert f"[{1600 * 65536 + 11 - 1000:,} more cut]" in result.stdout
    assert len(result.stdout) < 1100
    assert result.is_cut
    assert not repl.run(["printf", "x" * 100], max_output_bytes=100).is_cut


def test_bounds_are_those_of_a_block_unless_given(sandbox: Sandbox) -> None:
    with sandbox.repl(limits=ReplLimits(max_output_lines=4, block_timeout_s=0.5)) as repl:
        assert "lines: 16" in repl.run(["seq", "20"], timeout_s=WAIT_S).stdout
        assert repl.run(["sleep", "1000"]).status == "timeout"
        assert repl.run(["sleep", "1"], timeout_s=WAIT_S).status == "ended"


def test_variables_are_those_of_code_and_more(repl: SandboxedRepl) -> None:
    code = "import subprocess; print(subprocess.run(['env'], capture_output=True, text=True).stdout, end='')"
    own = set(repl.execute(code).stdout.splitlines())
    assert "GIVEN=to the REPL" in own
    assert set(repl.run(["env"]).stdout.splitlines()) == own
    assert set(repl.run(["env"], env={"MORE": "héé", "GIVEN": "anew"}).stdout.splitlines()) == (
        own - {"GIVEN=to the REPL"} | {"MORE=héé", "GIVEN=anew"}
    )


def test_program_sees_what_a_process_of_code_sees(repl: SandboxedRepl) -> None:
    look = (
        "import os, resource, signal; print(os.getuid(), os.listdir('/'), sorted(os.listdir('/proc/self/fd'))[:3], "
        "[resource.getrlimit(each) for each in range(16) if each not in (resource.RLIMIT_AS, resource.RLIMIT_DATA)], "
        "os.getpriority(0, 0), "
        "[line for line in open('/proc/self/status') if line[:3] in ('Sec', 'Cap', 'NoN', 'Sig') and line[:4] != 'SigQ'"
        # `posix_spawn` ignores two signals of the C library's own
        " and line[:6] != 'SigIgn'], {number for number in range(1, 32) if signal.getsignal(number) is signal.SIG_IGN})"
    )
    repl.files.write("look.py", look.encode())
    code = "import subprocess; subprocess.run(['python3', 'look.py'], stdin=subprocess.DEVNULL).returncode"
    assert repl.execute(code).stdout == repl.run(["python3", "look.py"]).stdout + "0\n"
    bound = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    of_code = int(repl.execute(f"import subprocess\n{bound}").stdout)
    of_program = int(repl.run(["python3", "-c", bound]).stdout)  # forked from init, which may have grown
    assert abs(of_code - of_program) < 1 << 20


def test_program_cwd_is_in_the_scratch_folder(repl: SandboxedRepl) -> None:
    repl.files.write("sub/er/x", b"")
    repl.execute("import os; os.symlink('/usr', 'link'); os.symlink('sub', 'inner')")
    assert repl.run(["ls"], cwd="sub/er").stdout == "x\n"
    assert repl.run(["ls"], cwd=Path("sub")).stdout == "er\n"
    for path in ("link", "inner/er", "link/lib"):
        with pytest.raises(FileRefused, match=re.escape(f"cwd = {path!r} goes through") + ".*links are not followed"):
            repl.run(["ls"], cwd=path)
    with pytest.raises(FileRefused, match="cwd = 'none' cannot be opened: No such file"):
        repl.run(["ls"], cwd="none")
    with pytest.raises(FileRefused, match=r"'sub/er/x'.*not a folder"):
        repl.run(["ls"], cwd="sub/er/x")
    for path in ("..", "sub/../..", "/usr/.."):
        with pytest.raises(FileRefused, match=r"must be without '\.\.'"):
            repl.run(["ls"], cwd=path)
    for path, shown in {
        "/w/sub/er": "/w/sub/er",
        f"{TEMPORARY}/sub": "/w/sub",
        TEMPORARY: "/w",
        "/usr/lib": "/usr/lib",
    }.items():
        assert repl.run(["/bin/sh", "-c", "pwd -P"], cwd=path).stdout == f"{shown}\n"
    for path in ("/none", "/w/none"):
        with pytest.raises(FileRefused, match=f"cwd = '{path}' cannot be opened: No such file") as refused:
            repl.run(["ls"], cwd=path)
        assert refused.value.kind == "missing"


# -- what cannot be started ------------------------------------------------------------------------------------------


def test_program_that_cannot_be_started_is_an_error(repl: SandboxedRepl) -> None:
    repl.files.write("plain", b"#!/bin/sh\necho ran\n")
    with nothing_more():
        for name, why in [
            ("none", "No such file or directory"),
            ("./none", "No such file or directory"),
            ("./plain", "Permission denied"),
            ("/usr", "Permission denied"),
            ("x" * 5000, "File name too long"),
        ]:
            with pytest.raises(ProgramNotStarted, match=f"^the program '{name[:200]}' cannot be started: {why}$"):
                repl.run([name])
    repl.execute("import os; os.chmod('plain', 0o700)")
    assert repl.run(["./plain"]).stdout == "ran\n"
    with pytest.raises(ProgramNotStarted, match="No such file"):
        repl.run(["ls"], env={"PATH": "/nowhere"})


@table(
    "given, why",
    [
        ({"argv": []}, "argv names no program"),
        ({"argv": [""]}, "argv names no program"),
        ({"argv": "ls -l"}, r"argv must be a list of texts, such as \['ls', '-l'\], not str"),
        ({"argv": b"ls"}, "not bytes"),
        ({"argv": None}, "not NoneType"),
        ({"argv": ["ls", 5]}, r"argv\[1\] must be text, not int"),
        ({"argv": ["ls", b"x"]}, r"argv\[1\] must be text, not bytes"),
        ({"argv": ["ls", "a\0b"]}, r"argv\[1\] has a NUL character"),
        ({"argv": ["ls", "\ud800"]}, r"argv\[1\] has lone surrogates"),
        ({"argv": ["ls", "x" * (MAX_ARGUMENT_BYTES + 1)]}, r"argv\[1\] has 131,072 bytes, more than 131,071"),
        ({"argv": ["ls", *["x" * 100_000] * 21]}, "argv and env have 2,1.* more than 2,097,152: give more as input"),
        ({"env": {"A": "x" * (1 << 17)}}, "env: the variable 'A' has 131,074 bytes, more than 131,071"),
        ({"input": 5}, "input must be bytes, text or None, not int"),
        ({"input": "\ud800"}, "input has lone surrogates"),
        ({"cwd": 5}, "a path in a REPL must be text, not int"),
        ({"env": {"A=": ""}}, "env: a variable's name must be text without '='"),
        ({"env": {"A": "\0"}}, "env: the variable 'A' has a NUL character"),
        ({"env": 5}, "env must be a dict from name to text, not int"),
        ({"timeout_s": 0}, "timeout_s = 0: give a positive number"),
        ({"timeout_s": True}, "timeout_s = True: give a positive number"),
        ({"max_output_bytes": 5}, "max_output_bytes = 5: give a number of bytes"),
    ],
)
def test_run_refuses_unusable_arguments_in_words(repl: SandboxedRepl, given: dict[str, Any], why: str) -> None:
    run: Any = repl.run
    with pytest.raises(ConfigurationError, match=why):
        run(**{"argv": ["ls"], **given})


@table(
    "code, given, why",
    [
        (5, {}, "code must be text, not int"),
        ("1", {"argv": "main.py"}, r"argv must be a list of texts, such as \['main.py', 'a'\], not str"),
        ("1", {"argv": ["main.py", 5]}, r"argv\[1\] must be text, not int"),
        ("1", {"stdin": b"x"}, "stdin must be text, an async function or None, not bytes"),
    ],
)
def test_script_refuses_unusable_arguments_in_words(
    repl: SandboxedRepl, code: Any, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        repl.execute_script(code, **given)


def test_longest_argument_and_names_of_any_bytes_arrive(repl: SandboxedRepl) -> None:
    assert repl.run(["printf", "%s", "x" * MAX_ARGUMENT_BYTES]).stdout == "x" * MAX_ARGUMENT_BYTES
    many = ["x" * 100_000] * 15
    counted = repl.run(["sh", "-c", "echo $# ${#BIG}", "sh", *many], env={"BIG": "y" * 100_000, "MORE": "z" * 100_000})
    assert counted.stdout == "15 100000\n"
    with pytest.raises(ProgramNotStarted, match="Argument list too long"):  # with the pointers, which the kernel counts
        repl.run(["true", *["x"] * 600_000])
    assert repl.run(["touch", os.fsdecode(b"\xff")]).exit_code == 0
    assert os.fsdecode(b"\xff") in [each.name for each in repl.files.list()]
    assert repl.run(["cat", os.fsdecode(b"\xff")]).exit_code == 0


@table(
    "level, may_exec, why",
    [
        ("standard", None, "'standard'.*use 'strict'"),
        ("process", None, "'process'.*use 'strict'"),
        ("strict", False, "allow_exec=False"),
    ],
)
def test_programs_need_a_level_that_ends_them(level: LevelName, may_exec: bool | None, why: str) -> None:
    refused = pytest.raises(ConfigurationError, match=why)
    with Sandbox(isolation=level, allow_exec=may_exec) as sandbox, sandbox.repl() as repl, refused:
        repl.run(["true"])


def test_repl_that_is_not_open_or_closed_runs_nothing(sandbox: Sandbox) -> None:
    repl = sandbox.repl()
    with pytest.raises(SandboxFailed, match="not open"):
        repl.run(["true"])
    with repl:
        pass
    with pytest.raises(ReplClosed):
        repl.run(["true"])


# -- its end ---------------------------------------------------------------------------------------------------------


def test_all_that_a_program_started_ends_with_it(repl: SandboxedRepl) -> None:
    with nothing_more():
        late = repl.run(["sh", "-c", f"echo started; {DAEMONS}"], timeout_s=1)
        assert not sleeping()
        ended = repl.run(["sh", "-c", "sleep 1000 & (setsid sleep 1000 &); echo left; exit 5"])
        assert not sleeping()
    assert (late.status, late.limit, late.signal, late.stdout) == ("timeout", "timeout_s", 9, "started\n")
    assert late.error == "it ran longer than timeout_s = 1 s"
    assert (ended.status, ended.exit_code, ended.stdout) == ("ended", 5, "left\n")


async def test_cancelled_caller_ends_its_program_and_no_other(sandbox: Sandbox) -> None:
    async with sandbox.repl() as repl:
        await repl.aexecute("kept = 1")
        other = asyncio.create_task(repl.arun(["sleep", "1001"]))
        await until(lambda: len(sleeping()) == 1)
        assert (await repl.arun(["sh", "-c", "kill -TERM $$"])).signal == signal.SIGTERM
        running = asyncio.create_task(repl.arun(["sh", "-c", DAEMONS]))
        await until(lambda: len(sleeping()) == 6)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [each.cmdline() for each in sleeping()] == [["sleep", "1001"]]
        assert (await repl.aexecute("kept")).stdout == "1\n"
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        assert not sleeping()


async def test_closing_the_repl_ends_its_programs_and_says_so(sandbox: Sandbox) -> None:
    async with sandbox.repl() as repl:
        running = [asyncio.create_task(repl.arun(["sh", "-c", DAEMONS])) for _ in range(2)]
        await until(lambda: len(sleeping()) == 10)
    for result in await asyncio.wait_for(asyncio.gather(*running), WAIT_S):
        assert (result.status, result.error) == ("killed", "the REPL was closed")
    assert not sleeping()


async def test_programs_end_with_a_killed_repl_and_say_so(sandbox: Sandbox) -> None:
    async with sandbox.repl(limits=ReplLimits(interrupt_grace_s=0.1)) as repl:
        running = asyncio.create_task(repl.arun(["sh", "-c", DAEMONS]))
        await until(lambda: len(sleeping()) == 5)
        code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)"
        assert (await repl.aexecute(code, timeout_s=0.1)).status == "killed"
        result = await asyncio.wait_for(running, WAIT_S)
        assert (result.status, result.error) == ("killed", "it was killed with its REPL")
        assert not sleeping()
        assert (await repl.arun(["echo", "again"])).stdout == "again\n"
        assert (await repl.aexecute("1")).stdout == "1\n"


async def test_program_is_watched_while_the_repl_is_dead(sandbox: Sandbox) -> None:
    async with sandbox.repl(limits=ReplLimits(cpu_s=0.5)) as repl:
        (pid,) = [each.pid for each in living_below() if not each.children()]
        os.kill(pid, signal.SIGKILL)
        assert (await repl.arun(["echo", "here"])).stdout == "here\n"
        assert (await repl.arun(["sh", "-c", BURN])).limit == "cpu_s"


# -- the launcher ----------------------------------------------------------------------------------------------------

PARENT = ["sh", "-c", "echo $PPID"]


def launcher() -> psutil.Process:
    """Return the process that starts the programs of the one REPL that lives: the younger child of its init."""
    return max((each for each in living_below() if not each.children()), key=lambda each: each.pid)


def test_programs_one_after_the_other_are_started_by_one_process(repl: SandboxedRepl) -> None:
    before = living_below()
    first = repl.run(PARENT).stdout
    with pytest.raises(ProgramNotStarted):
        repl.run(["none"])
    assert repl.run(["sh", "-c", "sleep 1000 & exit 3"]).exit_code == 3
    assert [repl.run(PARENT).stdout for _ in range(10)] == [first] * 10
    assert living_below() == before
    assert repl.run(["sh", "-c", "kill 0"]).signal == signal.SIGTERM  # its group is its own
    assert repl.run(["sh", "-c", "kill -TERM $PPID; kill -TSTP $PPID; echo on"]).stdout == "on\n"
    assert repl.run(PARENT).stdout == first


def test_launcher_that_ended_or_was_stopped_costs_no_program(repl: SandboxedRepl) -> None:
    first = repl.run(PARENT).stdout
    launcher().send_signal(signal.SIGSTOP)
    assert repl.run(PARENT).stdout == first
    for _ in range(5):
        starting = launcher()
        starting.kill()
        with suppress(ProgramNotStarted):  # while it ends, it may still get a program, which ends with it
            result = repl.run(["echo", "here"])
            assert result.signal == signal.SIGKILL or result.stdout == "here\n"
        starting.wait(WAIT_S)
        assert repl.run(["echo", "here"]).stdout == "here\n"
    assert repl.run(PARENT).stdout != first


async def test_program_ends_with_its_launcher(sandbox: Sandbox) -> None:
    async with sandbox.repl() as repl:
        assert (await repl.arun(["true"])).exit_code == 0
        starting = launcher()
        running = asyncio.create_task(repl.arun(["sh", "-c", DAEMONS]))
        await until(lambda: len(sleeping()) == 5)
        starting.kill()
        result = await asyncio.wait_for(running, WAIT_S)
        assert (result.status, result.signal) == ("ended", signal.SIGKILL)
        assert not sleeping()
        assert (await repl.arun(["echo", "on"])).stdout == "on\n"


def test_launcher_takes_no_process_from_code_and_is_not_counted(sandbox: Sandbox) -> None:
    forks = """
import os, signal, time
made = []
try:
    while pid := os.fork(): made.append(pid)
    signal.pause()
except BlockingIOError: pass
for pid in made: os.kill(pid, 9); os.waitpid(pid, 0)
print(len(made))
"""
    with sandbox.repl(limits=ReplLimits(max_processes=8, block_timeout_s=0.5, interrupt_grace_s=0.1)) as repl:
        unbound = repl.execute(forks).stdout
        assert repl.run(["true"]).exit_code == 0
        assert repl.execute(forks).stdout == "6\n"  # init and the REPL are the others
        assert unbound == "7\n"  # the place of the launcher
        code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)"
        seen = repl.execute(code).post_mortem
        assert seen is not None
        assert seen.processes == 1


def test_repl_without_programs_has_no_launcher(sandbox: Sandbox) -> None:
    before = len(living_below())
    with sandbox.repl() as repl:
        repl.execute("1")
        assert len(living_below()) == before + 2
        repl.run(["true"])
        assert len(living_below()) == before + 3


# -- bounds ----------------------------------------------------------------------------------------------------------


async def test_several_run_beside_each_other_and_beside_a_block(sandbox: Sandbox) -> None:
    async with sandbox.repl() as repl:
        code = "import os, subprocess, time\nwhile not os.path.exists('go'):\n    assert subprocess.run(['true']).returncode == 0\nprint('went')"
        block = asyncio.create_task(repl.aexecute(code))
        numbers = await asyncio.gather(*(repl.arun(["sh", "-c", f"exit {number}"]) for number in range(16)))
        assert [result.exit_code for result in numbers] == list(range(16))
        assert not block.done()
        assert (await repl.arun(["touch", "go"])).exit_code == 0
        assert (await asyncio.wait_for(block, WAIT_S)).stdout == "went\n"


@pytest.mark.parametrize(
    ("limits", "code", "refusal", "why"),
    [
        (ReplLimits(max_programs=1), "", ReplBusy, "runs 1 programs already, as many as max_programs allows"),
        (
            ReplLimits(max_processes=6),
            "import subprocess\nall = [subprocess.Popen(['sleep', '1000']) for _ in range(3)]",
            ProgramNotStarted,
            "as many processes as max_processes allows",
        ),
    ],
)
async def test_program_above_a_limit_is_refused(
    sandbox: Sandbox, limits: ReplLimits, code: str, refusal: type[Exception], why: str
) -> None:
    async with sandbox.repl(limits=limits) as repl:
        assert (await repl.aexecute(code)).status == "ok"
        running = asyncio.create_task(repl.arun(["sleep", "1001"]))
        await until(lambda: ["sleep", "1001"] in [each.cmdline() for each in sleeping()])
        with pytest.raises(refusal, match=why):
            await repl.arun(["true"])
        assert (await repl.aexecute("1")).stdout == "1\n"
        running.cancel()
        await asyncio.wait({running})
        assert (await repl.arun(["true"])).exit_code == 0


async def test_memory_above_the_limit_ends_repl_and_programs(sandbox: Sandbox) -> None:
    async with sandbox.repl(limits=ReplLimits(memory_bytes=200 << 20)) as repl:
        await repl.aexecute("x = 1")
        other = asyncio.create_task(repl.arun(["sleep", "1000"]))
        hogs = [
            asyncio.create_task(repl.arun(["python3", "-c", "import time; x = bytearray(80 << 20); time.sleep(1000)"]))
            for _ in range(4)
        ]
        for result in await asyncio.wait_for(asyncio.gather(other, *hogs), WAIT_S):
            assert (result.status, result.limit) == ("killed", "memory_bytes")
            assert result.error == "it was killed with its REPL at memory_bytes = 209,715,200"
        block = await repl.aexecute("x")
        assert block.status == "killed"
        assert "memory_bytes = 200 MiB" in str(block.error)
        assert (await repl.arun(["true"])).exit_code == 0


def test_program_past_its_cpu_time_ends_alone(sandbox: Sandbox) -> None:
    with sandbox.repl(limits=ReplLimits(cpu_s=0.5)) as repl:
        repl.execute("kept = 1")
        result = repl.run(["sh", "-c", f"({BURN}) & {BURN}"])
        assert (result.status, result.limit, result.error) == ("killed", "cpu_s", "it was killed at cpu_s = 0.5")
        assert repl.execute("kept").stdout == "1\n"


async def test_cpu_time_of_programs_and_blocks_counts_apart(sandbox: Sandbox) -> None:
    """Each process takes less than the limit, and all together more: living, waited-for and orphaned ones."""
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    async with sandbox.repl(limits=ReplLimits(cpu_s=1)) as repl:
        await repl.files.awrite("burn.py", burn.encode())
        block = asyncio.create_task(
            repl.aexecute(f"import os, time\n{burn}\nwhile not os.path.exists('go'): time.sleep(0.01)")
        )
        commands = [
            "python3 burn.py",
            "(python3 burn.py) ; true",
            "(python3 burn.py; touch a) & until test -e a; do sleep 0.1; done",
        ]
        for result in await asyncio.gather(*(repl.arun(["sh", "-c", command]) for command in commands)):
            assert (result.status, result.exit_code) == ("ended", 0), result
        assert (await repl.arun(["touch", "go"])).exit_code == 0
        ended = await asyncio.wait_for(block, WAIT_S)
        assert ended.status == "ok", ended


MASKED = """
from rlm_broker import ReplLimits, Sandbox
from tests.rlm_broker.sandbox.test_programs import BURN, DAEMONS, sleeping
with Sandbox(ReplLimits(cpu_s=1), "strict", warm=0) as sandbox, sandbox.repl() as repl:
    print(repl.execute("import os; os.listdir('/proc')").stdout, end="")
    print(repl.run(["sh", "-c", DAEMONS], timeout_s=1).status, sleeping())
    print(repl.run(["sh", "-c", "setsid sleep 1000 & exit 4"]).exit_code, sleeping())
    print(repl.run(["sh", "-c", BURN]).limit, repl.execute("1").stdout, end="")
"""


def test_program_processes_are_found_with_masked_proc() -> None:
    """As in a container: workers see no processes in /proc, and init sees them under other numbers."""
    if os.getuid() != 0:
        pytest.skip(NEEDS_ROOT)
    mask = 'mount -t tmpfs -o ro tmpfs /proc/sys && exec "$@"'
    inside = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", mask, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    command = [*inside, sys.executable, "-c", MASKED]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout == "[]\ntimeout []\n4 []\ncpu_s 1\n", done.stderr


def test_ctrl_c_ends_the_program(repl: SandboxedRepl) -> None:
    code = """
import os, signal, threading, time
from rlm_broker import Sandbox
from sandbox_worker.wire.level import LevelName
from tests.rlm_broker.sandbox.test_programs import DAEMONS, sleeping
def press():
    while len(sleeping()) < 5: time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
with Sandbox(isolation="strict") as sandbox, sandbox.repl() as repl:
    repl.execute("kept = 1")
    threading.Thread(target=press).start()
    try: repl.run(["sh", "-c", DAEMONS])
    except KeyboardInterrupt: print("interrupted", len(sleeping()), repl.execute("kept").stdout)
"""
    done = python("-c", code, cwd=PROJECT)
    assert done.stdout == "interrupted 0 1\n\n", done.stderr
    assert repl.run(["true"]).exit_code == 0


def test_program_killed_by_its_cgroup_is_named() -> None:
    with ExitStack() as stack:
        try:
            sandbox = stack.enter_context(Sandbox(ReplLimits(memory_bytes=200 << 20), "strict", exact_memory=True))
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        repl = stack.enter_context(sandbox.repl())
        hog = "python3 -c \"x = bytearray(b'x') * (150 << 20); import time; time.sleep(0.5)\""
        # The kernel chooses which process it kills. A shell whose child was killed ends in the same way.
        result = repl.run(["sh", "-c", f"{hog} & one=$!; {hog} & two=$!; wait $one && wait $two || kill -9 $$"])
        assert (result.status, result.limit) == ("killed", "memory_bytes"), result
        assert repl.run(["true"]).exit_code == 0
        assert repl.execute("print('on')").status in ("ok", "killed")
