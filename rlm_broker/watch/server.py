"""The control socket of this process: it shows other processes of the same user what runs here, and stops that.

Theory of operation. The socket lives on the background loop, so it answers also while the loop of the user's is busy.
It listens before its name appears in the folder: a name that refuses a connection is a dead process's, which the
client removes. A connection has one request and its reply. The peer must be a process of the same user. It can be slow,
stall or send garbage: each frame is bounded, each wait has a deadline, and a run never waits for a follower.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rlm_broker.concurrency.event_loop import EventLoopRef, Job
from rlm_broker.concurrency.forks import FORKING, socket_of_parent
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import CallText, Event
from rlm_broker.events.log import text_chars
from rlm_broker.events.trace import INLINE_CHARS, cut, encoded, plain, trace_line
from rlm_broker.watch import folder, messages
from rlm_broker.watch.board import BOARD, ReplEntry, RunEntry, is_wanted
from rlm_broker.watch.messages import StopOutcome
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.text_json import encode_written_out

LIBRARY = "python"
"""Command of a library process."""
MOST_CONNECTIONS = 256
"""Connections at a time. A further one is closed at once."""
MEASURE_S = 0.1
"""Seconds to wait for the memory of the REPLs. Beyond them a status has the last measurement."""
MEASURED_FOR_S = 1.0
"""Seconds until memory is measured again, at least."""
MOST_TIMES = 10
"""A measurement holds for so many times its own duration: thousands of REPLs take seconds."""
CLOSING_S = 0.5
"""Seconds at the end of the process for replies under way: the last events of a run, or the end of a stop."""

OnStop = Callable[[bool], Awaitable[object]]
"""Function that stops a process as a whole; it is called with whether to end all at once."""
_log = logging.getLogger("rlm_broker")


class ControlSocket:
    """Control socket of this process, for `rlm-broker runs`, `stop` and the viewer. A process has at most one.

    Example:
        ```python
        with ControlSocket("nightly"):
            RLM("offline").completion("a", "Which letter is it?")
        ```

    Use it as a context manager (`with`), or call `start` and `close`. The variable RLM_BROKER_CONTROL=0 prevents it.
    Where no socket can be made, the log says so at the level INFO, and the command runs without it.

    Args:
        command: Name of the command: up to 20 letters from a to z.
        on_stop: Called to stop the process as a whole, with whether it ends at once. None stops its runs, and the REPLs
            without a run.

    Raises:
        ConfigurationError: The command has other characters.
    """

    def __init__(self, command: str = LIBRARY, on_stop: OnStop | None = None) -> None:
        require_kind("command", command, str)
        if not folder.COMMAND.fullmatch(command):
            raise ConfigurationError(f"command = {command[:40]!r}: give up to 20 letters from a to z")
        self._command = command
        self._on_stop = on_stop
        self._name = ""
        self._started = time.time()
        self._job: Job[None] | None = None
        self._connections: set[asyncio.Task[object]] = set()
        self._at_work: set[asyncio.Task[object]] = set()
        self._memory: Mapping[str, int] = {}
        self._measured_until = 0.0
        self._measuring: asyncio.Future[tuple[Mapping[str, int], float]] | None = None

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen, from any thread or loop. Has no effect if the process has a control socket already."""
        global _own
        with _starting:
            if _own is not None or not is_wanted(default=True):
                return self
            try:
                with folder.opened(makes=True) as place:
                    assert place is not None
                    self._name = str(folder.SocketName.own(self._command))
                    listening = _listening(place, self._name)
            except (OSError, ConfigurationError) as error:
                _log.info("this process has no control socket, so `rlm-broker runs` does not list it: %s", error)
                return self
            _own, BOARD.is_on = self, True
        self._job = EventLoopRef.background().job(self._listen(listening))
        self._job.start()
        return self

    def close(self) -> None:
        """Remove the socket, and end all connections. Has no effect when repeated. Not for the background loop."""
        if self._leave() and (job := self._job) is not None:
            job.cancel()
            with contextlib.suppress(concurrent.futures.CancelledError, TimeoutError):
                job.result(2 * CLOSING_S)

    async def aclose(self) -> None:
        """Close the socket as `close` does, awaited on any loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leave(self) -> bool:
        """Remove the socket from the folder, and return whether this is the socket of the process."""
        global _own
        with _starting:
            if _own is not self:
                return False
            _own, BOARD.is_on = None, False
        with contextlib.suppress(OSError, ConfigurationError), folder.opened() as place:
            if place is not None:
                os.unlink(self._name, dir_fd=place)
        return True

    async def _listen(self, listening: socket.socket) -> None:
        # CPython 3.13 would look the socket up by its address, through a descriptor closed by now.
        more: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        server = await asyncio.start_unix_server(self._accepted, sock=listening, **more)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            if self._at_work:
                await asyncio.wait(self._at_work, timeout=CLOSING_S)
            for task in self._connections:
                task.cancel()

    # -- one connection ----------------------------------------------------------------------------------------------

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The task is made here, because CPython 3.11's streams report the cancellation of their own as an error.
        task = asyncio.get_running_loop().create_task(self._connected(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = writer.get_extra_info("socket")
            if len(self._connections) <= MOST_CONNECTIONS and messages.peer_of(connection)[1] == os.geteuid():
                await self._answer(reader, writer, task)
        except (OSError, ValueError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
            writer.transport.abort()
        finally:
            self._at_work.discard(task)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: "asyncio.Task[object]"
    ) -> None:
        async with asyncio.timeout(messages.REQUEST_S):
            frame = await messages.read_frame(reader, messages.MAX_REQUEST_BYTES)
        self._at_work.add(task)
        try:
            request = messages.requests.decode(frame)
        except (msgspec.DecodeError, RecursionError):
            await _reply(writer, messages.RefusedReply("this is no request that this release of rlm-broker knows"))
            return
        match request:
            case messages.StatusRequest():
                await _reply(writer, messages.StatusReply(await self._status()))
            case messages.StopRequest():
                await _reply(writer, await self._stop(request))
            case messages.FollowRequest():
                await _follow(request, reader, writer)

    # -- status ------------------------------------------------------------------------------------------------------

    async def _status(self) -> messages.ProcessStatus:
        repls = BOARD.repls
        used = await self._memory_of(repls)
        return messages.ProcessStatus(
            pid=os.getpid(),
            command=self._command,
            started=self._started,
            memory_bytes=own_bytes(),
            runs=tuple(entry.status() for entry in BOARD.runs),
            repls=tuple(entry.status(used.get(entry.id, 0)) for entry in repls),
        )

    async def _memory_of(self, repls: Sequence[ReplEntry]) -> Mapping[str, int]:
        """Return the memory of each REPL, as it was measured in a thread not long ago."""
        if repls and self._measuring is None and time.monotonic() > self._measured_until:
            self._measuring = asyncio.ensure_future(asyncio.to_thread(_measured, repls))
        if (measuring := self._measuring) is not None:
            await asyncio.wait({measuring}, timeout=MEASURE_S)
            if measuring.done():
                self._measuring, self._measured_until = None, time.monotonic() + MEASURED_FOR_S
                if measuring.exception() is None:
                    self._memory, took_s = measuring.result()
                    self._measured_until += MOST_TIMES * took_s
        return self._memory

    # -- stop --------------------------------------------------------------------------------------------------------

    async def _stop(self, request: messages.StopRequest) -> messages.StopReply | messages.RefusedReply:
        target, now = request.target, request.now
        if target == messages.PROCESS and self._on_stop is not None:
            await self._on_stop(now)
            return messages.StopReply((StopOutcome("process", str(os.getpid()), "stopping", has_ended=False),))
        runs = [entry for entry in BOARD.runs if entry.id == target]
        repls = [entry for entry in BOARD.repls if entry.id == target]
        if target == messages.PROCESS:
            runs = [entry for entry in BOARD.runs if entry.ended is None]
            repls = [entry for entry in BOARD.repls if entry.run is None]
        elif not runs and not repls:
            return messages.RefusedReply(f"the process {os.getpid()} has no run and no REPL {target!r}")
        ending = [*(_end_run(entry, now=now) for entry in runs), *(_end_repl(entry, now=now) for entry in repls)]
        return messages.StopReply(tuple(await asyncio.gather(*ending)))


def _measured(repls: Sequence[ReplEntry]) -> tuple[Mapping[str, int], float]:
    """Return the memory of each REPL, and the seconds it took to measure."""
    started = time.monotonic()
    pids = {entry.id: pid for entry in repls if (pid := entry.pid) is not None}
    used = bytes_below(pids.values())
    return {id: used[pid] for id, pid in pids.items()}, time.monotonic() - started


async def _end_run(entry: RunEntry, *, now: bool) -> StopOutcome:
    entry.stop(now=now)
    await asyncio.wait({asyncio.wrap_future(entry.is_done)}, timeout=messages.STOP_WAIT_S)
    return StopOutcome("run", entry.id, entry.state, has_ended=entry.is_done.done())


async def _end_repl(entry: ReplEntry, *, now: bool) -> StopOutcome:
    try:
        async with asyncio.timeout(messages.STOP_WAIT_S):
            await entry.stop(now=now)
    except TimeoutError:
        return StopOutcome("repl", entry.id, entry.state, has_ended=False)
    rests = entry.rests()
    await asyncio.wait({asyncio.wrap_future(rests)}, timeout=messages.STOP_WAIT_S)
    has_ended = rests.done()
    return StopOutcome("repl", entry.id, rests.result() if has_ended else entry.state, has_ended=has_ended)


# -- follow ------------------------------------------------------------------------------------------------------------


async def _follow(request: messages.FollowRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    log = next((entry.log for entry in BOARD.runs if entry.id == request.run), None)
    if log is None:
        await _reply(writer, messages.RefusedReply(f"{request.run!r} is not, or no longer, a run of this process"))
        return
    await _reply(writer, messages.FollowReply())
    pump = asyncio.ensure_future(_pump(log.follow(request.after), writer))
    beside = {asyncio.ensure_future(_beat(writer)), asyncio.ensure_future(_hung_up(reader))}
    try:
        await asyncio.wait({pump, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
    finally:
        for task in (pump, *beside):
            task.cancel()
        await asyncio.gather(pump, *beside, return_exceptions=True)


async def _pump(events: AsyncIterator[Event], writer: asyncio.StreamWriter) -> None:
    async for event in events:
        if not isinstance(event, CallText):  # as in a trace: a secret may be in two pieces
            line = _line(event) if text_chars(event) <= INLINE_CHARS else await asyncio.to_thread(_line, event)
            await _write(writer, line)
    await _write(writer, messages.END)


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(messages.HEARTBEAT_S)
        if not writer.transport.get_write_buffer_size():
            writer.write(encode_frame(messages.HEARTBEAT, messages.MAX_REPLY_BYTES))


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Return when the peer has closed the connection, or has sent more than its request."""
    with contextlib.suppress(OSError):
        await reader.read(1)


def _line(event: Event) -> bytes:
    line = trace_line(event)
    return line if len(line) <= messages.MAX_LINE_BYTES else encoded(cut(plain(event)))


async def _reply(writer: asyncio.StreamWriter, reply: messages.Reply) -> None:
    await _write(writer, encode_written_out(reply))


async def _write(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(encode_frame(payload, messages.MAX_LINE_BYTES))
    async with asyncio.timeout(messages.STALLED_S):
        await writer.drain()


# -- memory of processes -----------------------------------------------------------------------------------------------


def own_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_below(roots: Iterable[int]) -> Mapping[int, int]:
    """Return the memory in bytes of each of these processes, with all processes below it.

    A shared page counts in equal parts for each process (PSS), since REPLs share the interpreter and the context. Where
    the kernel hides that, all resident pages count. Call it in a thread: it reads a file for each process of the
    machine, and another for each measured process, for about a millisecond.

    Args:
        roots: Process ids. An ended process has 0 bytes.
    """
    import psutil  # takes some milliseconds, which a process that `ps` never asks need not pay

    def share(process: psutil.Process) -> int:
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)

    below: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    found = {process.pid: process for process in psutil.process_iter(["ppid"])}
    for process in found.values():
        below[process.info["ppid"]].append(process)
    used: dict[int, int] = {}
    for root in set(roots):
        processes = [found[root]] if root in found else []
        used[root] = 0
        for process in processes:  # grows by the processes below each
            processes += below[process.pid]
            with contextlib.suppress(psutil.NoSuchProcess):
                used[root] += share(process)
    return used


# -- the socket of this process ----------------------------------------------------------------------------------------

_own: ControlSocket | None = None
_starting = threading.Lock()


def _listening(place: int, name: str) -> socket.socket:
    """Return a socket that listens. Its name appears when it does: a client removes a name without a listener."""
    with FORKING:
        listening = socket_of_parent(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    hidden = f".{name}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden, dir_fd=place)
        listening.bind(folder.address(place, hidden))
        listening.listen()
        os.rename(hidden, name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        listening.close()
        raise
    return listening


def _forget() -> None:
    """Leave the socket to the parent, in a forked process."""
    global _own, _starting
    _own, _starting = None, threading.Lock()
    BOARD.clear()


os.register_at_fork(after_in_child=_forget)
