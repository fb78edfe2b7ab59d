"""The start of the fork server's process."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker.concurrency import forks
from rlm_broker.errors import ConfigurationError, IsolationUnavailable, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers import zygote_process
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.zygote_process import Preparation, Zygote, ZygoteGone, raise_descriptor_limit
from sandbox_worker.wire.level import PROCESS, STANDARD, STRICT
from tests.support.processes import lives, living_below
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until, until_now


@pytest.fixture
def forker() -> Iterator["Forker"]:
    made = Forker()
    yield made
    made.end()


class Forker(threading.Thread):
    """Forks a process that lives until `end` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.forked = threading.Event()
        self._pid = 0
        self._read_end, self._write_end = os.pipe()

    def run(self) -> None:
        pid = os.fork()
        if not pid:
            os.close(self._write_end)
            os.read(self._read_end, 1)
            os._exit(0)
        self._pid = pid
        self.forked.set()

    def has_come_to_its_fork(self) -> bool:
        """Whether it has forked, or waits for the lock to do so."""
        stat = Path(f"/proc/self/task/{self.native_id}/stat")
        return self.forked.is_set() or (
            self.native_id is not None and stat.read_text().rpartition(")")[2].split()[0] == "S"
        )

    def end(self) -> None:
        os.close(self._write_end)
        if self.forked.wait(WAIT_S):
            os.waitpid(self._pid, 0)
        os.close(self._read_end)


def test_fork_in_another_thread_does_not_delay_the_start(forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen` returns although another thread is about to fork a process that lives on."""
    real = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec(*arguments: Any) -> Any:
        forker.start()
        until_now(forker.has_come_to_its_fork)
        return real(*arguments)

    monkeypatch.setattr(subprocess, "_fork_exec", fork_exec)
    process, pidfd = zygote_process.start(0, [], None)
    assert forker.forked.wait(WAIT_S)
    os.close(pidfd)
    process.kill()
    process.communicate()


async def test_fork_server_stopped_before_its_exec_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen` returns although the process that it forked is stopped before it runs a program."""
    real: Any = subprocess.Popen
    stopped: list[int] = []

    def stopped_at_first(*arguments: Any, **options: Any) -> Any:
        stopped.append(0)
        if len(stopped) > 1:
            return real(*arguments, **options)
        with monkeypatch.context() as patched:
            patched.setattr(forks, "_left", {})  # `preexec_fn` makes it a fork of this process, which would close them
            return real(*arguments, **options, preexec_fn=lambda: os.kill(os.getpid(), signal.SIGSTOP))

    monkeypatch.setattr(zygote_process, "EXEC_TIMEOUT_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", stopped_at_first)
    server = ForkServer(PROCESS, True)
    try:
        await server.start()
    finally:
        await server.close()
    assert len(stopped) == 2
    assert not living_below()


async def test_late_fork_server_ends_with_what_it_forked(tmp_path: Path) -> None:
    """A process that it has just forked may be stopped before it asked to be ended with its parent."""
    setup = f"import os, time\nif not os.fork(): open('{tmp_path}/pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    server = ForkServer(PROCESS, True, preparation=Preparation(setup=setup, timeout_s=1))
    with pytest.raises(SandboxFailed, match="took longer"):
        await server.start()
    child = int((tmp_path / "pid").read_text())
    await until(lambda: not psutil.pid_exists(child) or not lives(psutil.Process(child)))


async def test_reaped_fork_server_is_not_killed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may be another process's by then."""
    zygote = Zygote(PROCESS, True, Preparation(), None)
    await zygote.start()
    (child,) = living_below()
    child.kill()
    with pytest.raises(ZygoteGone):
        await zygote.spawn(ReplLimits())
    monkeypatch.setattr(os, "killpg", lambda pid, _: pytest.fail(f"the group {pid} was killed"))
    assert await zygote.end()


def test_raised_limit_of_open_files_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlm_broker")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        raise_descriptor_limit()
        raise_descriptor_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.messages == [
        f"this process's soft limit of open files was raised from {hard - 1} to {hard}, its hard one"
    ]


def fork_server(status: int, words: str = "") -> "subprocess.Popen[bytes]":
    """Return a process that writes `words` to stderr and ends with `status`."""
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"os._exit({status})"
    program = f"import os; os.write(2, {words.encode()!r}); {end}"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stderr=subprocess.PIPE)
    process.wait()
    return process


@table("status", [-signal.SIGSYS, 128 + signal.SIGSYS])
def test_level_is_unavailable_if_fork_server_is_filtered(status: int) -> None:
    """At "strict" the fork server is a child of the process that was started, which ends as shells do."""
    error = zygote_process._ended_early(STRICT, fork_server(status))
    assert isinstance(error, IsolationUnavailable)
    assert error.layer == "system calls"
    assert "SIGSYS" in str(error)


@table(
    "status, words, said",
    [
        (-9, "", "it was killed by SIGKILL"),
        (128 + 11, "", "it was killed by SIGSEGV"),
        (1, "", "it ended with status 1"),
        (128, "", "it ended with status 128"),
        (1, "ModuleNotFoundError: no msgspec", "ModuleNotFoundError: no msgspec"),
        (1, "OSError: [Errno 2] no such file", "OSError: [Errno 2] no such file"),
        (
            1,
            "OSError: [Errno 24] Too many open files",
            "OSError: [Errno 24] Too many open files; raise the limit of open files (`ulimit -n 4096`)",
        ),
    ],
)
def test_fork_server_end_tells_last_words_or_signal(status: int, words: str, said: str) -> None:
    error = zygote_process._ended_early(STANDARD, fork_server(status, words))
    assert type(error) is SandboxFailed
    assert str(error) == f"the sandbox's fork server cannot start: {said}"


def test_paths_are_named_as_a_utf8_locale_reads_them() -> None:
    assert zygote_process._utf8(os.fsdecode("/tmp/é 中".encode())) == "/tmp/é 中"
    with pytest.raises(ConfigurationError, match=r"caf\\xe9' is not UTF-8: .* set TMPDIR"):
        zygote_process._utf8(os.fsdecode(b"/tmp/caf\xe9"))
