"""The agent of a node: it forks workers, and passes on what crosses between their inits and the orchestrator.

    python -m rlm_broker.nodes.agent < ORDER

Theory of operation. The order is one line of standard input, so that the token is in no command line, environment or
file. The agent joins, opens a sandbox of the kind that it is told, and does what the orchestrator does on one machine:
it forks workers, and hands over what travels beside a control message. A connection or a pipe is one end of a stream; a
context is a memfd that it holds. What init says is passed on, and judged by the orchestrator alone.

All that was started ends with the link, and the agent with it; also when standard input ends, which its parent holds. A
killed agent needs no code for that: the kernel closes the control sockets of its fork servers.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from fcntl import F_ADD_SEALS, fcntl
from typing import Any

import msgspec
import psutil

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.memfd import new_memfd
from rlm_broker.context.stored import ContextInfo, StoredContext
from rlm_broker.errors import (
    ConfigurationError,
    ContextRefused,
    FileRefused,
    IsolationUnavailable,
    ProtocolViolation,
    RlmBrokerError,
    SandboxFailed,
)
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.messages import (
    MAX_JOIN_BYTES,
    MAX_REASON_CHARS,
    PROTOCOL,
    Beat,
    DropMemory,
    EndServer,
    Fork,
    FromOrchestrator,
    Gone,
    Heard,
    HoldMemory,
    Join,
    Kill,
    NodeOpened,
    OpenNode,
    Prepare,
    RefusalKind,
    RequestDone,
    RequestRefused,
    Say,
    encoded,
    from_orchestrator,
)
from rlm_broker.nodes.streams import DescriptorEnd, FileEnd, send_file
from rlm_broker.nodes.tls import client_context, require_pinned
from rlm_broker.sandbox.sandbox import Sandbox, forker_of
from rlm_broker.sandbox.workers.cgroups import memory_bytes
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation
from sandbox_worker import RELEASE
from sandbox_worker.loading.form import SEALS
from sandbox_worker.wire.control import (
    Failed,
    FromInit,
    Hand,
    Load,
    Opened,
    OpenToRead,
    OpenToWrite,
    RunProgram,
    Start,
    ToInit,
    pack,
    unpack_to_init,
)
from sandbox_worker.wire.frames import encode_frame

MODULE = "rlm_broker.nodes.agent"
REPLS_PER_CPU = 16
"""REPLs at the same time for each CPU: most REPLs wait for a model."""
RESERVE_SHARE = 0.05
"""Share of the node's memory that stays free: with less, the node gives no further REPL."""
LEAST_RESERVE_BYTES = 256 << 20
"""Bytes that stay free on a small node: a REPL, its libraries and the output of its blocks need some room."""
JOIN_S = 30.0
"""Seconds to reach the orchestrator."""
END_S = 5.0
"""Seconds to end all workers. Beyond, the process exits, and they end with it."""
KINDS: list[tuple[type[Exception], RefusalKind]] = [
    (ConfigurationError, "configuration"),
    (IsolationUnavailable, "isolation"),
    (ContextRefused, "context"),
    (FileRefused, "file"),
    (OSError, "memory"),
    (MemoryError, "memory"),
]
"""Error → kind of the refusal; any other one is "sandbox"."""


class AgentOrder(msgspec.Struct, frozen=True):
    """Order to an agent: what it needs to join.

    Attributes:
        host, port: Address of the orchestrator's port for agents.
        fingerprint: Pinned certificate; None for plain text.
        token: One-time token.
        places: REPLs at the same time; None: `REPLS_PER_CPU` for each CPU that the process may use.
    """

    host: str
    port: int
    fingerprint: str | None
    token: str
    places: int | None = None


class Agent:
    """Does what the orchestrator says, as long as the link lasts."""

    def __init__(self, order: AgentOrder) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.link = Link(from_orchestrator, self._take, lambda _: self._ended.set(), self._beat, is_patient=True)
        self._sandbox: Sandbox | None = None
        self._servers: dict[int, Forker] = {}
        self._relays: dict[int, Relay] = {}
        self._killed: set[int] = set()
        """Workers that were to be ended before they were forked."""
        self._memory: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()

    async def serve(self) -> str:
        """Join, and serve until the link is lost. All that was started has ended then.

        Returns:
            Why it was lost.

        Raises:
            SandboxFailed: The orchestrator cannot be reached, or is another one.
        """
        try:
            await self._join()
            await self._ended.wait()
            return self.link.why_lost or ""
        finally:
            self.link.close("the agent ends")
            await to_its_end(self._end)

    async def _join(self) -> None:
        order = self._order
        tls = None if order.fingerprint is None else client_context()
        try:
            async with asyncio.timeout(JOIN_S):
                transport, _ = await self._loop.create_connection(asyncio.Protocol, order.host, order.port, ssl=tls)
        except OSError as error:
            raise SandboxFailed(f"{order.host}:{order.port} cannot be reached: {error}") from None
        if order.fingerprint is not None:
            require_pinned(transport, order.fingerprint)
        transport.write(encode_frame(encoded(Join(order.token, PROTOCOL, RELEASE)), MAX_JOIN_BYTES))
        transport.set_protocol(self.link)
        self.link.connection_made(transport)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sandbox is not None:
            with contextlib.suppress(SandboxFailed):  # a folder could not be removed
                await self._sandbox.aclose()

    def _beat(self) -> Beat:
        reserve = max(LEAST_RESERVE_BYTES, int(memory_bytes() * RESERVE_SHARE))
        return Beat(psutil.virtual_memory().available > reserve)

    # -- what the orchestrator says ----------------------------------------------------------------------------------

    def _take(self, message: FromOrchestrator) -> None:
        match message:
            case Say() if (relay := self._relays.get(message.worker)) is not None:
                relay.say(message, self._memory)
            case Fork():
                self._answered(message.request, self._fork(message))
            case Kill():
                self._kill(message.worker)
            case HoldMemory():
                self._hold(message)
            case DropMemory():
                if (fd := self._memory.pop(message.key, -1)) >= 0:
                    os.close(fd)
            case OpenNode():
                self._answered(message.request, self._open(message))
            case Prepare():
                self._answered(message.request, self._prepare(message))
            case EndServer() if (server := self._servers.pop(message.server, None)) is not None:
                self._begin(server.close())

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read: what a request met was its answer

    def _answered(self, request: int, work: Any) -> None:
        """Do what a request asks, and answer it."""

        async def answered() -> None:
            try:
                answer = await work
            except (RlmBrokerError, OSError, MemoryError) as error:
                answer = refusal(request, error)
            self.link.post(answer)

        self._begin(answered())

    async def _open(self, message: OpenNode) -> NodeOpened:
        async with self._opening:
            if self._sandbox is not None:
                await self._sandbox.aclose()
            self._sandbox = Sandbox(
                isolation=message.isolation,
                allow_exec=message.allow_exec,
                warm=0,
                seed=message.seed,
                python=message.python,
                packages=message.packages,
            )
            await self._sandbox.__aenter__()
        server = self._servers[0] = forker_of(self._sandbox)
        places = REPLS_PER_CPU * len(os.sched_getaffinity(0)) if self._order.places is None else self._order.places
        names = list(server.importable(message.names))
        layers: Any = list(server.layers)
        return NodeOpened(message.request, server.level.name, layers, server.allow_exec, places, memory_bytes(), names)

    async def _prepare(self, message: Prepare) -> RequestDone:
        context = None
        if message.pieces is not None:
            held = [os.dup(self._memory[key]) for key in message.keys]
            context = StoredContext(zip(held, message.pieces, strict=True), ContextInfo("", 0))
        preparation = Preparation(message.imports, message.setup, context, message.timeout_s)
        server = self._servers[message.server] = await self._servers[0].prepared(preparation)
        return RequestDone(message.request, server.memory_bytes)

    async def _fork(self, message: Fork) -> RequestDone:
        server = self._servers.get(message.server)
        if server is None:
            raise SandboxFailed("its fork server has ended")
        worker = await server.spawn(ReplLimits(**message.limits))
        if message.worker in self._killed:
            self._killed.discard(message.worker)
            await server.end(worker)
            raise SandboxFailed("it was ended as it began")
        self._relays[message.worker] = Relay(self.link, message.worker, worker, server)
        return RequestDone(message.request)

    def _kill(self, number: int) -> None:
        relay = self._relays.pop(number, None)
        if relay is None:
            self._killed.add(number)
        else:
            self._begin(relay.end())

    def _hold(self, message: HoldMemory) -> None:
        fd = new_memfd("context")
        end = FileEnd(self.link, message.request, os.dup(fd), message.size_bytes)

        async def held() -> RequestDone:
            try:
                if (error := await end.filled) is not None:
                    raise error
                if os.fstat(fd).st_size != message.size_bytes:
                    raise SandboxFailed("a context did not come whole")
                fcntl(fd, F_ADD_SEALS, SEALS)
            except BaseException:
                os.close(fd)
                raise
            self._memory[message.key] = fd
            return RequestDone(message.request)

        self._answered(message.request, held())


class Relay:
    """Passes on what crosses between an init of this node and the orchestrator.

    Args:
        link: Link to the orchestrator.
        number: Number of the worker.
        worker: The worker.
        server: Fork server that has forked it.
    """

    def __init__(self, link: Link, number: int, worker: Worker, server: Forker) -> None:
        self._link = link
        self._number = number
        self._worker = worker
        self._server = server
        self._opening: tuple[int, ToInit] | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        worker.init.listener = self

    def say(self, said: Say, memory: dict[str, int]) -> None:
        """Pass a packet on to init, with what travels beside it.

        Raises:
            ProtocolViolation: Something that has to travel beside it does not.
        """
        message = unpack_to_init(said.packet)
        with contextlib.ExitStack() as ours:
            fds: list[int] = []
            match message:
                case Load() | Hand() if said.key:
                    if said.key not in memory:  # it was dropped since: init cannot go on
                        self._fail("load", "the node does not hold its context any more")
                        return
                    fds = [memory[said.key]]
                case Start():
                    one, other = socket.socketpair()
                    ours.callback(other.close)
                    fds = [other.fileno()]
                    DescriptorEnd(self._link, said.streams[0], one.detach())
                case RunProgram():
                    fds = self._pipes(said, ours)
                case OpenToRead() | OpenToWrite():
                    self._opening = (said.streams[0], message)
            self._worker.init.say(message, *fds)

    def _pipes(self, said: Say, ours: contextlib.ExitStack) -> list[int]:
        """Return the memfd and the descriptors 0, 1 and 2 of a program. Our ends are those of streams."""
        if len(said.streams) != 3:
            raise ProtocolViolation("a program has three streams")
        fds = [new_memfd("program")]
        ours.callback(os.close, fds[0])
        os.write(fds[0], said.data)
        for place, number in enumerate(said.streams):
            ends = os.pipe()
            theirs, own = ends if place == 0 else ends[::-1]
            ours.callback(os.close, theirs)
            fds.append(theirs)
            DescriptorEnd(self._link, number, own, reads=place > 0, writes=place == 0)
        return fds

    async def end(self) -> None:
        """End the worker."""
        try:
            await self._server.end(self._worker)
        finally:
            self._link.post(Gone(self._number))

    # -- what init says ----------------------------------------------------------------------------------------------

    def heard(self, message: FromInit, fds: list[int]) -> None:
        """Pass a message of init on. The content of a file that it has opened is a stream."""
        size_bytes = 0
        if isinstance(message, Opened) and fds:
            message, size_bytes = Opened(), os.fstat(fds[0]).st_size
        self._link.post(Heard(self._number, pack(message), size_bytes))
        if isinstance(message, Opened) and fds:
            self._opened(fds[0], size_bytes)

    def _opened(self, fd: int, size_bytes: int) -> None:
        if self._opening is None:
            os.close(fd)
            return
        (number, request), self._opening = self._opening, None
        if isinstance(request, OpenToWrite):
            end = FileEnd(self._link, number, fd, request.size_bytes)
            self._begin(self._stored(number, end))
        else:
            self._begin(send_file(self._link, number, fd, size_bytes))

    async def _stored(self, number: int, end: FileEnd) -> None:
        error = await end.filled
        if error is None:
            self._link.post(RequestDone(number))
        else:
            self._link.post(refusal(number, FileRefused(f"cannot be copied: {error.strerror}")))

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def unheard(self, error: OSError | None) -> None:
        """Say that a descriptor from init was cut off. Its end has a message of its own."""
        if error is not None:
            self._fail("speak", f"a descriptor cannot be taken: {error.strerror}")

    def ended(self, why: str | None) -> None:  # noqa: ARG002 - of `InitListener`
        """Say that the worker has ended."""
        self._link.post(Gone(self._number))

    def _fail(self, step: Any, reason: str) -> None:
        self._link.post(Heard(self._number, pack(Failed(step=step, reason=reason))))


def refusal(request: int, error: Exception) -> RequestRefused:
    """Return the answer to a request that met an error."""
    kinds = [kind for cls, kind in KINDS if isinstance(error, cls)]
    return RequestRefused(request, kinds[0] if kinds else "sandbox", str(error)[:MAX_REASON_CHARS])


async def serve_until_eof(order: AgentOrder, stdin: int) -> str:
    """Be the agent of this node until the link is lost or standard input ends. Returns why."""
    loop = asyncio.get_running_loop()
    serving = loop.create_task(Agent(order).serve())

    def read() -> None:
        if not os.read(stdin, 1 << 12):
            loop.remove_reader(stdin)
            exit_after(END_S)
            serving.cancel()

    loop.add_reader(stdin, read)
    try:
        return await serving
    except asyncio.CancelledError:
        return "its standard input has ended"


def exit_after(seconds: float) -> None:
    """End the process after a time, whatever its event loop is doing. What it started ends with it."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """Take the order, and be the agent."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentOrder)
    try:
        why = asyncio.run(serve_until_eof(order, sys.stdin.fileno()))
    except RlmBrokerError as error:
        why = str(error)
    sys.exit(f"rlm-broker: {why}")


if __name__ == "__main__":
    main()
