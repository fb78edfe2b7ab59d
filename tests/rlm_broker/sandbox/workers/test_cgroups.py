"""Control groups for memory, on a machine where this process may make some."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker.errors import IsolationUnavailable
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers import cgroups
from rlm_broker.sandbox.workers.cgroups import MemoryGroup, MemoryGroups
from tests.support.waiting import until_now

MIB = 1 << 20
EATS = "import os, sys\nos.write(int(sys.argv[1]), b'0')\nblock = bytearray(b'x') * (int(sys.argv[2]) << 20)\nprint(len(block))"


def test_a_containers_memory_is_less_than_the_machines(tmp_path: Path) -> None:
    machine = cgroups.memory_bytes([])
    assert machine > 64 * MIB
    (tmp_path / "bounded").write_text(f"{64 * MIB}\n")
    (tmp_path / "free").write_text("max\n")
    assert cgroups.memory_bytes([tmp_path / "free", tmp_path / "bounded"]) == 64 * MIB
    assert cgroups.memory_bytes([tmp_path / "free", tmp_path / "missing"]) == machine


@pytest.fixture
def groups() -> Iterator[MemoryGroups]:
    found = MemoryGroups.find()
    if found is None:
        pytest.skip("no control groups for memory can be made here")
    yield found
    found.close()
    assert not found._folder.exists()


def eat(join_fd: int, megabytes: int) -> int:
    """Return the exit code of a process that joins the group and writes to `size_bytes` of memory."""
    command = [sys.executable, "-I", "-S", "-c", EATS, str(join_fd), str(megabytes)]
    return subprocess.run(command, pass_fds=[join_fd], capture_output=True, check=False).returncode


def test_member_above_the_limit_is_killed_and_counted(groups: MemoryGroups) -> None:
    group = groups.make(64 * MIB)
    assert eat(group.join_fd, 16) == 0
    assert group.kills() == 0
    assert eat(group.join_fd, 128) == -signal.SIGKILL
    assert group.kills() >= 1  # version 2 counts the one process twice if a group is killed as a whole
    until_now(group.remove)  # the kernel holds it for a moment after its last process
    assert group.remove()


def test_group_with_a_process_is_not_removed(groups: MemoryGroups) -> None:
    group = groups.make(64 * MIB)
    code = "import os, sys\nos.write(int(sys.argv[1]), b'0')\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(group.join_fd)],
        pass_fds=[group.join_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as member:
        assert member.stdout is not None
        member.stdout.readline()
        assert not group.remove()
    until_now(group.remove)


def test_stale_groups_are_swept_and_used_kept(groups: MemoryGroups) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    left = groups._folder.parent / f"{cgroups.PREFIX}{ended.pid}-00000000"
    (left / "1").mkdir(parents=True)
    another = MemoryGroups.find()
    assert another is not None
    assert not left.exists()
    assert groups._folder.is_dir()
    another.close()


def test_where_none_can_be_made_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cgroups, "_bases", lambda: iter([(tmp_path / "nowhere", "memory.max", "memory.events")]))
    assert MemoryGroups.find() is None
    with pytest.raises(IsolationUnavailable, match="exact_memory needs a control group"):
        Sandbox(exact_memory=True).__enter__()


@pytest.mark.usefixtures("groups")
def test_kernel_memory_is_bounded_and_named() -> None:
    code = (
        "import socket\n"
        "pairs = []\n"
        "while True:\n"
        "    pairs.append(socket.socketpair())\n"
        "    pairs[-1][0].setblocking(False)\n"
        "    try:\n"
        "        while True: pairs[-1][0].send(bytes(65536))\n"
        "    except BlockingIOError: pass"
    )
    limits = Limits(memory_bytes=24 * MIB, scratch_bytes=1 * MIB, max_open_files=1024)
    with Sandbox(limits, exact_memory=True) as sandbox, sandbox.repl("text") as repl:
        assert "memory control group" in repl.isolation.layers
        block = repl.execute(code)
        assert block.status == "killed"
        # First is either the watch, which estimates, or the group, which counts scratch files.
        assert re.search(r"memory_bytes = 2[45] MiB", block.error or "")
        assert repl.execute("print(context)").stdout == "text\n"


@pytest.mark.usefixtures("groups")
def test_block_with_killed_children_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose children the kernel killed has not ended well."""
    with Sandbox(exact_memory=True) as sandbox, sandbox.repl("text") as repl:
        kills = iter([0, 1])  # counts at the block's begin, and at its end
        monkeypatch.setattr(MemoryGroup, "kills", lambda _: next(kills))
        block = repl.execute("x = 1")
        assert (block.status, block.limit) == ("killed", "memory_bytes")
        monkeypatch.undo()
        assert repl.execute("print(context)").stdout == "text\n"


def test_delegated_groups_processes_make_room_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on plain files. On a machine with version 2, all tests of this module run on the real file system."""
    delegated, other = tmp_path / "a.scope", tmp_path / "b.scope"
    for group in (delegated, other, delegated / "main"):
        group.mkdir()
        (group / "cgroup.procs").write_text("123\n")
        (group / "cgroup.subtree_control").write_text("pids\n")
    monkeypatch.setattr(os, "getxattr", lambda path, _name: b"1" if path == delegated else b"")
    assert cgroups._place_in(other, tmp_path) is None
    assert (other / "cgroup.subtree_control").read_text() == "pids\n"
    assert cgroups._place_in(delegated, tmp_path) == delegated
    assert (delegated / "main" / "cgroup.procs").read_text() == "123"
    assert (delegated / "cgroup.subtree_control").read_text() == "+memory"
    assert cgroups._place_in(delegated / "main", tmp_path) == delegated


def test_no_group_is_left_after_a_sandbox(groups: MemoryGroups) -> None:
    ours = f"{cgroups.PREFIX}{os.getpid()}-*"
    before = set(groups._folder.parent.glob(ours))
    with Sandbox(exact_memory=True) as sandbox, sandbox.repl() as repl:
        repl.execute("1")
        assert set(groups._folder.parent.glob(ours)) > before
    assert set(groups._folder.parent.glob(ours)) == before
