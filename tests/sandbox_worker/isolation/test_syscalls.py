"""The wrappers fail loudly, and say what failed."""

import errno
import os
from collections.abc import Callable

import pytest

from sandbox_worker.isolation import syscalls
from tests.support.forked_child import in_child
from tests.support.tables import table


@table(
    "call, said, codes",
    [
        (lambda: syscalls.setns(-1, 0), "setns: Bad file descriptor", {errno.EBADF}),
        (
            lambda: syscalls.mount("tmpfs", "/no/such/folder", "tmpfs"),
            "mount tmpfs on /no/such/folder: (No such file|Operation not permitted)",
            {errno.ENOENT, errno.EPERM},
        ),
        (lambda: syscalls.prctl(123456), "prctl option 123456: Invalid argument", {errno.EINVAL}),
        (lambda: syscalls.call("frobnicate"), "no number is known", {errno.ENOSYS}),
    ],
)
def test_refused_call_says_what_failed_and_why(call: Callable[[], object], said: str, codes: set[int]) -> None:
    with pytest.raises(OSError, match=said) as caught:
        call()
    assert caught.value.errno in codes


def test_results_and_arguments_pass_through() -> None:
    assert syscalls.call("getpid") == os.getpid()
    assert in_child(lambda: [syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0), syscalls.prctl(3)]) == [0, 0]
