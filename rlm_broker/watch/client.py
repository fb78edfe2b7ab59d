"""The other processes of this user: what they do, their events as they happen, and how to stop them.

It imports little, so that `ps` starts fast.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence

import msgspec

from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.watch import folder, messages
from rlm_broker.watch.folder import SocketName
from rlm_broker.watch.messages import ProcessStatus, RunStatus, StopOutcome
from sandbox_worker.wire.frames import encode_frame

HUNG_S = 0.25
"""Seconds for an answer. A process without one is listed as hung."""
MOST_AT_A_TIME = 200
"""Requests at a time: each takes a descriptor."""
SILENT_S = 3 * messages.HEARTBEAT_S
"""Seconds without an event or a sign of life; then a followed process counts as hung."""


async def follow(pid: int, run: str, after: int = 0) -> AsyncIterator[bytes]:
    """Yield the events of a run as they happen, until its end: each as one line of a trace, without its newline.

    Args:
        pid: Process of the run.
        run: Id of the run.
        after: Number of the last known event; 0 begins with the first.

    Raises:
        ConfigurationError: There is no such process or run.
        RlmBrokerError: The process ended or hung before the run's end.
    """
    async with _process(pid) as peer:
        reply = await peer.ask(messages.FollowRequest(run=run, after=after), messages.REQUEST_S)
        assert isinstance(reply, messages.FollowReply)
        while (line := await peer.frame(messages.MAX_LINE_BYTES, SILENT_S)) != messages.END:
            if line != messages.HEARTBEAT:
                yield line


class MachineRuns:
    """The runs and REPLs of this user's processes: what `rlm-broker runs`, `stop` and `view` see. It is a `LiveSource`.

    Example:
        ```python
        async def in_use():
            return sum(len(process.repls) for process in await MachineRuns().processes())
        ```
    """

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}

    async def processes(self, timeout_s: float = HUNG_S) -> list[ProcessStatus]:
        """Return what each process with a control socket does, the oldest first; see `ControlSocket`.

        A process without an answer in time has `is_hung`. Sockets of ended processes are removed.

        Example:
            ```python
            async def hung():
                return [process.pid for process in await MachineRuns().processes() if process.is_hung]
            ```

        Args:
            timeout_s: Seconds for each answer.

        Raises:
            ConfigurationError: The folder of the sockets cannot be trusted.
        """
        with folder.opened() as place:
            if place is None:
                return []
            places = asyncio.Semaphore(MOST_AT_A_TIME)
            asked = [_status(place, name, timeout_s, places) for name in _names(place)]
            found = [status for status in await asyncio.gather(*asked) if status is not None]
        return sorted(found, key=lambda status: (status.started, status.pid))

    async def end(self, pid: int, target: str | None = None, now: bool = False) -> tuple[StopOutcome, ...]:
        """Stop a run, a REPL, or all of a process, and wait some seconds for the end.

        Example:
            ```python
            async def end_all():
                return [await MachineRuns().end(each.pid) for each in await MachineRuns().processes()]
            ```

        Args:
            pid: Process of the run or REPL.
            target: Id of a run or a REPL; None: all runs of the process, and all its REPLs of no run.
            now: Whether a run is cancelled, and a REPL closed. If not, a run ends with its best answer so far, and the
                block of a REPL is interrupted.

        Returns:
            One outcome for each run and REPL that was stopped.

        Raises:
            ConfigurationError: There is no such process, run or REPL.
            RlmBrokerError: The process hangs.
        """
        request = messages.StopRequest(target=messages.PROCESS if target is None else target, now=now)
        async with _process(pid) as peer:
            try:
                reply = await peer.ask(request, 2 * messages.STOP_WAIT_S + messages.REQUEST_S)
            except _PeerEnded:
                return (StopOutcome("process", str(pid), "ended", has_ended=True),)
        assert isinstance(reply, messages.StopReply)
        return reply.outcomes

    async def runs(self) -> Sequence[RunStatus]:
        """Return the runs of all processes that answer."""
        found = [run for process in await self.processes() for run in process.runs]
        self._pids = {run.id: run.pid for run in found}
        return found

    async def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a run as lines of a trace, until it ends.

        Raises:
            LookupError: There is no such run.
            RlmBrokerError: Its process ended or hangs.
        """
        async for line in follow(await self._pid(run), run, after):
            yield line

    async def stop(self, run: str, now: bool) -> bool:
        """Stop a run, and return whether there was one.

        Raises:
            RlmBrokerError: Its process hangs.
        """
        try:
            return bool(await self.end(await self._pid(run), run, now))
        except (LookupError, ConfigurationError):
            return False

    async def _pid(self, run: str) -> int:
        if run not in self._pids:
            await self.runs()
        return self._pids[run]


class _PeerEnded(RlmBrokerError):
    """The other process ended, or closed the connection, before its reply was whole."""


class _Peer:
    """A connection with a process."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pid = pid
        self._reader = reader
        self._writer = writer

    async def ask(self, request: messages.Request, timeout_s: float) -> messages.Reply:
        """Send the request, and return the reply.

        Raises:
            ConfigurationError: The request is refused.
            RlmBrokerError: The process does not answer in time, ended, or is of another release.
        """
        self._writer.write(encode_frame(msgspec.json.encode(request), messages.MAX_REQUEST_BYTES))
        frame = await self.frame(messages.MAX_REPLY_BYTES, timeout_s)
        try:
            reply: messages.Reply = messages.replies.decode(frame)
        except (msgspec.DecodeError, RecursionError):
            raise RlmBrokerError(f"the process {self._pid} is of another release of rlm-broker") from None
        if isinstance(reply, messages.RefusedReply):
            raise ConfigurationError(reply.reason)
        return reply

    async def frame(self, most_bytes: int, timeout_s: float) -> bytes:
        """Return the next frame.

        Raises:
            RlmBrokerError: It does not come in time, or the process ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await messages.read_frame(self._reader, most_bytes)
        except TimeoutError:
            raise _hung(self._pid) from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            raise _PeerEnded(f"the process {self._pid} has ended") from None


@contextlib.asynccontextmanager
async def _process(pid: int) -> AsyncIterator[_Peer]:
    """Connect with a process.

    Raises:
        ConfigurationError: There is no such process.
        RlmBrokerError: It accepts no connection.
    """
    with folder.opened() as place:
        for name in [] if place is None else [each for each in _names(place) if each.pid == pid]:
            assert place is not None
            async with _peer(place, name) as peer:
                if peer is not None:
                    yield peer
                    return
    raise ConfigurationError(f"there is no process {pid} with a control socket: see `rlm-broker runs`")


async def _status(place: int, name: SocketName, timeout_s: float, places: asyncio.Semaphore) -> ProcessStatus | None:
    """Return the state of a process; None if it has ended."""
    async with places:
        hung = ProcessStatus(pid=name.pid, command=name.command, started=_made(place, name), is_hung=True)
        try:
            async with _peer(place, name) as peer:
                if peer is None:
                    return None
                reply = await peer.ask(messages.StatusRequest(), timeout_s)
        except _PeerEnded:
            return None
        except RlmBrokerError:
            return hung
    return reply.process if isinstance(reply, messages.StatusReply) else hung


@contextlib.asynccontextmanager
async def _peer(place: int, name: SocketName) -> AsyncIterator[_Peer | None]:
    """Connect with a process; None if it has ended.

    Raises:
        RlmBrokerError: It accepts no connection.
    """
    try:
        connection = _connected(place, name)
    except OSError:  # EAGAIN: as many connections wait as the kernel lets wait
        raise _hung(name.pid) from None
    if connection is None:
        yield None
        return
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        yield _Peer(name.pid, reader, writer)
    finally:
        writer.transport.abort()


def _hung(pid: int) -> RlmBrokerError:
    return RlmBrokerError(f"the process {pid} does not answer: it hangs or is suspended")


def _names(place: int) -> list[SocketName]:
    return [name for each in sorted(os.listdir(place)) if (name := SocketName.parsed(each)) is not None]


def _made(place: int, name: SocketName) -> float:
    try:
        return os.stat(str(name), dir_fd=place, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _connected(place: int, name: SocketName) -> socket.socket | None:
    """Return a connection with a process of this user; None if it has ended. Its socket is removed then.

    Raises:
        OSError: It accepts no connection.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(folder.address(place, name))
        if messages.peer_of(connection)[1] == os.geteuid():
            return connection
    except ConnectionRefusedError:  # a socket listens before it gets its name: so its process has ended
        with contextlib.suppress(OSError):
            os.unlink(str(name), dir_fd=place)
    except FileNotFoundError:
        pass
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None
