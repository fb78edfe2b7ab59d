"""The place where attacks are tried, and what is looked at from outside to see whether one got through.

Everything is harmless if it gets through: canaries, loopback only, bounded sizes.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlm_broker.limits import Limits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from tests.support.places import SHORT
from tests.support.processes import living_below
from tests.support.tables import Rows

PROTECTED = ("strict", "standard")
LIMITS = Limits(
    interrupt_grace_s=0.3,
    memory_bytes=512 << 20,
    scratch_bytes=16 << 20,
    max_processes=32,
    max_repl_restarts=10_000,
    max_output_bytes=1 << 16,
)
GOT_THROUGH = "GOT-THROUGH"


class Arena:
    """A sandbox with a victim REPL, its sibling, and the host's canaries.

    Attributes:
        secret: Only in the canary file, a file's name, a neighbour's environment, and this process.
        neighbour: Another process of the host, with a key in its environment.
        folder: Of the host, readable and writable for all users; `file` lies in it.
        repl: Where attacks run.
        sibling: Must go on undisturbed.
    """

    def __init__(self, level: LevelName, stack: ExitStack) -> None:
        self.level = level
        self.secret = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="arena-", dir=SHORT))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.chmod(0o777)
        self.file = self.folder / "secret.py"
        self.restore()
        self.tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.udp.bind(("127.0.0.1", 0))
        self.unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.unix.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        self.abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.abstract_name = f"arena-{self.secret[:8]}"
        self.abstract.bind("\0" + self.abstract_name)
        for listener in (self.unix, self.abstract):
            listener.listen()
        for each in (self.tcp, self.udp, self.unix, self.abstract):
            each.setblocking(False)
        self.neighbour = subprocess.Popen(["sleep", "10000"], env={"CANARY_API_KEY": self.secret})
        stack.callback(self.neighbour.wait)
        stack.callback(self.neighbour.kill)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.sandbox = stack.enter_context(Sandbox(LIMITS, level))
        self.sibling = stack.enter_context(self.sandbox.repl("the sibling's context"))
        self.sibling.execute("state = 'untouched'")
        self.sibling_pid = next(p.pid for p in living_below() if not p.children() and p.pid != self.neighbour.pid)
        self.repl = stack.enter_context(self.sandbox.repl("the context"))

    def restore(self) -> None:
        """The canary file as it was."""
        shutil.rmtree(self.file, ignore_errors=True)
        self.file.unlink(missing_ok=True)
        self.file.write_text(f"SECRET = '{self.secret}'\n")
        self.file.chmod(0o666)
        with suppress(OSError):  # not every file system has attributes
            os.setxattr(self.file, "user.note", self.secret.encode())
        os.utime(self.file, (1, 1))
        (self.folder / f"name-{self.secret}").touch()

    def fill_in(self, code: str) -> str:
        """`code` with what an attacker may well know."""
        pids = {"ORCHESTRATOR": os.getpid(), "SIBLING": self.sibling_pid, "NEIGHBOUR": self.neighbour.pid}
        ports = {"TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1], "ABSTRACT": self.abstract_name}
        for name, value in {"FILE": self.file, "FOLDER": self.folder, "GOT": GOT_THROUGH, **pids, **ports}.items():
            code = code.replace(f"<{name}>", str(value))
        return code

    def attack(self, attack: "Attack") -> Block:
        """Run it, as a block of the victim."""
        return self.repl.execute(self.fill_in(attack.code), timeout_s=attack.timeout_s)

    def goes_on(self) -> None:
        """The victim's next block works, and its sibling is undisturbed."""
        assert self.repl.execute("print(context)").stdout == "the context\n"
        assert self.sibling.execute("print(state, context)").stdout == "untouched the sibling's context\n"
        assert self.neighbour.poll() is None


Evidence = Callable[[Arena, Block], bool]


@dataclass(frozen=True)
class Attack:
    """A program that must not get through.

    Attributes:
        succeeded: Whether it did, by what can be seen from outside.
        levels: Where it must not.
        shown: At `process`, which does not protect, it must get through: else this test could not fail.
    """

    name: str
    code: str
    succeeded: Evidence
    levels: tuple[str, ...] = PROTECTED
    shown: bool = True
    timeout_s: float = 60.0


def said_secret(arena: Arena, block: Block) -> bool:
    """A secret of the host is in what came out."""
    said = f"{block.stdout}{block.stderr}{block.error}{block.final_answer}"
    return arena.secret in said


def said_it_got_through(_arena: Arena, block: Block) -> bool:
    """The program itself saw the kernel give it what it wanted."""
    return GOT_THROUGH in block.stdout


def changed_the_host(arena: Arena, _block: Block) -> bool:
    """The canary file is not what it was, or its folder holds something new."""
    try:
        intact = arena.file.read_text() == f"SECRET = '{arena.secret}'\n"
        status = arena.file.lstat()
        intact = intact and status.st_mode & 0o7777 == 0o666 and status.st_mtime == 1 and status.st_nlink == 1
    except OSError:
        intact = False
    new = {path.name for path in arena.folder.iterdir()} - {arena.file.name, f"name-{arena.secret}", "socket"}
    for name in new:
        path = arena.folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    arena.restore()
    return not intact or bool(new)


def reached_a_listener(arena: Arena, _block: Block) -> bool:
    """A connection or data arrived."""
    reached = 0
    for listener in (arena.tcp, arena.unix, arena.abstract):
        with suppress(BlockingIOError):
            listener.accept()[0].close()
            reached += 1
    with suppress(BlockingIOError):
        reached += len(arena.udp.recv(100))
    return reached > 0


@contextmanager
def arena_of(level: LevelName) -> Iterator[Arena]:
    """An arena at a level, and no trace of it afterwards."""
    before = living_below()
    with ExitStack() as stack:
        yield Arena(level, stack)
    left = living_below() - before
    assert not left, [process.cmdline() for process in left if psutil.pid_exists(process.pid)]


def check(arena: Arena, attacks: Iterable[Attack]) -> None:
    """Require that each attack fails at this level, or succeeds where no layer protects."""
    rows = Rows()
    for attack in attacks:
        if attack.shown if arena.level == "process" else arena.level in attack.levels:
            with rows.trying(attack.name):
                block = arena.attack(attack)
                seen = f"{block.status} {block.error} {block.stdout[:300]} {block.stderr[-300:]}"
                assert attack.succeeded(arena, block) == (arena.level == "process"), seen
                arena.goes_on()
    rows.end()
