"""Commands as forks of one process that has imported the command line: the imports are most of a command's time.

A command is a process of its own, with its own standard streams, folder and variables, as one that a shell has started.
Its `main` is that of `python -m rlm_broker`, and its interpreter ends as every interpreter does.

    python forked_command.py LISTENING LIFELINE

This starts the process that forks. It ends when the other end of LIFELINE is closed.
"""

import atexit
import gc
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

IMPORTED = (
    "rlm_broker.cli.answering",
    "rlm_broker.cli.config",
    "rlm_broker.cli.executing",
    "rlm_broker.cli.exporting",
    "rlm_broker.cli.models",
    "rlm_broker.cli.ps",
    "rlm_broker.cli.stop",
    "rlm_broker.cli.trace",
    "rlm_broker.clients.openai_compatible",
    "rlm_broker.control.client",
    "rlm_broker.viewer.page",
    "rich.live",
)
"""Modules that commands import by their functions."""
_LONGEST_REQUEST = 1 << 20


class Forks:
    """The process that forks, as those see it who want commands."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="commands-")
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._address = f"{self._folder}/socket"
        ended, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen()
            # The first process ends at once: tests that count the processes below them do not see the second.
            subprocess.run(
                [sys.executable, __file__, str(listening.fileno()), str(ended)],
                pass_fds=(listening.fileno(), ended),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                check=True,
            )
        os.close(ended)

    def run(
        self, arguments: Sequence[str], stdin: bytes, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run one command to its end.

        Args:
            arguments: Arguments behind `rlm-broker`.
            stdin: Bytes that its standard input has.
            environment: All of its variables.
            timeout_s: Seconds until it is killed.

        Returns:
            Its exit code, or the negative number of the signal that ended it, and its two outputs.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        (read, into), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        request = {"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(environment)}
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(self._address)
            socket.send_fds(connected, [json.dumps(request).encode() + b"\n"], [read, stdout, stderr])
            for each in (read, stdout, stderr):
                os.close(each)
            replies = connected.makefile()
            pid = int(replies.readline())
            late = threading.Event()
            timer = threading.Timer(timeout_s, _kill, (pid, late))
            timer.start()
            with ThreadPoolExecutor(3) as pool:
                pool.submit(_write, into, stdin)
                outputs = [pool.submit(_read, each) for each in (out, err)]
            code = int(replies.readline())
            timer.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired([*arguments], timeout_s)
        return code, outputs[0].result(), outputs[1].result()


@cache
def forks() -> Forks:
    """Start the process that forks, once."""
    return Forks()


def _kill(pid: int, late: threading.Event) -> None:
    late.set()
    os.kill(pid, signal.SIGKILL)


def _write(descriptor: int, data: bytes) -> None:
    try:
        with open(descriptor, "wb", buffering=0) as pipe:
            view = memoryview(data)
            while view:
                view = view[pipe.write(view) :]
    except BrokenPipeError:
        pass  # a command need not read all of its input


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.read()


def _leave_the_caller() -> None:
    """Go on as a child of init, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _next_command(listening: socket.socket, lifeline: int) -> Callable[[], None]:
    """Fork for each connection; return in the command's process alone, with what makes it that command."""
    while True:
        ready, _, _ = select.select([listening.fileno(), lifeline], [], [])
        if lifeline in ready:
            os._exit(0)
        connected, _ = listening.accept()
        if os.fork():
            connected.close()
            os.waitpid(-1, os.WNOHANG)
            continue
        listening.close()
        os.close(lifeline)
        data, descriptors, _, _ = socket.recv_fds(connected, _LONGEST_REQUEST, 3)
        while not data.endswith(b"\n"):
            data += connected.recv(_LONGEST_REQUEST)
        pid = os.fork()
        if pid == 0:
            connected.close()
            return lambda: _become(json.loads(data), descriptors)
        for each in descriptors:
            os.close(each)
        connected.sendall(f"{pid}\n".encode())
        status = os.waitpid(pid, 0)[1]
        connected.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["rlm_broker", *request["arguments"]]
    sys.path.insert(0, request["folder"])  # as `python -m` does
    # The streams that are there remember what they were opened on.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2,
        )
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )


def _serve() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    _leave_the_caller()
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()
    _next_command(listening, lifeline)()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    _serve()
    del sys.path[0]
    runpy.run_module("rlm_broker", run_name="__main__", alter_sys=True)
