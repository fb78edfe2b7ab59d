import os
import signal
import subprocess
import sys

import pytest

from rlm_broker.errors import ConfigurationError, IsolationUnavailable, SandboxFailed
from rlm_broker.sandbox.workers import refusals
from sandbox_worker.wire.level import STANDARD, STRICT


def fork_server(status: int, words: str = "") -> "subprocess.Popen[bytes]":
    """Return a process that writes `words` to stderr and ends with `status`."""
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"os._exit({status})"
    program = f"import os; os.write(2, {words.encode()!r}); {end}"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stderr=subprocess.PIPE)
    process.wait()
    return process


@pytest.mark.parametrize("status", [-signal.SIGSYS, 128 + signal.SIGSYS])
def test_level_is_unavailable_if_fork_server_is_filtered(status: int) -> None:
    """At "strict" the fork server is a child of the process that was started, which ends as shells do."""
    error = refusals.ended(STRICT, fork_server(status))
    assert isinstance(error, IsolationUnavailable)
    assert error.layer == "system calls"
    assert "SIGSYS" in str(error)


@pytest.mark.parametrize(
    ("status", "words", "said"),
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
    """The end of a fork server is told by its last words or its signal."""
    error = refusals.ended(STANDARD, fork_server(status, words))
    assert type(error) is SandboxFailed
    assert str(error) == f"the sandbox's fork server cannot start: {said}"


def test_paths_are_named_as_a_utf8_locale_reads_them() -> None:
    assert refusals.utf8(os.fsdecode("/tmp/é 中".encode())) == "/tmp/é 中"
    with pytest.raises(ConfigurationError, match=r"caf\\xe9' is not UTF-8: .* set TMPDIR"):
        refusals.utf8(os.fsdecode(b"/tmp/caf\xe9"))
