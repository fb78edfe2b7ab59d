"""A node as the orchestrator has it: its link, its workers, and what it holds of the contexts."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from rlm_broker.context.memfd import new_memfd
from rlm_broker.errors import ProtocolViolation, SandboxFailed, WorkerDied
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes import messages
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.streams import DescriptorEnd, FileEnd, send_file
from rlm_broker.sandbox.workers.held_process import ContextPieces, InitListener
from rlm_broker.sandbox.workers.levels import candidates
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.values.text import printable
from sandbox_worker.wire import control
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.level import level_named

SHARE_OF_MEMORY, MOST_HELD = 0.25, 128
"""Share of a node's memory for held contexts, and their number, since each takes a descriptor there. Beyond, the least
recently used one goes."""
INLINE_BYTES = 1 << 16
"""Largest context, in bytes, that is sent within its message; a larger one is held on the node."""
OPEN_S = 1_800.0
"""Seconds to open a sandbox there, with the installation of its packages. Beyond, its node is given up."""
END_S = 60.0
"""Seconds until a worker must have been forked, and a killed one must have ended. Beyond, its node is given up."""
CROSS_S, LEAST_BYTES_A_S = 600.0, 1 << 20
"""Seconds for a file or a context on its way over the link, and its bytes for each second more. Beyond, its node is
given up."""


class Node:
    """A node with an agent that has joined.

    Args:
        name: Name of the node.
        numbers: Draws the next number, of all things that messages name.
        on_change: Called when a place may have become free, or the node is lost.

    Attributes:
        name: Name of the node.
        numbers: As given.
        link: Link to its agent.
        opened: Facts about its sandbox; None until it is open.
        taken: Taken places.
        has_room: Whether it has memory for another REPL.
        held: Key of a memfd → its size, and the task that brings it; the most recently used one last.
    """

    def __init__(self, name: str, numbers: Callable[[], int], on_change: Callable[[], None]) -> None:
        self.name = name
        self.numbers = numbers
        self.link = Link(messages.from_agent, self._take, self._lost)
        self.opened: messages.NodeOpened | None = None
        self._seed: int | None = None
        self.taken = 0
        self.has_room = True
        self.held: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._on_change = on_change
        self._inits: dict[int, NodeInit] = {}
        self._servers: dict[int, asyncio.Task[int]] = {}

    @property
    def free(self) -> int:
        """Free places."""
        if self.opened is None or self.link.why_lost is not None or not self.has_room:
            return 0
        return self.opened.places - self.taken

    def loss(self) -> WorkerDied:
        """Return the error of what was under way when the node was lost."""
        return WorkerDied(f"its node {self.name} was lost: {self.link.why_lost}")

    # -- requests ----------------------------------------------------------------------------------------------------

    async def open(self, sandbox: messages.OpenNode) -> messages.NodeOpened:
        """Have the agent open its sandbox.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: It cannot be opened there, or the node is lost.
        """
        opened = await self._ask(msgspec.structs.replace(sandbox, request=self.numbers()), OPEN_S)
        if not isinstance(opened, messages.NodeOpened):
            raise SandboxFailed(f"the node {self.name} answered with another message")
        wanted = [level.name for level in candidates(sandbox.isolation, sandbox.allow_exec)]
        if opened.level not in wanted or sandbox.allow_exec not in (None, opened.allow_exec):
            raise SandboxFailed(f"the node {self.name} has opened another sandbox than it was asked for")
        self.opened, self._seed = opened, sandbox.seed
        return opened

    async def fork(self, limits: ReplLimits, server: int) -> Worker:
        """Have a worker forked. Raises `WorkerDied` if the node is lost, or the worker meanwhile."""
        assert self.opened is not None
        init = NodeInit(self, self.numbers(), limits.scratch_bytes)
        self._inits[init.number] = init
        worker = Worker(level_named(self.opened.level), init, seed=self._seed)
        worker.cpus = self.opened.cpus
        given = {name: getattr(limits, name) for name in ReplLimits.fields}
        try:
            await self._ask(messages.Fork(self.numbers(), init.number, server, given), END_S)
            if worker.gone.is_set():
                raise WorkerDied(f"a worker ended as it began (on the node {self.name})")
        except BaseException:
            self.link.post(messages.Kill(init.number))
            self._inits.pop(init.number, None)
            raise
        return worker

    async def prepared(self, server: int, preparation: Preparation) -> int:
        """Have a fork server with a preparation, and return its memory in bytes. It is started once."""
        task = self._servers.get(server)
        if task is None or _has_failed(task):
            task = self._servers[server] = _task(self._prepare(server, preparation))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # and not the caller
                raise SandboxFailed("its fork server has ended") from None
            raise

    async def _prepare(self, server: int, preparation: Preparation) -> int:
        context = preparation.context
        pieces = () if context is None else context.pieces()
        await self.bring(pieces, holds_small=True)
        forms = None if context is None else tuple(piece for _, piece in pieces)
        keys = tuple(key_of(fd) for fd, _ in pieces)
        given = preparation.imports, preparation.setup, preparation.timeout_s, forms, keys
        done = await self._ask(messages.Prepare(self.numbers(), server, *given), preparation.timeout_s + END_S)
        return done.memory_bytes if isinstance(done, messages.RequestDone) else 0

    def end_server(self, server: int) -> None:
        """End a fork server of `prepared`, ready or not, if this node has it."""
        if (task := self._servers.pop(server, None)) is not None:
            task.cancel()
            self.link.post(messages.EndServer(server))

    async def _ask(self, message: messages.AgentRequest, timeout_s: float) -> Any:
        self.link.post(message)
        return await self.answer(message.request, timeout_s)

    async def answer(self, request: int, timeout_s: float) -> Any:
        """Wait for the answer to a request. Raises the error of a refusal, and `WorkerDied` if the node is lost."""
        if self.link.why_lost is not None:
            raise self.loss()
        answer = self._asked[request] = asyncio.get_running_loop().create_future()
        try:
            async with self.in_time(timeout_s):
                return await answer
        finally:
            self._asked.pop(request, None)

    @contextlib.asynccontextmanager
    async def in_time(self, timeout_s: float) -> AsyncIterator[None]:
        """Give the node up if the block takes longer. Raises `WorkerDied` then."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self.link.close(f"it did not answer within {timeout_s:g} s")
            raise self.loss() from None

    # -- contexts ----------------------------------------------------------------------------------------------------

    async def bring(self, context: ContextPieces, *, holds_small: bool = False) -> None:
        """Have memfds held on the node. Each is brought once, while there is memory for it there.

        Args:
            context: The memfds.
            holds_small: Whether to hold also memfds of at most `INLINE_BYTES`.

        Raises:
            WorkerDied: The node has no memory for it, or is lost.
        """
        keys = [key_of(fd) for fd, _ in context]
        for key, (fd, piece) in zip(keys, context, strict=True):
            size_bytes = piece.form.size_bytes
            if size_bytes <= INLINE_BYTES and not holds_small:
                continue
            held = self.held.pop(key, None)
            if held is None or _has_failed(held[1]):
                self._make_room(size_bytes, keys)
                held = size_bytes, _task(self._bring(key, os.dup(fd), size_bytes))
            self.held[key] = held
            await asyncio.shield(held[1])

    async def _bring(self, key: str, fd: int, size_bytes: int) -> None:
        request = self.numbers()
        _task(send_file(self.link, request, fd, size_bytes))  # begins behind the message
        try:
            await self._ask(messages.HoldMemory(request, key, size_bytes), crossing_s(size_bytes))
        except WorkerDied:
            self.has_room = False  # until its next heartbeat says otherwise
            raise

    def _make_room(self, needed_bytes: int, kept: Sequence[str]) -> None:
        assert self.opened is not None
        most_bytes = int(self.opened.memory_bytes * SHARE_OF_MEMORY)
        for key, (_, task) in list(self.held.items()):
            held_bytes = sum(size for size, _ in self.held.values())
            if len(self.held) < MOST_HELD and held_bytes + needed_bytes <= most_bytes:
                return
            if task.done() and key not in kept:
                del self.held[key]
                self.link.post(messages.DropMemory(key))

    # -- what the agent says -----------------------------------------------------------------------------------------

    def _take(self, message: messages.FromAgent) -> None:
        match message:
            case messages.Beat():
                if message.has_room != self.has_room:
                    self.has_room = message.has_room
                    self._on_change()
            case messages.RequestDone() | messages.NodeOpened() | messages.RequestRefused():
                asked = self._asked.get(message.request)
                if asked is None or asked.done():
                    return  # its caller was cancelled
                if isinstance(message, messages.RequestRefused):
                    reason = f"{printable(message.reason)} (on the node {self.name})"
                    asked.set_exception(messages.ERRORS[message.kind](reason))
                else:
                    asked.set_result(message)
            case messages.Heard() if (init := self._inits.get(message.worker)) is not None:
                init.heard(message)
            case messages.Gone() if (init := self._inits.pop(message.worker, None)) is not None:
                init.ended(None)

    def _lost(self, why: str) -> None:
        inits, self._inits = self._inits, {}
        for init in inits.values():
            init.ended(f"its node {self.name} was lost: {why}")
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(self.loss())
        self._on_change()


@dataclass(slots=True)
class _RemoteProgram:
    """A program on a node: the number of its open outputs, and its end, which waits for theirs."""

    outputs: int = 2
    end: control.ProgramEnded | None = None


class NodeInit:
    """An init on a node; see `WorkerInit`. What travels beside a message crosses the link as streams.

    Args:
        node: Its node.
        number: Number of its worker.
        most_bytes: Bytes of a file of the scratch folder; a larger one is refused.
    """

    listener: InitListener
    pid = None

    def __init__(self, node: Node, number: int, most_bytes: int) -> None:
        self.number = number
        self._node = node
        self._most_bytes = most_bytes
        self._gone = asyncio.Event()
        self._opening: tuple[int, control.OpenToRead | control.OpenToWrite] | None = None
        self._files: dict[int, tuple[int, FileEnd | None]] = {}
        """Inode of a file's copy here → its stream, and our end of it for reading."""
        self._programs: dict[int, _RemoteProgram] = {}
        self._owed = 1
        """Outstanding answers: one to each question, and one unasked, the reason for the end of init."""

    def say(self, message: control.Control, *fds: int) -> None:
        """Send a message, or drop it if init has ended."""
        if self._gone.is_set():
            return
        key, data, streams = "", b"", tuple[int, ...]()
        self._owed += not isinstance(message, control.Begin | control.RunProgram | control.EndProgram)
        match message:
            case control.Load() | control.Hand() if fds and os.fstat(fds[0]).st_size <= INLINE_BYTES:
                data = os.pread(fds[0], INLINE_BYTES, 0)
            case control.Load() | control.Hand() if fds:
                key = key_of(fds[0])
            case control.Start() | control.Resume():
                streams = (self._stream(fds[0]),)
            case control.RunProgram():
                data = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
                self._programs[message.number] = _RemoteProgram()
                ended = partial(self._output_ended, message.number)
                streams = (self._stream(fds[1]), self._stream(fds[2], ended), self._stream(fds[3], ended))
            case control.OpenToRead() | control.OpenToWrite():
                streams = (self._node.numbers(),)
                self._opening = (streams[0], message)
        self._node.link.post(messages.Say(self.number, control.pack(message), key, data, streams))

    def _stream(self, fd: int, on_closed: Callable[[], None] | None = None) -> int:
        number = self._node.numbers()
        DescriptorEnd(self._node.link, number, os.dup(fd), on_closed)
        return number

    async def bring(self, context: ContextPieces) -> None:
        """Have the memfds of a context held on the node."""
        await self._node.bring(context)

    async def fetch(self, fd: int) -> None:
        """Wait until all of a file opened to be read has come.

        Raises:
            WorkerDied: It does not come.
        """
        inode = os.fstat(fd).st_ino
        end = self._files[inode][1]
        if end is not None:  # else it was opened to be written
            del self._files[inode]
            try:
                async with self._node.in_time(crossing_s(end.size_bytes)):
                    error = await end.filled
            except BaseException:
                end.close()  # what comes late is dropped
                raise
            if error is not None:
                raise WorkerDied(f"a file did not come from the node {self._node.name}: {error.strerror or error}")

    async def store(self, fd: int) -> None:
        """Send what was written to a file's copy here to the file itself.

        Raises:
            FileRefused: It cannot be written there. The message is the rest of a sentence about it.
            WorkerDied: The node is lost.
        """
        found, link = os.fstat(fd), self._node.link
        number, _ = self._files.pop(found.st_ino)
        _task(send_file(link, number, os.dup(fd), found.st_size))
        await self._node.answer(number, crossing_s(found.st_size))

    def send_kill(self) -> None:
        """End the worker, without waiting for the end."""
        self._node.link.post(messages.Kill(self.number))

    async def kill(self) -> None:
        """End the worker, and return when it is gone. A node that fails to is given up."""
        self.send_kill()  # also if it is gone: the agent then removes what it has left
        try:
            async with asyncio.timeout(END_S):
                await self._gone.wait()
        except TimeoutError:
            self._node.link.close(f"it did not end a worker within {END_S:g} s")

    # -- what the agent says -----------------------------------------------------------------------------------------

    def heard(self, said: messages.Heard) -> None:
        """Take a packet of the init.

        Raises:
            ProtocolViolation: It answers without a question, or opens too large a file.
        """
        try:
            message: control.FromInit = control.unpack_from_init(said.packet)
        except MessageInvalid:
            message = control.Failed(step="speak", reason="its init sent an invalid message")
        match message:
            case control.Written() | control.Burned() | control.Checkpointed() | control.Died() | control.Exceeded():
                pass
            case control.ProgramEnded():
                program = self._programs.get(message.number)
                if program is None or program.end is not None:
                    raise ProtocolViolation("the end of a program that does not run")
                if program.outputs:
                    program.end = message
                    return
                del self._programs[message.number]
            case _:  # answers wait for their callers, and must not pile up
                self._owed -= 1
                if self._owed < 0:
                    raise ProtocolViolation("an answer of an init that was not asked")
                if isinstance(message, control.Opened):
                    self.listener.heard(control.Opened(), [self._opened(said.size_bytes)])
                    return
                self._opening = None
                if isinstance(message, control.Failed | control.Refused):
                    message = msgspec.structs.replace(message, reason=printable(message.reason))
        self.listener.heard(message, [])

    def _opened(self, size_bytes: int) -> int:
        """Return a copy of a file here: one that fills, or one to be sent when it is written."""
        if self._opening is None or size_bytes > self._most_bytes:
            raise ProtocolViolation(f"a file of {size_bytes:,} bytes, of at most {self._most_bytes:,}")
        (number, request), self._opening = self._opening, None
        fd, end = new_memfd("file"), None
        if isinstance(request, control.OpenToRead):
            end = FileEnd(self._node.link, number, os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), size_bytes)
        self._files[os.fstat(fd).st_ino] = (number, end)
        return fd

    def _output_ended(self, number: int) -> None:
        program = self._programs[number]
        program.outputs -= 1
        if not program.outputs and program.end is not None:
            del self._programs[number]
            if not self._gone.is_set():
                self.listener.heard(program.end, [])

    def ended(self, why: str | None) -> None:
        """Learn that the worker has ended, and why; None: as it was asked to, or by itself."""
        self._gone.set()
        for number, end in list(self._files.values()):
            if end is None:  # its writer was cancelled, and the agent waits for the content
                self._node.link.send(number, b"")
            else:
                end.close()
        self.listener.ended(why)
        self.listener.unheard(None)


def key_of(fd: int) -> str:
    """Return the key of a sealed memfd: no other one of this machine has had it since the last boot."""
    found = os.fstat(fd)
    return f"{found.st_ino}-{found.st_ctime_ns}-{found.st_size}"


def crossing_s(size_bytes: int) -> float:
    """Return the seconds for so many bytes to cross a link."""
    return CROSS_S + size_bytes / LEAST_BYTES_A_S


def _task(work: Any) -> "asyncio.Task[Any]":
    """Return a task, and have its error read, also after the cancellation of all callers."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


def _has_failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
