"""Programs in Python as forks of one process that has imported the package: its import is most of a short program's time.

A program is a process of its own, with its own standard streams, folder, variables and session, as one that a shell has
started. It begins as `python -m MODULE`, `python -c CODE` and `python FILE` do. At its end it waits for its threads, runs
what is registered with `atexit` and flushes its streams, as every other; its modules are not taken down, which would take
50 of a short program's 60 ms. What is tested of imports themselves needs an interpreter of its own.

    python forked_python.py LISTENING LIFELINE MODULE...

This starts the process that forks. It ends when the other end of LIFELINE is closed.
"""

import atexit
import contextlib
import fcntl
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
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

IMPORTED = (
    "rlm_broker.cli.ask",
    "rlm_broker.cli.batch",
    "rlm_broker.cli.config",
    "rlm_broker.cli.eval",
    "rlm_broker.cli.exec",
    "rlm_broker.watch.otlp",
    "rlm_broker.cli.models",
    "rlm_broker.cli.ps",
    "rlm_broker.cli.serve",
    "rlm_broker.cli.stop",
    "rlm_broker.cli.trace",
    "rlm_broker.broker.clients.openai_compatible",
    "rlm_broker.watch.client",
    "rlm_broker.serve.mcp.stdio",
    "rlm_broker.watch.viewer.page",
    "rich.live",
    "uvicorn.loops.auto",
)
"""Modules that programs import, also by their functions."""
WAIT_S = 90
"""Seconds until a program that has not ended is killed."""
_LONGEST_REQUEST = 1 << 20


class Python:
    """A program that runs. Its names are those of `subprocess.Popen`, and mean the same.

    Args:
        arguments: `-m MODULE`, `-c CODE` or the path of a file, and what stands behind it.
        stdin: `subprocess.PIPE` or a descriptor.
        stdout: The same.
        stderr: The same, or `subprocess.STDOUT`.
        env: All of its variables; None takes those of this process.
        cwd: Its folder; None takes that of this process.
        takes_terminal: Whether its stdin becomes the terminal of a session of its own.
        ignores: Signals that it ignores from its start on, as under `nohup`.
        takes_down: Whether its interpreter takes down its modules at its end, for tests of just that.
        forks: Result of `address`; None takes that without arguments.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        takes_terminal: bool = False,
        ignores: Sequence[signal.Signals] = (),
        takes_down: bool = False,
        forks: str | None = None,
    ) -> None:
        self.args = [*map(str, arguments)]
        self.returncode: int | None = None
        request = {
            "arguments": self.args,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "takes_terminal": takes_terminal,
            "ignores": [*ignores],
            "takes_down": takes_down,
        }
        with contextlib.ExitStack() as theirs:
            self.stdin, read = _input(stdin, theirs)
            self.stdout, out = _output(stdout, theirs)
            self.stderr, err = (None, out) if stderr == subprocess.STDOUT else _output(stderr, theirs)
            self._connected = socket.socket(socket.AF_UNIX)
            self._connected.connect(theirs.enter_context(near(forks or address())))
            socket.send_fds(self._connected, [json.dumps(request).encode() + b"\n"], [read, out, err])
        self._replies = self._connected.makefile()
        self.pid = int(self._replies.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self.stdin, self.stdout, self.stderr):
            if each is not None:
                with contextlib.suppress(BrokenPipeError):
                    each.close()
        self.wait()
        self._replies.close()
        self._connected.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None and select.select([self._connected.fileno()], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        """Return the exit code, or the negative number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: It did not end in time, and was killed.
        """
        if self.returncode is None:
            in_time = bool(select.select([self._connected.fileno()], [], [], timeout)[0])
            if not in_time:
                _signal(self.pid, signal.SIGKILL)
            self.returncode = int(self._replies.readline())
            if not in_time:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, input: str | bytes = b"", timeout: float = WAIT_S) -> tuple[str, str]:
        """Write its input, read its outputs to their ends, and wait for its end.

        Raises:
            subprocess.TimeoutExpired: It did not end in time, and was killed.
        """
        data = input.encode() if isinstance(input, str) else input
        with ThreadPoolExecutor(3) as pool:
            writing = pool.submit(_write, self.stdin, data)
            out, err = (_whole(pool, each) for each in (self.stdout, self.stderr))
            self.wait(timeout)
        writing.result()
        return out.result(), err.result()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            _signal(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def python(
    *arguments: str | Path,
    stdin: str | bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    check: bool = False,
    takes_down: bool = False,
    timeout: float = WAIT_S,
) -> "subprocess.CompletedProcess[str]":
    """Run one program to its end, as `subprocess.run` does.

    Args:
        arguments: As for `Python`, like `env`, `cwd` and `takes_down`.
        stdin: All that its input has.
        check: Whether an exit code other than 0 is an error.
        timeout: Seconds until it is killed.

    Raises:
        subprocess.CalledProcessError: The exit code is another one, and `check` is set.
        subprocess.TimeoutExpired: It did not end in time.
    """
    with Python(arguments, stdin=subprocess.PIPE, env=env, cwd=cwd, takes_down=takes_down) as started:
        out, err = started.communicate(stdin, timeout)
    done = subprocess.CompletedProcess(started.args, started.wait(), out, err)
    if check:
        assert done.returncode == 0, err
    return done


@cache
def address(*more: str) -> str:
    """Start the process that forks, once for this process, and return the path of its socket.

    Args:
        more: Modules that it imports as well. There is another process for each choice of them.
    """
    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/socket"
    ended, _lifeline = os.pipe()  # this process keeps the other end open until it ends
    with socket.socket(socket.AF_UNIX) as listening:
        with near(path) as short:
            listening.bind(short)
        listening.listen()
        # The first process ends at once: tests that count the processes below them do not see the second.
        subprocess.run(
            [sys.executable, __file__, str(listening.fileno()), str(ended), *more],
            pass_fds=(listening.fileno(), ended),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            check=True,
        )
    os.close(ended)
    return path


@contextlib.contextmanager
def near(path: str | Path) -> Iterator[str]:
    """Give an address of the socket at `path` that fits into the 107 bytes that the kernel takes, however long TMPDIR is."""
    folder = os.open(Path(path).parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)


def _input(wanted: int, theirs: contextlib.ExitStack) -> tuple[io.TextIOWrapper | None, int]:
    if wanted != subprocess.PIPE:
        return None, _given(wanted, theirs)
    read, write = os.pipe()
    theirs.callback(os.close, read)
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(write, "w")), encoding="utf-8", write_through=True), read


def _output(wanted: int, theirs: contextlib.ExitStack) -> tuple[io.TextIOWrapper | None, int]:
    if wanted != subprocess.PIPE:
        return None, _given(wanted, theirs)
    read, write = os.pipe()
    theirs.callback(os.close, write)
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(read)), encoding="utf-8", newline="\n"), write


def _given(wanted: int, theirs: contextlib.ExitStack) -> int:
    if wanted != subprocess.DEVNULL:
        return wanted
    null = os.open(os.devnull, os.O_RDWR)
    theirs.callback(os.close, null)
    return null


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on its way
        os.kill(pid, number)


def _write(stream: io.TextIOWrapper | None, data: bytes) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError), stream:  # a program need not read all of its input
            stream.buffer.write(data)


def _whole(pool: ThreadPoolExecutor, stream: io.TextIOWrapper | None) -> "Future[str]":
    return pool.submit(lambda: "" if stream is None else stream.read())


def _leave_the_caller() -> None:
    """Go on as a child of init, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _next_program(listening: socket.socket, lifeline: int) -> tuple[dict[str, Any], list[int]]:
    """Fork for each connection; return in the process of a program alone: its request, and its descriptors."""
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
            return json.loads(data), descriptors
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(BrokenPipeError):
            connected.sendall(f"{pid}\n".encode())
            status = os.waitpid(pid, 0)[1]
            connected.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take the streams, the folder, the variables and the session of the request."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in {*descriptors}:
        os.close(descriptor)
    os.setsid()
    if request["takes_terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Under `nohup` and in the background of a script, the tests' own process and all below it ignore signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for number in request["ignores"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # The streams that are there remember what they were opened on.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
        )
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )


def _program() -> tuple[str, str, bool]:
    """Serve; return in the process of a program alone: "-m", "-c" or "", the module, the code or the file, and its end."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    _leave_the_caller()
    for name in (*IMPORTED, *sys.argv[3:]):
        __import__(name)
    gc.collect()
    gc.freeze()
    request, descriptors = _next_program(listening, lifeline)
    _become(request, descriptors)
    how, what, *arguments = (
        request["arguments"] if request["arguments"][0] in ("-m", "-c") else ["", *request["arguments"]]
    )
    first = {"-m": request["cwd"], "-c": "", "": str(Path(what).parent)}[how]
    sys.path[0:1] = [first, *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [how or what, *arguments]
    return how, what, request["takes_down"]


def _end(code: int) -> None:
    """End the program without taking down its modules. Streams that cannot be flushed are left to the interpreter."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    how, what, takes_down = _program()
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif not how:
            runpy.run_path(what, run_name="__main__")
        else:
            this, sys.modules["__main__"] = sys.modules["__main__"], (main := ModuleType("__main__"))
            exec(compile(what, "<string>", "exec"), vars(main))
    except SystemExit as ended:
        if takes_down or not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    if not takes_down:
        _end(0)
