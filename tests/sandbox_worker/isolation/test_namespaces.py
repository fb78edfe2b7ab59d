"""Identity, pid namespaces, and the processes that hold them."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_worker.isolation import namespaces, syscalls
from sandbox_worker.isolation.namespaces import WorkerIds
from tests.support.forked_child import in_child
from tests.support.skips import NEEDS_ROOT
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until_now

needs_root = pytest.mark.skipif(os.getuid() != 0, reason=NEEDS_ROOT)


def enter(flags: int) -> None:
    """Leave for new namespaces."""
    folder = namespaces.open_proc_self()
    namespaces.enter_user_namespace(flags, folder)
    os.close(folder)


def test_second_thread_is_refused_by_count() -> None:
    def with_thread() -> str:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        with pytest.raises(OSError, match="2 threads") as caught:
            namespaces.require_one_thread()
        release.set()
        thread.join()
        return str(caught.value)

    assert "only one with a single thread can enter" in in_child(with_thread)


@needs_root
def test_become_is_final_and_drops_groups() -> None:
    """A process that becomes another uid cannot return, has no groups left, and owns its files in /proc."""

    def become() -> list[object]:
        os.setgroups([0, 1])
        became = namespaces.become(65534)
        with pytest.raises(PermissionError):
            os.setuid(0)
        owner = Path("/proc/self/oom_score_adj").stat().st_uid
        return [became, os.getresuid(), os.getresgid(), os.getgroups(), owner]

    assert in_child(become) == [True, [65534] * 3, [65534] * 3, [], 65534]


def test_become_without_second_id_changes_nothing() -> None:
    """The root of a namespace that maps no second id goes on as this root."""

    def become() -> bool:
        enter(syscalls.CLONE_NEWUSER)  # maps one id, as bubblewrap does
        return namespaces.become(os.getuid() + 1)

    assert in_child(become) is False


def test_user_namespace_keeps_the_identity() -> None:
    def identity() -> list[int]:
        enter(syscalls.CLONE_NEWUSER)
        return [os.getuid(), os.getgid()]

    assert in_child(identity) == [os.getuid(), os.getgid()]


def test_namespace_limit_is_named() -> None:
    """A limit on namespaces is named where the kernel says "no space left"."""

    def enter_limited() -> str:
        enter(syscalls.CLONE_NEWUSER)
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        with pytest.raises(OSError, match="unshare") as caught:
            enter(syscalls.CLONE_NEWUSER)
        return str(caught.value.strerror)

    assert "max_user_namespaces" in in_child(enter_limited)


def as_zygote(serve: Callable[[int, int], None]) -> str:
    """Call `serve(own pidfd, pipe)` as pid 1 of a namespace that its own user namespace owns; return what it wrote."""

    def run() -> str:
        read_end, write_end = os.pipe()
        enter(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            serve(os.pidfd_open(os.getpid()), write_end)
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            return pipe.read().decode()

    return str(in_child(run))


def say_pid(fork: Callable[[], int], pipe: int) -> None:
    """Write the pid that a fork has for itself."""
    pid = fork()
    if pid == 0:
        os.write(pipe, f"{os.getpid()} ".encode())
        os._exit(0)
    os.waitpid(pid, 0)


def test_workers_are_pid_1_of_own_namespaces() -> None:
    def serve(own_pidfd: int, pipe: int) -> None:
        for _ in range(3):
            say_pid(lambda: namespaces.fork_into_new_pid_namespace(own_pidfd), pipe)
        say_pid(os.fork, pipe)  # the way back was taken: a neighbour; the workers were pids 2 to 4 here

    *workers, neighbour = as_zygote(serve).split()
    assert workers == ["1"] * 3
    assert int(neighbour) >= 5  # threads that libraries start after a fork have numbers as well


def test_failed_fork_leaves_no_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    def serve(own_pidfd: int, pipe: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fork", no_fork)
            with pytest.raises(OSError, match="no more processes"):
                namespaces.fork_into_new_pid_namespace(own_pidfd)
        say_pid(lambda: namespaces.fork_into_new_pid_namespace(own_pidfd), pipe)

    assert as_zygote(serve) == "1 "


@table("ending, expected", [("exits_with_7", 7), ("is_killed", 128 + signal.SIGKILL)])
def test_monitor_ends_with_pid_1(ending: str, expected: int) -> None:
    monitor = os.fork()
    if monitor == 0:
        namespaces.continue_as_pid_1(os.pidfd_open(os.getppid()))
        if ending == "exits_with_7":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(monitor, 0)[1]) == expected


def start_monitored(pipe: int, orchestrator: int) -> int:
    """Fork a monitor whose child writes to `pipe` and stays; return the monitor's pid."""
    monitor = os.fork()
    if monitor == 0:
        signal.alarm(2 * WAIT_S)  # where the layers under test fail, no other process would end them
        namespaces.continue_as_pid_1(orchestrator)
        signal.alarm(2 * WAIT_S)
        os.write(pipe, b"up")
        signal.pause()
    os.close(pipe)
    return monitor


def descriptors(pid: int) -> list[str]:
    return [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]


@table("victim", ["the_child", "the_monitor", "the_orchestrator"])
def test_monitor_and_child_end_together(victim: str) -> None:
    """If the monitor, its child or the orchestrator is killed, the first two are gone, and no descriptor is held."""
    read_end, write_end = os.pipe()
    orchestrator = subprocess.Popen(["sleep", "infinity"])
    pidfd = os.pidfd_open(orchestrator.pid)
    monitor = start_monitored(write_end, pidfd)
    try:
        assert os.read(read_end, 2) == b"up"
        child = int(Path(f"/proc/{monitor}/task/{monitor}/children").read_text())
        until_now(lambda: descriptors(monitor) == ["anon_inode:[pidfd]"] * 2)  # it closes the others after its fork
        os.kill({"the_child": child, "the_monitor": monitor}.get(victim, orchestrator.pid), signal.SIGKILL)
        assert select.select([read_end], [], [], WAIT_S)[0]
        assert os.read(read_end, 1) == b""  # no process holds the other end any more
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have ended with its child
            os.kill(monitor, signal.SIGKILL)
        orchestrator.kill()
        orchestrator.wait()
        os.waitpid(monitor, 0)
        os.close(pidfd)
        os.close(read_end)


def test_worker_ids_are_given_in_turn() -> None:
    """Ids of workers are given in turn, and none is the fork server's."""
    ids, given = WorkerIds(1000, 4), []
    for _ in range(6):
        ids.forked += 1
        given.append(ids.of_newest())
    assert sorted(given) == [1001, 1001, 1002, 1002, 1003, 1003]
    assert len(set(given[:3])) == 3
    assert WorkerIds(65534, 1, forked=7).of_newest() == 65534
