"""The wrappers fail loudly, and say what failed."""

import errno
import os

import pytest

from sandbox_worker.isolation import syscalls
from tests.support.forked_child import in_child


def test_refused_call_raises_with_its_name_and_reason() -> None:
    with pytest.raises(OSError, match=r"setns: Bad file descriptor") as caught:
        syscalls.setns(-1, 0)
    assert caught.value.errno == errno.EBADF


def test_refused_mount_names_source_and_target() -> None:
    """A refused mount says what was to be mounted, and where."""
    with pytest.raises(OSError, match=r"mount tmpfs on /no/such/folder: (No such file|Operation not permitted)"):
        syscalls.mount("tmpfs", "/no/such/folder", "tmpfs")


def test_refused_prctl_raises_with_its_option() -> None:
    with pytest.raises(OSError, match=r"prctl option 123456: Invalid argument"):
        syscalls.prctl(123456)


def test_name_without_a_number_is_enosys() -> None:
    with pytest.raises(OSError, match="no number is known") as caught:
        syscalls.call("frobnicate")
    assert caught.value.errno == errno.ENOSYS


def test_results_and_arguments_pass_through() -> None:
    assert syscalls.call("getpid") == os.getpid()
    assert in_child(lambda: [syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0), syscalls.prctl(3)]) == [0, 0]
