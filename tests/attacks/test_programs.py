"""Programs that the host runs, and code beside them, that mean harm: no process outlives its end, and none reaches init."""

import ast
import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from rlm_broker.errors import FileRefused
from sandbox_worker.isolation import landlock
from tests.attacks.arena import GOT_THROUGH, LIMITS, Arena, arena_of
from tests.support.launcher import needs_strict
from tests.support.processes import living_below
from tests.support.waiting import WAIT_S

pytestmark = needs_strict
IS_X86 = os.uname().machine == "x86_64"
SETSID, PTRACE, CLONE, PIDFD_GETFD = (112, 101, 56, 438) if IS_X86 else (157, 117, 220, 438)
TRIES = {
    "a_session_of_its_own": f"""
libc.syscall({SETSID}); os.setsid() if os.getpgid(0) != os.getpid() else None
if os.fork() == 0:
    os.setpgid(0, 0); libc.syscall({SETSID})
    if os.fork() == 0:
        libc.syscall({SETSID}); said(os.getsid(0) != os.getppid() and os.getsid(0) != first_session)
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
""",
    "a_reaper_of_its_own": "said(libc.prctl(36, 1, 0, 0, 0) == 0); time.sleep(1000)",
    "a_signal_at_its_parents_death": "said(libc.prctl(1, 9, 0, 0, 0) == 0); time.sleep(1000)",
    "a_child_of_inits": f"said(libc.syscall({CLONE}, 0x8000 | 17, 0, 0, 0, 0) >= 0); time.sleep(1000)",
    "a_namespace": "said(libc.unshare(0x20000000) == 0 or libc.unshare(0x10000000) == 0); time.sleep(1000)",
    "tracing": f"""
said(libc.syscall({PTRACE}, 16, 1, 0, 0) == 0 or any(libc.syscall({PTRACE}, 16, pid, 0, 0) == 0 for pid in pids()))
time.sleep(1000)
""",
    "files_of_other_processes": """
for pid in [1, *pids()]:
    for name in ("mem", "environ", "maps", "fd/0", "fd/1", "fd/3", "fd/7", "root/etc", "cwd/x"):
        try: os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY)); said(True)
        except OSError: pass
        try: os.write(os.open(f"/proc/{pid}/{name}", os.O_WRONLY), b"x"); said(True)
        except OSError: pass
time.sleep(1000)
""",
    "descriptors_of_other_processes": f"""
for pid in [1, *pids()]:
    for number in (3, 7):
        try: said(libc.syscall({PIDFD_GETFD}, os.pidfd_open(pid), number, 0) >= 0)
        except OSError: pass
time.sleep(1000)
""",
    "descriptors_that_were_left_open": "said(set(os.listdir('/proc/self/fd')) - {'0', '1', '2', '3'}); time.sleep(1000)",
    "the_end_of_init": """
for number in (9, 15, 2, 19):
    try: os.kill(1, number)
    except OSError: pass
time.sleep(1000)
""",
    "the_end_of_everything_that_is_not_stopped": """
if os.fork() == 0:
    if os.fork() == 0:
        while True: os.kill(0, 18)
    os._exit(0)
if os.fork() == 0: os.kill(os.getpid(), 19)
time.sleep(1000)
""",
    "ever_new_processes": """
if os.fork(): time.sleep(1000)
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
""",
    "ever_more_processes": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try: os.fork()
    except OSError: pass
""",
    "processes_in_groups_of_their_own": """
while True:
    try:
        if os.fork() == 0: os.setpgid(0, 0)
    except OSError: pass
""",
}
BEGIN = f"""
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
first_session = os.getsid(0)
def said(got_through):
    if got_through: print({GOT_THROUGH!r}, flush=True)
def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
"""


@pytest.fixture(scope="module", params=["strict"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with arena_of(request.param) as opened:
        yield opened


BUSY = (
    "the_end_of_everything_that_is_not_stopped",
    "ever_new_processes",
    "ever_more_processes",
    "processes_in_groups_of_their_own",
)
"""Tries that need the whole machine. The others wait most of their time."""


async def test_hostile_programs_end_with_all_children(arena: Arena) -> None:
    async with contextlib.AsyncExitStack() as stack:
        names = [name for name in TRIES if name not in BUSY]
        repls = [await stack.enter_async_context(arena.sandbox.repl()) for _ in names]
        for repl in repls:
            assert (await repl.aexecute("import os; kept = 1; os.getpid()")).status == "ok"
        before = {each for each in living_below() if each.name() == "python3"}
        running = (
            repl.arun(["python3", "-c", BEGIN + TRIES[name]], timeout_s=1)
            for repl, name in zip(repls, names, strict=True)
        )
        results = dict(zip(names, await asyncio.gather(*running), strict=True))
        assert {name: result for name, result in results.items() if result.status != "timeout"} == {}
        assert {name: result for name, result in results.items() if GOT_THROUGH in result.stdout} == {}
        assert {each for each in living_below() if each.name() == "python3"} == before
        assert [(await repl.aexecute("kept")).stdout for repl in repls] == ["1\n"] * len(names)
    await asyncio.to_thread(arena.goes_on)


@pytest.mark.parametrize("name", BUSY)
def test_busy_program_ends_with_all_children(arena: Arena, name: str) -> None:
    with arena.sandbox.repl() as repl:
        assert repl.execute("import os; kept = 1; os.getpid()").status == "ok"
        before = {each for each in living_below() if each.name() == "python3"}
        result = repl.run(["python3", "-c", BEGIN + TRIES[name]], timeout_s=0.5)
        # Root's processes are not counted by the kernel: then init ends the REPL that has too many.
        assert result.status == "timeout" or result.limit == "max_processes", result
        assert GOT_THROUGH not in result.stdout
        if result.status == "timeout":
            assert {each for each in living_below() if each.name() == "python3"} == before
            assert repl.execute("kept").stdout == "1\n"
        else:
            assert repl.execute("kept").status == "killed"
    arena.goes_on()


def test_program_that_kills_costs_its_repl(arena: Arena) -> None:
    with arena.sandbox.repl("its context") as repl:
        assert repl.execute("kept = 1").status == "ok"
        result = repl.run(["python3", "-c", "import os, time; os.kill(-1, 9); time.sleep(1000)"], timeout_s=1)
        assert (result.status, result.signal) == ("ended", 9)  # it has killed its launcher, too
        assert repl.execute("kept").status in ("ok", "killed")  # before Landlock's ABI 6 signals reach the REPL
        assert repl.execute("print(context)").stdout == "its context\n"
        assert repl.run(["echo", "on"]).stdout == "on\n"
    arena.goes_on()


TO_LAUNCHER = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
got = []
for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]:
    for number in (0, 2, 9, 15, 18, 19, 64):
        for send in (lambda: os.kill(pid, number), lambda: os.killpg(pid, number)):
            try: send(); got.append(("signal", number))
            except OSError: pass
    if libc.syscall({PIDFD_GETFD}, os.pidfd_open(pid), 7, 0) >= 0: got.append("descriptor")
    if libc.syscall({PTRACE}, 16, pid, 0, 0) == 0: got.append("trace")
    for name in ("mem", "environ", "maps", "auxv", "fd/7", "cwd/x", "root/etc", "task/" + str(pid) + "/mem"):
        for how in (os.O_RDONLY, os.O_RDWR):
            try: os.close(os.open(f"/proc/{{pid}}/{{name}}", how)); got.append(name)
            except OSError: pass
    for name in ("oom_score_adj", "comm", "timerslack_ns", "coredump_filter", "clear_refs"):
        try: os.close(os.open(f"/proc/{{pid}}/{{name}}", os.O_WRONLY)); got.append(name)
        except OSError: pass
    try: os.setpgid(pid, os.getpgid(0)); got.append("group")
    except OSError: pass
    try: os.sched_setaffinity(pid, [0]); got.append("cpus")
    except OSError: pass
print(got)
"""


def test_launcher_is_out_of_reach_of_blocks(arena: Arena) -> None:
    """Try to signal, trace, read and change it. Before Landlock's ABI 6 signals get through, and cost a fork alone."""
    with arena.sandbox.repl() as repl:
        first = repl.run(["sh", "-c", "echo $PPID"]).stdout
        got = ast.literal_eval(repl.execute(TO_LAUNCHER).stdout)
        if landlock.abi() >= 6:
            assert got == []
            assert repl.run(["sh", "-c", "echo $PPID"]).stdout == first
        assert [each for each in got if each[0] != "signal"] == []
        assert repl.run(["echo", "on"]).stdout == "on\n"
    arena.goes_on()


@pytest.mark.parametrize(("number", "status"), [(9, "ended"), (15, "timeout"), (19, "timeout")])
def test_program_that_attacks_its_launcher_harms_itself_alone(arena: Arena, number: int, status: str) -> None:
    with arena.sandbox.repl() as repl:
        assert repl.execute("kept = 1").status == "ok"
        code = f"import os, time; os.kill(os.getppid(), {number}); time.sleep(1000 if {number} != 19 else 0)"
        result = repl.run(["python3", "-c", code], timeout_s=2)
        assert result.status == status
        assert [repl.run(["echo", "on"]).stdout for _ in range(3)] == ["on\n"] * 3
        assert repl.execute("kept").stdout == "1\n"
    arena.goes_on()


async def test_program_is_out_of_reach_of_blocks(arena: Arena) -> None:
    code = """
import os
found = []
for pid in os.listdir('/proc'):
    if pid.isdigit() and int(pid) > 1 and int(pid) != os.getpid():
        for name in ("mem", "environ", "fd/0", "fd/1"):
            for how in (os.O_RDONLY, os.O_WRONLY):
                try: os.close(os.open(f"/proc/{pid}/{name}", how)); found.append((pid, name))
                except OSError: found.append(None)
print(len(found), [each for each in found if each])
"""

    async def attacked() -> None:
        async with arena.sandbox.repl() as repl:
            running = asyncio.create_task(repl.arun(["sh", "-c", "touch runs; exec sleep 1000"]))
            while not await repl.files.alist():
                assert not running.done()
            assert (await repl.aexecute(code)).stdout in ("16 []\n", "24 []\n")  # of the launcher and one or two more
            running.cancel()
            await asyncio.wait({running})

    await arena.sandbox.bind_loop().arun(attacked())


async def test_program_floods_cost_no_memory(arena: Arena) -> None:
    async def flooded() -> None:
        async with arena.sandbox.repl() as repl:
            await repl.arun(["true"])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            flood = ["sh", "-c", "cat /proc/self/maps; yes & yes >&2"]
            running = [asyncio.create_task(repl.arun(flood, timeout_s=0.5)) for _ in range(6)]
            while not running[0].done():
                assert (await repl.aexecute("1")).stdout == "1\n"
            for result in await asyncio.wait_for(asyncio.gather(*running), WAIT_S):
                assert result.status == "timeout"
                assert "more cut" in result.stdout
                assert len(result.stdout) + len(result.stderr) < 3 * LIMITS.max_output_bytes
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # kilobytes

    await arena.sandbox.bind_loop().arun(flooded())
    arena.goes_on()


async def test_program_folder_swapped_for_link_stays_inside(arena: Arena) -> None:
    """A current folder that is exchanged for a link leads to no other folder."""
    swap = """
import ctypes, os
os.mkdir('d'); os.symlink('/usr/lib', 'l')
libc = ctypes.CDLL(None)
while not os.path.exists('stop'):
    assert libc.renameat2(-100, b'd', -100, b'l', 2) == 0
"""

    async def swapped() -> None:
        async with arena.sandbox.repl() as repl:
            block = asyncio.create_task(repl.aexecute(swap, timeout_s=WAIT_S))
            while not any(entry.name == "l" for entry in await repl.files.alist()):
                assert not block.done()
            stood, refused = [], 0
            for _ in range(100):
                try:
                    stood.append((await repl.arun(["ls", "-a"], cwd="d")).stdout)
                except FileRefused:
                    refused += 1
            assert set(stood) == {".\n..\n"}
            assert refused
            await repl.files.awrite("stop", b"")
            assert (await block).status == "ok"

    await arena.sandbox.bind_loop().arun(swapped())
