"""Programs that take more than their limits where the watch could not see it, and ordinary ones that look alike."""

import os
from collections.abc import Iterator

import pytest

from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.processes import living_below, until_used
from tests.support.tables import table

MIB = 1 << 20
LIMITS = Limits(
    memory_bytes=192 * MIB,
    scratch_bytes=16 * MIB,
    max_processes=32,
    cpu_s=1.0,
    interrupt_grace_s=0.3,
    max_repl_restarts=1000,
)
EXIT_THREAD = f"ctypes.CDLL(None).syscall({60 if os.uname().machine == 'x86_64' else 93}, 0)"
HOARD_WITHOUT_A_FIRST_THREAD = f"""
import ctypes, os, threading, time
def hoard():
    held = bytearray(b"x") * (70 << 20)
    time.sleep(60)
    os._exit(0)
for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=hoard).start()
        {EXIT_THREAD}
time.sleep(60)
"""
FILL_SOCKETS_BELOW_THE_FREE_NUMBER = """
import os, socket, time
for _ in range(12):
    if os.fork() == 0:
        held = []
        for _ in range(10):
            held += (pair := socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
            for end in pair:
                end.setblocking(False)
                try:
                    while True: end.send(bytes(200_000))
                except BlockingIOError: pass
        time.sleep(60)
data = bytearray(b"x") * (110 << 20)
time.sleep(20)
"""
WAIT_FOR_CHILDREN_THAT_TAKE_TOO_MUCH = """
import os, time
children = []
for _ in range(4):
    if (child := os.fork()) == 0:
        held = bytearray(b"x") * (70 << 20)
        time.sleep(60)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
COPY_WHAT_WAS_SHARED = """
import os, time
data = bytearray(b"x") * (100 << 20)
for _ in range(4):
    if os.fork() == 0:
        for at in range(0, len(data), 4096): data[at] = 0
        time.sleep(60)
time.sleep(60)
"""
BURN_IN_CHILDREN_OF_NOBODY = """
import os, signal, time
def burn():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if os.fork() == 0:
            until = time.monotonic() + 0.007
            while time.monotonic() < until: pass
            os._exit(0)
        time.sleep(0.0075)
"""
UNLINK_WHILE_OPEN = """
import ctypes, os, threading, time
def fill():
    held = []
    for number in range(8):
        held.append(open("f", "wb", buffering=0))
        held[-1].write(bytes(10 << 20))
        os.unlink("f")
    time.sleep(60)
threading.Thread(target=fill).start()
"""
HIDE_BY_WRITE_PROTECTION = """
import ctypes, mmap
protect, held = ctypes.CDLL(None).mprotect, []
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
while True:
    held.append(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    held[-1].write(b"x" * (1 << 20))
    assert protect(ctypes.addressof(ctypes.c_char.from_buffer(held[-1])), 1 << 20, 1) == 0
"""
MAKE_MANY_MAPPINGS = """
import ctypes, mmap, os, time
protect = ctypes.CDLL(None).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
memory = mmap.mmap(-1, 40_000 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for page in range(0, 40_000, 2): protect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, 1)
for _ in range(30):
    if os.fork() == 0: time.sleep(60)
time.sleep(30)
"""

FORK_READERS = """
import os
data = bytearray(b"x") * (80 << 20)
def read():
    for _ in range(20): sum(memoryview(data)[::4096])
    os._exit(0)
children = [child for _ in range(3) if (child := os.fork()) or read()]
print([os.waitpid(child, 0)[1] for child in children])
"""
START_PROGRAMS_BESIDE_MUCH_DATA = """
import subprocess
data = bytearray(b"x") * (120 << 20)
print(sum(subprocess.run(["true"]).returncode for _ in range(60)))
"""
WAIT_FOR_SHORT_CHILDREN = """
import os, time
for _ in range(30):
    if (child := os.fork()) == 0:
        until = time.process_time() + 0.005
        while time.process_time() < until: pass
        os._exit(0)
    os.waitpid(child, 0)
"""
SHARE_FEW_SOCKETS = """
import os, socket, time
data = bytearray(b"x") * (100 << 20)
pairs = [socket.socketpair() for _ in range(6)]
children = []
for _ in range(20):
    if (child := os.fork()) == 0:
        time.sleep(0.2)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children] == [0] * 20)
"""
COPY_FILES = """
import asyncio, os, shutil, socket
open("a", "wb").write(os.urandom(1 << 20))
shutil.copyfile("a", "b"); shutil.copy2("a", "c"); shutil.copytree(".", "tree", ignore=shutil.ignore_patterns("tree"))
assert open("a", "rb").read() == open("b", "rb").read() == open("c", "rb").read() == open("tree/a", "rb").read()
one, other = socket.socketpair()
assert one.sendfile(open("a", "rb"), count=50_000) == 50_000
assert len(other.recv(50_000, socket.MSG_WAITALL)) == 50_000
assert one.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
"""
ASK_FOR_MEMORY = """
import os
print(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20, os.sysconf(os.sysconf_names["SC_PHYS_PAGES"]) > 0)
print(os.sysconf("SC_NPROCESSORS_ONLN") == os.cpu_count())
"""


NEEDS_PROCESSES = pytest.mark.parametrize("sandbox", ["strict"], indirect=True)
"""At the level standard a REPL is one process."""


@pytest.fixture(scope="module", params=["strict", "standard"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param, allow_exec=request.param == "strict", warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl("the context") as opened:
        yield opened
        assert opened.execute("print(context)").stdout == "the context\n"


@NEEDS_PROCESSES
@pytest.mark.parametrize(
    ("program", "limit"),
    [
        (HOARD_WITHOUT_A_FIRST_THREAD, "memory_bytes"),
        (FILL_SOCKETS_BELOW_THE_FREE_NUMBER, "memory_bytes"),
        (WAIT_FOR_CHILDREN_THAT_TAKE_TOO_MUCH, "memory_bytes"),
        (COPY_WHAT_WAS_SHARED, "memory_bytes"),
        (MAKE_MANY_MAPPINGS, "memory_bytes"),
        (BURN_IN_CHILDREN_OF_NOBODY + "burn()", "cpu_s"),
    ],
    ids=["processes_without_first_threads", "few_sockets_each", "children_waited_for", "copies", "mappings", "children_of_nobody"],
)  # fmt: skip
def test_processes_past_a_limit_are_ended(repl: SandboxedRepl, program: str, limit: str) -> None:
    block = repl.execute(program, timeout_s=50)
    assert block.status == "killed", block
    assert f"{limit} = " in (block.error or "")
    assert block.stdout == ""


def test_memory_that_is_write_protected_counts(repl: SandboxedRepl) -> None:
    block = repl.execute(HIDE_BY_WRITE_PROTECTION)
    assert (block.status, block.limit) == ("killed", "memory_bytes")


@NEEDS_PROCESSES
def test_cpu_time_of_orphans_is_bounded_between_blocks(repl: SandboxedRepl) -> None:
    assert repl.execute("x = 1").status == "ok"
    before = living_below()
    program = BURN_IN_CHILDREN_OF_NOBODY + "if os.fork() == 0: burn()"
    assert repl.execute(program).status == "ok"
    until_used(lambda: not before <= living_below())  # until the REPL itself is gone
    assert "cpu_s = " in (repl.execute("x").error or "")


@pytest.mark.parametrize("sandbox", ["standard"], indirect=True)  # elsewhere the folder is a file system of its own
@table("then", ["time.sleep(60)", EXIT_THREAD])
def test_unlinked_files_count_in_every_thread(repl: SandboxedRepl, then: str) -> None:
    block = repl.execute(f"{UNLINK_WHILE_OPEN}\n{then}", timeout_s=50)
    assert block.status == "killed"
    assert "scratch_bytes = " in (block.error or "")


@NEEDS_PROCESSES
@pytest.mark.parametrize(
    ("program", "said"),
    [
        *((FORK_READERS, "[0, 0, 0]\n"), (START_PROGRAMS_BESIDE_MUCH_DATA, "0\n")),
        *((WAIT_FOR_SHORT_CHILDREN, ""), (SHARE_FEW_SOCKETS, "True\n")),
    ],
)
def test_ordinary_processes_stay_below_the_limits(repl: SandboxedRepl, program: str, said: str) -> None:
    block = repl.execute(program, timeout_s=50)
    assert (block.status, block.stdout) == ("ok", said), block


@table("program, said", [(COPY_FILES, ""), (ASK_FOR_MEMORY, "192 True\nTrue\n")])
def test_files_are_copied_without_sendfile_and_memory_is_the_limit(
    repl: SandboxedRepl, program: str, said: str
) -> None:
    block = repl.execute(program)
    assert (block.status, block.stdout) == ("ok", said), block.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id for all workers")
def test_repl_forks_choose_no_process_id(sandbox: Sandbox) -> None:
    ask = "import os\nprint(os.getuid())"
    with sandbox.repl() as one:
        first = int(one.execute(ask).stdout)
        if one.isolation.level == "strict":
            one.execute("for _ in range(20):\n    if os.fork() == 0: os._exit(0)\n    os.wait()")
        with sandbox.repl() as other:
            assert int(other.execute(ask).stdout) - first in (0, 1)  # 0: this Python can be read by its user alone
