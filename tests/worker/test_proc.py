"""What is seen of processes, on real ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_worker.proc import Proc, Status

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


def test_others_are_all_but_this_one(tmp_path: Path) -> None:
    proc = Proc()
    assert proc.own_pid == os.getpid()
    with running("", tmp_path) as pid:
        assert pid in proc.others()
        assert os.getppid() in proc.others()
        assert os.getpid() not in proc.others()


def test_below_are_children_and_theirs_and_nobody_else(tmp_path: Path) -> None:
    proc = Proc()
    before = set(proc.below())
    assert os.getppid() not in before
    with running("if not os.fork():\n    os.fork()\n    os.read(0, 1)\n    os._exit(0)", tmp_path) as pid:
        deadline = time.monotonic() + 60
        while len(new := set(proc.below()) - before) < 3:  # the forks may not have happened yet
            assert time.monotonic() < deadline
        assert len(new) == 3
        assert pid in new


def test_one_that_ended_has_no_status_and_uses_nothing(tmp_path: Path) -> None:
    with running("", tmp_path) as pid:
        assert isinstance(Proc().status(pid), Status)
    proc = Proc()
    assert proc.status(pid) is None
    assert proc.cpu_s(pid) == (0.0, 0.0)
    assert proc.shared_out_bytes(pid) == 0
    assert proc.unlinked_bytes(pid, str(tmp_path)) == 0


def test_mapped_bytes_grow_with_what_is_mapped() -> None:
    before = Proc().mapped_bytes()
    buffer = bytearray(64 * MIB)
    assert Proc().mapped_bytes() - before >= len(buffer)


@pytest.mark.parametrize(
    "keeps",
    [
        "file = open('a', 'wb'); file.write(bytes(8 << 20)); file.flush(); os.unlink('a')",
        "fd = os.open('a', os.O_RDWR | os.O_CREAT); os.write(fd, bytes(8 << 20)); m = mmap.mmap(fd, 8 << 20); os.close(fd); os.unlink('a')",
        "fd = os.open('a', os.O_RDWR | os.O_CREAT); os.write(fd, bytes(8 << 20)); m = mmap.mmap(fd, 8 << 20); os.unlink('a')",
    ],
    ids=["open", "mapped", "both"],
)
def test_files_without_a_name_are_seen_once(tmp_path: Path, keeps: str) -> None:
    with running(f"import mmap\n{keeps}", tmp_path) as pid:
        assert list(tmp_path.iterdir()) == []
        assert 8 * MIB <= Proc().unlinked_bytes(pid, str(tmp_path)) <= 9 * MIB


def test_descriptors_are_counted(tmp_path: Path) -> None:
    with running("files = [open('/dev/null') for _ in range(100)]", tmp_path) as pid:
        assert 103 <= Proc().descriptors(pid) <= 110
    assert Proc().descriptors(pid) == 0
