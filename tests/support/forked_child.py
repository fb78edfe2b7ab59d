"""Runs a function in a forked child, where it may give up what the tests still need."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.waiting import until_now


def in_child(function: Callable[[], Any]) -> Any:
    """Call `function` in a forked child; return what it returned, through JSON.

    Raises:
        AssertionError: The child raised, with its traceback, or was killed.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _alone()
        try:
            report = json.dumps([True, function()])
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            report = json.dumps([False, traceback.format_exc()])
        os.write(write_end, report.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        report = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    assert report, f"the child ended with {os.waitstatus_to_exitcode(status)} before it could report"
    succeeded, value = json.loads(report)
    assert succeeded, value
    return value


def _alone() -> None:
    """Wait until the process has one thread, which system calls of namespaces want.

    OpenTelemetry starts the thread of a span processor again in each forked child. That of an ended one ends at once.
    """
    until_now(lambda: len(list(Path("/proc/self/task").iterdir())) == 1)
