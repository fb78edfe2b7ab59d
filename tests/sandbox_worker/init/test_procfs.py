"""Facts in /proc about processes, on real ones."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_worker.init.procfs import Proc, Status, Times
from tests.support.places import PROJECT
from tests.support.tables import table
from tests.support.waiting import until_now

MIB = 1 << 20


@contextmanager
def running(code: str, folder: Path) -> Iterator[int]:
    """The pid of a Python that has run `code` in `folder`; it and what it forked end when stdin does."""
    program = f"import os\n{code}\nprint(flush=True)\nos.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def test_others_exclude_this_process(tmp_path: Path) -> None:
    proc = Proc()
    assert proc.own_pid == os.getpid()
    with running("", tmp_path) as pid:
        assert pid in proc.others()
        assert os.getppid() in proc.others()
        assert os.getpid() not in proc.others()


def test_below_lists_only_descendants(tmp_path: Path) -> None:
    proc = Proc()
    before = set(proc.below())
    assert os.getppid() not in before
    with running("if not os.fork():\n    os.fork()\n    os.read(0, 1)\n    os._exit(0)", tmp_path) as pid:
        until_now(lambda: len(set(proc.below()) - before) == 3)  # the forks may not have happened yet
        assert pid in proc.below()


def test_ended_process_uses_nothing(tmp_path: Path) -> None:
    with running("", tmp_path) as pid:
        assert isinstance(Proc().status(pid), Status)
    proc = Proc()
    assert proc.status(pid) is None
    assert proc.times(pid) == Times()
    assert proc.shared_out_bytes(pid) is None
    assert proc.opened(pid) == []
    assert proc.unlinked_bytes(pid, str(tmp_path)) == 0


def test_mapped_bytes_grow_with_what_is_mapped() -> None:
    before, *_ = Proc().mapped_bytes()
    buffer = bytearray(64 * MIB)
    assert Proc().mapped_bytes()[0] - before >= len(buffer)


@table(
    "keeps",
    [
        "file = open('a', 'wb'); file.write(bytes(8 << 20)); file.flush(); os.unlink('a')",
        "fd = os.open('a', os.O_RDWR | os.O_CREAT); os.write(fd, bytes(8 << 20)); m = mmap.mmap(fd, 8 << 20); os.close(fd); os.unlink('a')",
        "fd = os.open('a', os.O_RDWR | os.O_CREAT); os.write(fd, bytes(8 << 20)); m = mmap.mmap(fd, 8 << 20); os.unlink('a')",
    ],
)
def test_unlinked_files_are_seen_once(tmp_path: Path, keeps: str) -> None:
    with running(f"import mmap\n{keeps}", tmp_path) as pid:
        assert list(tmp_path.iterdir()) == []
        assert 8 * MIB <= Proc().unlinked_bytes(pid, str(tmp_path)) <= 9 * MIB


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, sys, threading
{keeps}
def stay():
    while open(f"/proc/self/task/{{os.getpid()}}/stat").read().rpartition(")")[2].split()[0] != "Z": pass
    print(flush=True)
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall({exit}, 0)
"""
EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


def test_process_without_first_thread_is_seen(tmp_path: Path) -> None:
    keeps = "held = bytearray(b'x') * (32 << 20)\nfile = open('a', 'wb', buffering=0); file.write(bytes(8 << 20)); os.unlink('a')"
    with running(WITHOUT_ITS_FIRST_THREAD.format(keeps=keeps, exit=EXIT), tmp_path) as pid:
        proc = Proc()
        status = proc.status(pid)
        assert status is not None
        assert status.speaker not in (0, pid)
        assert (status.parent, status.threads, status.is_hidden) == (os.getpid(), 2, False)
        assert 32 * MIB <= status.memory_bytes <= 96 * MIB
        assert 8 * MIB <= proc.unlinked_bytes(status.speaker, str(tmp_path)) <= 9 * MIB
        assert proc.unlinked_bytes(pid, str(tmp_path)) == 0
        assert proc.descriptors(status.speaker) >= 4
        assert any(target.startswith("pipe:") for target in proc.opened(status.speaker))
        assert (proc.shared_out_bytes(status.speaker) or 0) >= 32 * MIB


def test_process_with_vanishing_threads_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose threads end before they are read is hidden."""
    proc = Proc()
    with running(WITHOUT_ITS_FIRST_THREAD.format(keeps="", exit=EXIT), tmp_path) as pid:
        names = itertools.count(10_000_000)  # above any pid
        monkeypatch.setattr(proc, "_names", lambda _path: [str(next(names))])
        status = proc.status(pid)
        assert status is not None
        assert status.is_hidden
        monkeypatch.setattr(proc, "_names", lambda _path: [str(pid)])  # no others: it is ending
        status = proc.status(pid)
        assert status is not None
        assert (status.is_hidden, status.memory_bytes) == (False, 0)


def test_process_sharing_memory_differs_from_a_copy(tmp_path: Path) -> None:
    """A process that shares memory is told from one that copied it."""
    # What vfork does, but without the wait for the child.
    code = (
        "import ctypes, signal\n"
        "c = ctypes.CDLL(None)\n"
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)\n"
        "sharing = c.clone(ctypes.cast(c.pause, ctypes.c_void_p), top, 0x100 | signal.SIGCHLD, None)\n"
        "copying = os.fork() or signal.pause()\n"
        "open('pids', 'w').write(f'{sharing} {copying}')"
    )
    proc = Proc()
    with running(code, tmp_path) as pid:
        sharing, copying = map(int, (tmp_path / "pids").read_text().split())
        try:
            assert proc.have_one_memory(sharing, pid)
            assert not proc.have_one_memory(copying, pid)
        finally:
            os.kill(sharing, signal.SIGKILL)
            os.kill(copying, signal.SIGKILL)
    assert not proc.have_one_memory(sharing, pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_unlinked_files_are_seen_on_overlay(tmp_path: Path) -> None:
    """Files without a name are seen on an overlay of two file systems."""
    code = """
import os, sys
from sandbox_worker.isolation import syscalls
from sandbox_worker.init.procfs import Proc
base = sys.argv[1]
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
for name in ("lower", "upper", "both"):
    os.mkdir(f"{base}/{name}")
syscalls.mount("tmpfs", f"{base}/upper", "tmpfs")
for name in ("files", "work"):
    os.mkdir(f"{base}/upper/{name}")
syscalls.mount("overlay", f"{base}/both", "overlay", 0, f"lowerdir={base}/lower,upperdir={base}/upper/files,workdir={base}/upper/work")
file = open(f"{base}/both/file", "wb", buffering=0)
file.write(bytes(8 << 20))
os.unlink(file.name)
assert os.fstat(file.fileno()).st_dev != os.stat(f"{base}/both").st_dev, "this overlay shows nothing"
print(Proc().unlinked_bytes(os.getpid(), f"{base}/both"))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.splitlines()[-1]}")
    assert 8 * MIB <= int(done.stdout) <= 9 * MIB, done.stderr


def test_descriptors_are_counted(tmp_path: Path) -> None:
    with running("files = [open('/dev/null') for _ in range(100)]", tmp_path) as pid:
        assert 103 <= Proc().descriptors(pid) <= 110
    assert Proc().descriptors(pid) == 0


def test_process_session_and_number_are_seen_from_here(tmp_path: Path) -> None:
    proc = Proc()
    with running("os.setsid()", tmp_path) as pid:
        assert (proc.number_here(pid), proc.session(pid)) == (pid, pid)
    assert proc.session(os.getpid()) == os.getsid(0)
    assert (proc.number_here(pid), proc.session(pid)) == (0, 0)
