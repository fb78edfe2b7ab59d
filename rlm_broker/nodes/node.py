"""A node as the orchestrator has it: its link, its workers, and what it holds of the contexts."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from rlm_broker.context.memfd import new_memfd
from rlm_broker.errors import (
    ConfigurationError,
    ContextRefused,
    FileRefused,
    IsolationUnavailable,
    ProtocolViolation,
    RlmBrokerError,
    SandboxFailed,
    WorkerDied,
)
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.messages import (
    Beat,
    DropMemory,
    EndServer,
    Fork,
    FromAgent,
    Gone,
    Heard,
    HoldMemory,
    Kill,
    NodeOpened,
    OpenNode,
    Prepare,
    RequestDone,
    RequestRefused,
    Say,
    from_agent,
)
from rlm_broker.nodes.streams import DescriptorEnd, FileEnd, send_file
from rlm_broker.sandbox.workers.init_process import ContextPieces, InitListener
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.values.text import printable
from sandbox_worker.wire.control import (
    Control,
    Failed,
    Forked,
    FromInit,
    Hand,
    Load,
    Opened,
    OpenToRead,
    OpenToWrite,
    ProgramEnded,
    Refused,
    RunProgram,
    Start,
    pack,
    unpack_from_init,
)
from sandbox_worker.wire.errors import MessageInvalid

SHARE_OF_MEMORY = 0.25
"""Share of a node's memory for contexts that it holds. Beyond, the least recently used one goes."""
END_S = 60.0
"""Seconds until a killed worker must have ended. Beyond, its node is given up."""
FETCH_S = 600.0
"""Seconds for all of a file. Beyond, reading it is an error."""
ERRORS: dict[str, type[RlmBrokerError]] = {
    "configuration": ConfigurationError,
    "isolation": IsolationUnavailable,
    "context": ContextRefused,
    "memory": WorkerDied,  # another node may have the memory
    "file": FileRefused,
    "sandbox": SandboxFailed,
}
"""Kind of an agent's refusal → the error."""

Carry = Callable[[str, int, int], Awaitable[bool]]
"""Brings a memfd to a node by another way than the link: called with key, descriptor and size; says whether it did."""


class Node:
    """A node whose agent has joined. RequestDone by the port when the token is shown.

    Args:
        name: Name of the node.
        numbers: Draws the next number, of all things that messages name.
        on_change: Called when a place may have become free, or the node is lost.
        carry: Brings contexts by another way; None sends them on the link.

    Attributes:
        name: Name of the node.
        link: Link to its agent.
        opened: Facts about its sandbox; None until it is open.
        taken: Places that are taken.
        has_room: Whether it has memory for another REPL.
    """

    def __init__(
        self, name: str, numbers: Callable[[], int], on_change: Callable[[], None], carry: Carry | None = None
    ) -> None:
        self.name = name
        self.link = Link(from_agent, self._take, self._lost)
        self.opened: NodeOpened | None = None
        self.taken = 0
        self.has_room = True
        self._numbers = numbers
        self._on_change = on_change
        self._carry = carry
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._inits: dict[int, NodeInit] = {}
        self._held: dict[str, tuple[int, asyncio.Task[None]]] = {}
        """Key of a memfd → its size, and the task that brings it. The one that was used last comes last."""
        self._servers: dict[int, asyncio.Task[int]] = {}

    @property
    def free(self) -> int:
        """Places that are free."""
        if self.opened is None or self.link.why_lost is not None or not self.has_room:
            return 0
        return self.opened.places - self.taken

    # -- requests ----------------------------------------------------------------------------------------------------

    async def open(self, sandbox: OpenNode) -> NodeOpened:
        """Have the agent open its sandbox.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: It cannot be opened there, or the node is lost.
        """
        opened = await self._ask(lambda request: msgspec.structs.replace(sandbox, request=request))
        if not isinstance(opened, NodeOpened):
            raise SandboxFailed(f"the node {self.name} answered with another message")
        self.opened = opened
        return opened

    async def fork(self, limits: ReplLimits, server: int) -> "NodeInit":
        """Have a worker forked, and return its init. Raises `WorkerDied` if the node is lost."""
        init = NodeInit(self, self._numbers(), limits.scratch_bytes)
        self._inits[init.number] = init
        given = limits.model_dump(mode="json", include=set(ReplLimits.model_fields))
        try:
            await self._ask(lambda request: Fork(request, init.number, server, given))
        except BaseException:
            self.link.post(Kill(init.number))
            self._inits.pop(init.number, None)
            raise
        if init.number not in self._inits:  # it has ended since, and no `Worker` was there to learn of it
            raise WorkerDied(f"a worker ended as it began (on the node {self.name})")
        return init

    async def prepared(self, server: int, preparation: Preparation) -> int:
        """Have a fork server with a preparation, and return its memory in bytes. It is started once."""
        task = self._servers.get(server)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._servers[server] = asyncio.get_running_loop().create_task(self._prepare(server, preparation))
            task.add_done_callback(_read)
        return await asyncio.shield(task)

    async def _prepare(self, server: int, preparation: Preparation) -> int:
        pieces: ContextPieces = ()
        if preparation.context is not None:
            pieces = preparation.context.pieces()
            await self.bring(pieces)
        made = await self._ask(
            lambda request: Prepare(
                request,
                server,
                preparation.imports,
                preparation.setup,
                preparation.timeout_s,
                None if preparation.context is None else tuple(piece for _, piece in pieces),
                tuple(key_of(fd) for fd, _ in pieces),
            )
        )
        return made.memory_bytes if isinstance(made, RequestDone) else 0

    def end_server(self, server: int) -> None:
        """End a fork server that was prepared, if this node has it."""
        if self._servers.pop(server, None) is not None:
            self.link.post(EndServer(server))

    async def _ask(self, message: Callable[[int], Any]) -> Any:
        if self.link.why_lost is not None:
            raise self._loss()
        request = self._numbers()
        answer = self._asked[request] = asyncio.get_running_loop().create_future()
        self.link.post(message(request))
        try:
            return await answer
        finally:
            self._asked.pop(request, None)

    # -- contexts ----------------------------------------------------------------------------------------------------

    async def bring(self, context: ContextPieces) -> None:
        """Have memfds held on the node. Each is brought once, while there is memory for it there.

        Raises:
            WorkerDied: The node has no memory for it, or is lost.
        """
        for fd, piece in context:
            key, size_bytes = key_of(fd), piece.form.size_bytes
            held = self._held.pop(key, None)
            if held is None or (held[1].done() and (held[1].cancelled() or held[1].exception() is not None)):
                self._make_room(size_bytes)
                task = asyncio.get_running_loop().create_task(self._bring(key, os.dup(fd), size_bytes))
                task.add_done_callback(_read)
                held = size_bytes, task
            self._held[key] = held
            await asyncio.shield(held[1])

    async def _bring(self, key: str, fd: int, size_bytes: int) -> None:
        if self._carry is not None and await self._carry(key, fd, size_bytes):
            os.close(fd)
            return
        sending: list[asyncio.Task[None]] = []

        def hold(request: int) -> HoldMemory:
            sending.append(asyncio.get_running_loop().create_task(send_file(self.link, request, fd, size_bytes)))
            return HoldMemory(request, key, size_bytes)

        try:
            await self._ask(hold)
        except WorkerDied:
            self.has_room = False  # until its next heartbeat says otherwise
            raise
        finally:
            if not sending:
                os.close(fd)

    def _make_room(self, needed_bytes: int) -> None:
        assert self.opened is not None
        most_bytes = int(self.opened.memory_bytes * SHARE_OF_MEMORY)
        for key, (_, task) in list(self._held.items()):
            if sum(size for size, _ in self._held.values()) + needed_bytes <= most_bytes:
                return
            if task.done():
                del self._held[key]
                self.link.post(DropMemory(key))

    # -- what the agent says -----------------------------------------------------------------------------------------

    def _take(self, message: FromAgent) -> None:
        match message:
            case Beat():
                if message.has_room != self.has_room:
                    self.has_room = message.has_room
                    self._on_change()
            case RequestDone() | NodeOpened():
                self._answered(message.request, message)
            case RequestRefused():
                error = ERRORS[message.kind](f"{printable(message.reason)} (on the node {self.name})")
                self._answered(message.request, error)
            case Heard() if (init := self._inits.get(message.worker)) is not None:
                init.heard(message)
            case Gone():
                self._ended(message.worker, None)

    def _answered(self, request: int, answer: object) -> None:
        asked = self._asked.get(request)
        if asked is None or asked.done():
            return  # its caller was cancelled
        if isinstance(answer, Exception):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)

    def _ended(self, worker: int, why: str | None) -> None:
        init = self._inits.pop(worker, None)
        if init is not None:
            init.ended(why)

    def _loss(self) -> WorkerDied:
        return WorkerDied(f"its node {self.name} was lost: {self.link.why_lost}")

    def _lost(self, why: str) -> None:
        for worker in list(self._inits):
            self._ended(worker, f"its node {self.name} was lost: {why}")
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(self._loss())
        self._on_change()


class Unheard:
    """The listener of an init whose worker is not made yet."""

    def heard(self, message: FromInit, fds: list[int]) -> None:
        """DropMemory a message: an init is asked before it says anything."""

    def unheard(self, error: OSError | None) -> None:
        """DropMemory the news."""

    def ended(self, why: str | None) -> None:
        """DropMemory the news: `Node.fork` looks for it."""


class NodeInit:
    """An init on a node; see `WorkerInit`. What travels beside a message crosses the link as streams.

    Args:
        node: Its node.
        number: Number of its worker.
        most_bytes: Bytes of a file of the scratch folder; a larger one is refused.
    """

    pid = None

    def __init__(self, node: Node, number: int, most_bytes: int) -> None:
        self.listener: InitListener = Unheard()
        self.node = node
        self.number = number
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._opening: tuple[int, OpenToRead | OpenToWrite] | None = None
        self._files: dict[int, tuple[int, asyncio.Future[Any] | None]] = {}
        """Inode of a file's copy here → its stream, and what comes of it."""
        self._pipes: dict[int, int] = {}
        """Number of a program → its outputs that have not ended."""
        self._late: dict[int, ProgramEnded] = {}

    def say(self, message: Control, *fds: int) -> None:
        """Send a message, or drop it if init has ended."""
        if self._gone.is_set():
            return
        key, data, streams = "", b"", tuple[int, ...]()
        match message:
            case Load() | Hand() if fds:
                key = key_of(fds[0])
            case Start():
                streams = (self._stream(fds[0]),)
            case RunProgram():
                memfd, *pipes = fds
                data = os.pread(memfd, os.fstat(memfd).st_size, 0)
                self._pipes[message.number] = 2
                ended = partial(self._pipe_ended, message.number)
                streams = (
                    self._stream(pipes[0], writes=False),
                    self._stream(pipes[1], reads=False, on_closed=ended),
                    self._stream(pipes[2], reads=False, on_closed=ended),
                )
            case OpenToRead() | OpenToWrite():
                streams = (self.node._numbers(),)
                self._opening = (streams[0], message)
        self.node.link.post(Say(self.number, pack(message), key, data, streams))

    def _stream(self, fd: int, **how: Any) -> int:
        number = self.node._numbers()
        DescriptorEnd(self.node.link, number, os.dup(fd), **how)
        return number

    async def bring(self, context: ContextPieces) -> None:
        """Have the memfds of a context held on the node."""
        await self.node.bring(context)

    async def fetch(self, fd: int) -> None:
        """Wait until all of a file that was opened to be read has come."""
        inode = os.fstat(fd).st_ino
        coming = self._files[inode][1]
        if coming is None:  # it was opened to be written
            return
        del self._files[inode]
        async with asyncio.timeout(FETCH_S):
            error = await coming
        if error is not None:
            raise WorkerDied(f"a file did not come from the node {self.node.name}: {error.strerror or error}")

    async def store(self, fd: int) -> None:
        """Send what was written to a file's copy here to the file itself.

        Raises:
            FileRefused: It cannot be written there. The message is the rest of a sentence about it.
            WorkerDied: The node is lost.
        """
        found = os.fstat(fd)
        number, _ = self._files.pop(found.st_ino)
        stored = self.node._asked[number] = self._loop.create_future()
        try:
            await send_file(self.node.link, number, os.dup(fd), found.st_size)
            if self.node.link.why_lost is not None:
                raise self.node._loss()
            await stored
        finally:
            self.node._asked.pop(number, None)

    def send_kill(self) -> None:
        """End the worker, without waiting for the end."""
        self.node.link.post(Kill(self.number))

    async def kill(self) -> None:
        """End the worker, and return when it is gone. A node that does not end it is given up."""
        if not self._gone.is_set():
            self.send_kill()
            try:
                async with asyncio.timeout(END_S):
                    await self._gone.wait()
            except TimeoutError:
                self.node.link.close(f"it did not end a worker within {END_S:g} s")
        self.listener.unheard(None)

    # -- what the agent says -----------------------------------------------------------------------------------------

    def heard(self, said: Heard) -> None:
        """Take a packet of the init.

        Raises:
            ProtocolViolation: It opens a file that was not asked for, or one that is too large.
        """
        try:
            message: FromInit = unpack_from_init(said.packet)
        except MessageInvalid:
            message = Failed(step="speak", reason="its init sent an invalid message")
        match message:
            case Forked():
                return  # the agent holds the REPL
            case Opened():
                self.listener.heard(Opened(), [self._opened(said.size_bytes)])
                return
            case Refused():
                self._opening = None
            case ProgramEnded() if self._pipes.get(message.number):
                self._late[message.number] = message  # its outputs are still on their way
                return
        self.listener.heard(message, [])

    def _opened(self, size_bytes: int) -> int:
        """Return a copy of a file here: one that fills, or one to be sent when it is written."""
        if self._opening is None or size_bytes > self._most_bytes:
            raise ProtocolViolation(f"a file of {size_bytes:,} bytes, of at most {self._most_bytes:,}")
        (number, request), self._opening = self._opening, None
        fd = new_memfd("file")
        coming = None
        if isinstance(request, OpenToRead):
            coming = FileEnd(self.node.link, number, os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), size_bytes).filled
        self._files[os.fstat(fd).st_ino] = (number, coming)
        return fd

    def _pipe_ended(self, program: int) -> None:
        self._pipes[program] -= 1
        if not self._pipes[program]:
            del self._pipes[program]
            if (late := self._late.pop(program, None)) is not None and not self._gone.is_set():
                self.listener.heard(late, [])

    def ended(self, why: str | None) -> None:
        """Learn that the worker has ended; None: as it was asked to, or by itself."""
        self._gone.set()
        for number, coming in list(self._files.values()):
            if coming is not None and (end := self.node.link.streams.get(number)) is not None:
                end.lost()
        self.listener.ended(why)
        self.listener.unheard(None)


def key_of(fd: int) -> str:
    """Return the key of a sealed memfd: no other one of this machine has had it since the last boot."""
    found = os.fstat(fd)
    return f"{found.st_ino}-{found.st_ctime_ns}-{found.st_size}"


def _read(task: "asyncio.Task[Any]") -> None:
    """Read the error of a task, or asyncio would report it as never retrieved if its callers were cancelled."""
    if not task.cancelled():
        task.exception()
