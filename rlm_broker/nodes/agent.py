"""The agent of a node: it forks workers, and passes on what crosses between their inits and the orchestrator.

    python -m rlm_broker.nodes.agent < ORDER

Theory of operation. The order is one line of standard input, so that the token is in no command line, environment or
file. The agent joins, opens a sandbox of the kind it is asked for, and does what the orchestrator does on one machine:
it forks workers, and hands over what travels beside a control message. A connection or a pipe is one end of a stream; a
context is a memfd it holds. What init says is passed on, and judged by the orchestrator alone.

All that was started ends with the link, and the agent with it; also when standard input ends, which its parent holds. A
killed agent needs no code for that: the kernel closes the control sockets of its fork servers.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Coroutine
from fcntl import F_ADD_SEALS, fcntl
from typing import Any

import msgspec
import psutil

from rlm_broker import errors
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.memfd import new_memfd
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import SandboxFailed, WorkerDied
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes import messages
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.port import client_context, require_pinned
from rlm_broker.nodes.streams import DescriptorEnd, FileEnd, send_file
from rlm_broker.results import ContextInfo
from rlm_broker.sandbox.sandbox import Sandbox, forker_of
from rlm_broker.sandbox.workers.cgroups import memory_bytes
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation
from sandbox_worker import RELEASE
from sandbox_worker.loading.form import SEALS
from sandbox_worker.wire import control
from sandbox_worker.wire.frames import encode_frame

MODULE = "rlm_broker.nodes.agent"
REPLS_PER_CPU = 16
"""REPLs at the same time for each CPU: most REPLs wait for a model."""
RESERVE_SHARE, LEAST_RESERVE_BYTES = 0.05, 256 << 20
"""Share of the node's memory to stay free, and bytes of it at least. With less, the node gives no further REPL."""
JOIN_S = 30.0
"""Seconds to reach the orchestrator."""
END_S = 5.0
"""Seconds to end all workers. Beyond, the process exits, and they end with it."""


class AgentOrder(msgspec.Struct, frozen=True):
    """Order to an agent: what it needs to join.

    Attributes:
        host, port: Address of the orchestrator's port for agents.
        fingerprint: Pinned certificate; None for plain text.
        token: One-time token.
        places: REPLs at the same time; None: `REPLS_PER_CPU` for each CPU of the process.
    """

    host: str
    port: int
    fingerprint: str | None
    token: str
    places: int | None = None


class Agent:
    """Does what the orchestrator says, as long as the link lasts.

    Attributes:
        link: Link to the orchestrator.
        memory: Key of a held memfd → its descriptor.
    """

    def __init__(self, order: AgentOrder) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        decoder = messages.from_orchestrator
        self.link = Link(decoder, self._take, lambda _: self._ended.set(), self._beat, is_patient=True)
        self._sandbox: Sandbox | None = None
        self._servers: dict[int, Forker] = {}
        self._relays: dict[int, Relay] = {}
        self._beginning: dict[int, asyncio.Task[None]] = {}
        """Number of a worker or a fork server → the task of its start."""
        self.memory: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> str:
        """Join, serve until the link is lost, end all workers, and return why it was lost.

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
        host, port, pinned = self._order.host, self._order.port, self._order.fingerprint
        tls = None if pinned is None else client_context()
        try:
            async with asyncio.timeout(JOIN_S):
                transport, _ = await self._loop.create_connection(asyncio.Protocol, host, port, ssl=tls)
        except OSError as error:
            raise SandboxFailed(f"{host}:{port} cannot be reached: {error}") from None
        if pinned is not None:
            require_pinned(transport, pinned)
        join = messages.encoded(messages.Join(self._order.token, messages.PROTOCOL, RELEASE))
        transport.write(encode_frame(join, messages.MAX_JOIN_BYTES))
        transport.set_protocol(self.link)
        self.link.connection_made(transport)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sandbox is not None:
            with contextlib.suppress(SandboxFailed):  # a folder could not be removed
                await self._sandbox.aclose()

    def _beat(self) -> messages.Beat:
        reserve = max(LEAST_RESERVE_BYTES, int(memory_bytes() * RESERVE_SHARE))
        return messages.Beat(psutil.virtual_memory().available > reserve)

    # -- what the orchestrator says ----------------------------------------------------------------------------------

    def _take(self, message: messages.FromOrchestrator) -> None:
        match message:
            case messages.Say() if (relay := self._relays.get(message.worker)) is not None:
                relay.say(message)
            case messages.Fork():
                self._answer(message.request, self._fork(message), begins=message.worker)
            case messages.Kill():
                self.begin(self._kill(message.worker))
            case messages.HoldMemory():
                self._begin_to_hold(message)
            case messages.DropMemory() if (fd := self.memory.pop(message.key, -1)) >= 0:
                os.close(fd)
            case messages.OpenNode():
                self._answer(message.request, self._open(message))
            case messages.Prepare():
                self._answer(message.request, self._prepare(message), begins=message.server)
            case messages.EndServer():
                self._end_server(message.server)

    def _end_server(self, number: int) -> None:
        if (server := self._servers.pop(number, None)) is not None:
            self.begin(server.close())
        elif (preparing := self._beginning.get(number)) is not None:
            preparing.cancel()

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin work that is cancelled with the agent."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answer(self, request: int, work: Any, *, begins: int = 0) -> None:
        """Do the work of a request, and answer it, also if the work is cancelled."""

        async def answered() -> None:
            try:
                answer = await work
            except (errors.RlmBrokerError, OSError) as error:
                answer = refusal(request, error)
            except asyncio.CancelledError:
                self.link.post(refusal(request, SandboxFailed("it was ended before it was ready")))
                raise
            self.link.post(answer)

        task = self.begin(answered())
        if begins:
            self._beginning[begins] = task
            task.add_done_callback(lambda _: self._beginning.pop(begins, None))

    async def _open(self, asked: messages.OpenNode) -> messages.NodeOpened:
        if self._sandbox is not None:
            await self._sandbox.aclose()
        kind: dict[str, Any] = {"seed": asked.seed, "python": asked.python, "packages": asked.packages}
        self._sandbox = Sandbox(isolation=asked.isolation, allow_exec=asked.allow_exec, warm=0, **kind)
        await self._sandbox.__aenter__()
        server = self._servers[0] = forker_of(self._sandbox)
        places, cpus = self._order.places, len(os.sched_getaffinity(0))
        layers: Any = list(server.layers)
        return messages.NodeOpened(
            asked.request,
            server.level.name,
            layers,
            server.allow_exec,
            REPLS_PER_CPU * cpus if places is None else places,
            cpus,
            memory_bytes(),
            list(server.importable(asked.names)),
        )

    async def _prepare(self, asked: messages.Prepare) -> messages.RequestDone:
        context = None
        if asked.pieces is not None:
            held = [os.dup(self.memory[key]) for key in asked.keys]
            context = StoredContext(zip(held, asked.pieces, strict=True), ContextInfo("", 0))
        preparation = Preparation(asked.imports, asked.setup, context, asked.timeout_s)
        server = self._servers[asked.server] = await self._servers[0].prepared(preparation)
        return messages.RequestDone(asked.request, server.memory_bytes)

    async def _fork(self, asked: messages.Fork) -> messages.RequestDone:
        server = self._servers.get(asked.server)
        if server is None:
            raise SandboxFailed("its fork server has ended")
        worker = await server.spawn(ReplLimits(**asked.limits))
        self._relays[asked.worker] = Relay(self, asked.worker, worker, server)
        return messages.RequestDone(asked.request)

    async def _kill(self, number: int) -> None:
        """End a worker, as soon as it is forked."""
        if (forking := self._beginning.get(number)) is not None:
            await asyncio.wait({forking})
        if (relay := self._relays.pop(number, None)) is not None:
            await relay.end()

    def _begin_to_hold(self, asked: messages.HoldMemory) -> None:
        try:
            fd = new_memfd("context")
            end = FileEnd(self.link, asked.request, os.dup(fd), asked.size_bytes)
        except OSError as error:  # what comes on the stream is dropped
            self.link.post(refusal(asked.request, error))
        else:
            self._answer(asked.request, self._hold(asked, fd, end))

    async def _hold(self, asked: messages.HoldMemory, fd: int, end: FileEnd) -> messages.RequestDone:
        try:
            if (error := await end.filled) is not None:
                raise error
            if os.fstat(fd).st_size != asked.size_bytes:
                raise SandboxFailed("a context did not come whole")
            fcntl(fd, F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        self.memory[asked.key] = fd
        return messages.RequestDone(asked.request)


class Relay:
    """Passes on what crosses between an init of this node and the orchestrator.

    Args:
        agent: The agent.
        number: Number of the worker.
        worker: The worker.
        server: Its fork server.
    """

    def __init__(self, agent: Agent, number: int, worker: Worker, server: Forker) -> None:
        self._agent = agent
        self._link = agent.link
        self._number = number
        self._worker = worker
        self._server = server
        self._opening: tuple[int, control.OpenToRead | control.OpenToWrite] | None = None
        worker.init.listener = self

    def say(self, said: messages.Say) -> None:
        """Pass a packet on to init, with its descriptors."""
        message = control.unpack_to_init(said.packet)
        try:
            self._say(said, message)
        except (OSError, WorkerDied) as error:  # the other workers of the node go on
            for number in set(said.streams).difference(self._link.streams):  # those without an end here
                self._link.send(number, b"")
            why = f"it cannot be reached: {getattr(error, 'strerror', None) or error}"
            if isinstance(message, control.RunProgram):
                self.heard(control.ProgramEnded(message.number, not_started=why), [])
            else:
                self._failed("speak", why)

    def _say(self, said: messages.Say, message: control.ToInit) -> None:
        with contextlib.ExitStack() as theirs:
            fds: list[int] = []
            match message:
                case control.Load() | control.Hand() if said.key:
                    if said.key not in self._agent.memory:
                        self._failed("load", "the node does not hold its context any more")
                        return
                    fds = [self._agent.memory[said.key]]
                case control.Load() | control.Hand() if said.data:
                    fds = [self._memfd(said.data, theirs)]
                    fcntl(fds[0], F_ADD_SEALS, SEALS)
                case control.Start() | control.Resume():
                    own, other = socket.socketpair()
                    theirs.callback(other.close)
                    fds = [other.fileno()]
                    DescriptorEnd(self._link, said.streams[0], own.detach())
                case control.RunProgram():
                    fds = self._beside_a_program(said, theirs)
                case control.OpenToRead() | control.OpenToWrite():
                    self._opening = (said.streams[0], message)
            self._worker.init.say(message, *fds)

    def _beside_a_program(self, said: messages.Say, theirs: contextlib.ExitStack) -> list[int]:
        """Return the memfd and the descriptors 0, 1 and 2 of a program. Our ends are the ends of streams."""
        fds = [self._memfd(said.data, theirs)]
        for place, number in enumerate(said.streams):
            ends = os.pipe()
            other, own = ends if place == 0 else ends[::-1]
            theirs.callback(os.close, other)
            fds.append(other)
            DescriptorEnd(self._link, number, own)
        return fds

    def _memfd(self, data: bytes, theirs: contextlib.ExitStack) -> int:
        theirs.callback(os.close, fd := new_memfd("beside"))
        os.write(fd, data)
        return fd

    async def end(self) -> None:
        """End the worker."""
        try:
            await self._server.end(self._worker)
        finally:
            self._link.post(messages.Gone(self._number))

    # -- what init says ----------------------------------------------------------------------------------------------

    def heard(self, message: control.FromInit, fds: list[int]) -> None:
        """Pass a message of init on. The content of a file it has opened is a stream."""
        if not isinstance(message, control.Opened) or not fds or self._opening is None:
            self._link.post(messages.Heard(self._number, control.pack(message)))
            return
        (number, request), self._opening = self._opening, None
        size_bytes = os.fstat(fds[0]).st_size
        self._link.post(messages.Heard(self._number, control.pack(control.Opened()), size_bytes))
        if isinstance(request, control.OpenToRead):
            self._agent.begin(send_file(self._link, number, fds[0], size_bytes))
        else:
            self._agent.begin(self._stored(number, FileEnd(self._link, number, fds[0], request.size_bytes)))

    async def _stored(self, number: int, end: FileEnd) -> None:
        error = await end.filled
        why = "" if error is None else f"cannot be copied: {error.strerror}"
        self._link.post(refusal(number, errors.FileRefused(why)) if why else messages.RequestDone(number))

    def unheard(self, error: OSError | None) -> None:
        """Report that a descriptor from init was cut off. Its end has a message of its own."""
        if error is not None:
            self._failed("speak", f"a descriptor cannot be taken: {error.strerror}")

    def ended(self, why: str | None) -> None:  # noqa: ARG002 - of `InitListener`
        """Report the end of the worker."""
        self._link.post(messages.Gone(self._number))

    def _failed(self, step: control.InitStep, reason: str) -> None:
        self._link.post(messages.Heard(self._number, control.pack(control.Failed(step=step, reason=reason))))


def refusal(request: int, error: Exception) -> messages.RequestRefused:
    """Return the answer to a request after an error."""
    fitting = (kind for kind, cls in messages.ERRORS.items() if kind != "memory" and isinstance(error, cls))
    kind: messages.RefusalKind = "memory" if isinstance(error, OSError) else next(fitting, "sandbox")
    return messages.RequestRefused(request, kind, str(error)[: messages.MAX_REASON_CHARS])


async def serve_until_eof(order: AgentOrder, stdin: int) -> str:
    """Be the agent of this node until the link is lost or standard input ends. Return why."""
    loop = asyncio.get_running_loop()
    serving = loop.create_task(Agent(order).serve())

    def read() -> None:
        if not os.read(stdin, 1 << 12):
            loop.remove_reader(stdin)
            exiting = threading.Timer(END_S, os._exit, (1,))  # also beside a hanging event loop
            exiting.daemon = True
            exiting.start()
            serving.cancel()

    loop.add_reader(stdin, read)
    try:
        return await serving
    except asyncio.CancelledError:
        return "its standard input has ended"


def main() -> None:
    """Take the order, and be the agent."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentOrder)
    try:
        why = asyncio.run(serve_until_eof(order, sys.stdin.fileno()))
    except errors.RlmBrokerError as error:
        why = str(error)
    sys.exit(f"rlm-broker: {why}")


if __name__ == "__main__":
    main()
