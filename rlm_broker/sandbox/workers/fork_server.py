"""The fork server as the orchestrator has it: started, asked for workers, and ended with all of them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.store import StoredContext
from rlm_broker.errors import ConfigurationError, IsolationUnavailable, RlmBrokerError, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.levels.level import unavailable
from rlm_broker.sandbox.workers import refusals, zygote_process
from rlm_broker.sandbox.workers.cgroups import GROUP_REMEDY, MemoryGroup, MemoryGroups
from rlm_broker.sandbox.workers.private_folder import PrivateFolder, removed
from rlm_broker.sandbox.workers.python_paths import python_paths, readable
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Configure,
    FromZygote,
    NotPrepared,
    Spawn,
    Spawned,
    SpawnFailed,
    ZygoteFailed,
    ZygoteReady,
    pack,
    unpack_from_zygote,
)
from sandbox_worker.wire.level import Level

ZYGOTE_START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
"""Longest wait for a fork server to end by itself after its socket has closed. Beyond it the fork server is killed."""
GROUP_TRIES, GROUP_PAUSE_S = 100, 0.01
TRIES = 3  # attempts where a fork server or a worker dies while a REPL starts; then the caller gets the error
T = TypeVar("T")


@dataclass(frozen=True)
class Preparation:
    """What a zygote gets ready for all of its workers, once: modules to import, and the following.

    Attributes:
        setup: Code of the user's; every REPL finds its variables.
        context: Every REPL finds it; it has to stay open, since a zygote that dies is replaced.
        timeout_s: For all of it.
    """

    imports: tuple[str, ...] = ()
    setup: str = ""
    context: StoredContext | None = None
    timeout_s: float = ZYGOTE_START_TIMEOUT_S


class ForkServer:
    """One zygote and the workers that it forked.

    When the zygote dies, so do its workers; the next `spawn` starts a new one.

    Attributes:
        layers: The layers that all workers share, once started.
        memory_bytes: What the zygote had when it was ready.
    """

    def __init__(
        self,
        level: Level,
        allow_exec: bool,
        exact_memory: bool = False,
        preparation: Preparation | None = None,
        seed: int | None = None,
    ) -> None:
        self.level = level
        self.layers: tuple[str, ...] = ()
        self.memory_bytes = 0
        self._preparation = preparation or Preparation()
        self._allow_exec = allow_exec
        self._exact_memory = exact_memory
        self._seed = seed
        self._zygote: _Zygote | None = None
        self._groups: MemoryGroups | None = None
        self._one_at_a_time = asyncio.Lock()
        self._workers: set[Worker] = set()
        self._left_behind: list[str] = []
        self._closed = False
        self._others: list[ForkServer] = []

    async def prepared(self, preparation: Preparation) -> "ForkServer":
        """Another one of the same level, started, with its own zygote that has something ready; it ends with this one.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: It cannot be started. Nothing of it is left.
        """
        self._require_open()
        other = ForkServer(self.level, self._allow_exec, self._exact_memory, preparation, self._seed)
        self._others = [*(each for each in self._others if not each._closed), other]
        try:
            await other.start()
        except BaseException:
            await to_its_end(other.close)
            raise
        return other

    async def start(self) -> None:
        """Start the zygote, unless it lives.

        Raises:
            IsolationUnavailable: This machine cannot give the level.
            SandboxFailed: The zygote cannot start, for any other reason.
        """
        self._require_open()
        if self._zygote is not None and not self._zygote.is_usable():
            await self._end_zygote(self._zygote)
        if self._zygote is None:
            zygote_process.raise_descriptor_limit()
            tries = TRIES if self._preparation == Preparation() else 2  # which may be what took all memory
            try:
                self._zygote, ready = await _tried(self._new_zygote, tries)
            except OSError as error:
                raise refusals.cannot_start(error) from None
            self.layers, self.memory_bytes = tuple(ready.layers), ready.memory_bytes
            if self._exact_memory and self._groups is None:
                self._groups = MemoryGroups.find()
                if self._groups is None:
                    raise IsolationUnavailable(
                        f"exact_memory needs a control group for memory that this process may write to: "
                        f"{GROUP_REMEDY}; without it memory is watched instead"
                    )

    async def _new_zygote(self) -> "tuple[_Zygote, ZygoteReady]":
        zygote = _Zygote(self.level, self._preparation, self._seed)
        try:
            ready = await zygote.start()
            self._require_open()  # still: `close` did not know of it
        except BaseException:
            await to_its_end(zygote.end)  # also when it is cancelled meanwhile: nothing else knows of it
            raise
        return zygote, ready

    async def spawn(self, limits: Limits) -> Worker:
        """A new worker, which is not isolated yet: `Worker.launch` waits for that."""
        spawning = asyncio.get_running_loop().create_task(self._spawn(limits))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # The zygote's answer is taken in any case: it would else be taken for the answer to the next request.
            with contextlib.suppress(RlmBrokerError):
                await self.end(await spawning)
            raise

    async def end(self, worker: Worker) -> None:
        """Kill a worker; return when it is gone."""
        await worker.kill()
        self._workers.discard(worker)
        if worker.scratch and not await removed(Path(worker.scratch)):
            self._left_behind.append(worker.scratch)
        if worker.group is not None and not await _removed_group(worker.group):
            self._left_behind.append(str(worker.group.folder))

    async def close(self) -> None:
        """End every worker and the zygote, for good; return when all are gone. Harmless when repeated.

        Raises:
            SandboxFailed: Something could not be removed, and is named. All the rest is gone.
        """
        self._closed = True
        await asyncio.gather(*(other.close() for other in self._others))
        async with self._one_at_a_time:  # a worker that is being forked is one of them
            await asyncio.gather(*map(self.end, list(self._workers)))
            if self._zygote is not None:
                await self._end_zygote(self._zygote)
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if left := [path for path in self._left_behind if Path(path).exists()]:
            self._left_behind.clear()
            raise SandboxFailed(f"the sandbox has ended, but could not remove: {', '.join(left)}")

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the sandbox was closed")

    async def _end_zygote(self, zygote: "_Zygote") -> None:
        self._zygote = None
        if not await zygote.end():
            self._left_behind.append(str(zygote.folder.path))

    async def _spawn(self, limits: Limits) -> Worker:
        async def forked() -> Worker:
            await self.start()
            return await self._fork(limits)

        async with self._one_at_a_time:
            worker = await _tried(forked, TRIES)  # it may have died without our having heard of it
            self._workers.add(worker)
        return worker

    async def _fork(self, limits: Limits) -> Worker:
        assert self._zygote is not None
        scratch = self._zygote.make_scratch()
        request = Spawn(allow_exec=self._allow_exec, scratch=refusals.utf8(scratch), bounds=limits.repl_bounds())
        # The watch of init stops what grows slowly, with a post-mortem; the group what is faster than that. To the
        # kernel the scratch folder is memory, too.
        group = self._groups.make(limits.memory_bytes + limits.scratch_bytes) if self._groups else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                fds = [theirs.fileno(), *([group.join_fd] if group else [])]
                pidfd = await self._zygote.spawn(request, fds, limits.start_timeout_s)
            except BaseException:
                ours.close()
                if group is not None:
                    group.remove()
                raise
        return Worker(self.level, pidfd, ours, scratch, group)


async def _tried(work: Callable[[], Coroutine[Any, Any, T]], tries: int) -> T:
    """Await what `work` makes; where the fork server dies meanwhile, again, `tries` times in all."""
    while True:
        try:
            return await work()
        except _ZygoteGone:
            if not (tries := tries - 1):
                raise


async def _removed_group(group: MemoryGroup) -> bool:
    """Remove a group, of which the kernel lets go a moment after its last process."""
    for _ in range(GROUP_TRIES):
        if group.remove():
            return True
        await asyncio.sleep(GROUP_PAUSE_S)
    return False


class _ZygoteGone(SandboxFailed):
    """The zygote was killed or stopped before it answered."""


class _Zygote:
    """The process, its control socket, and its folder on the host."""

    def __init__(self, level: Level, preparation: Preparation, seed: int | None) -> None:
        self._level = level
        self._seed = seed
        self._preparation = preparation
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._usable = True
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            self.folder = PrivateFolder()
        except BaseException:
            self._control.close()
            self._theirs.close()
            raise

    async def start(self) -> ZygoteReady:
        """Start it; what it says of itself."""
        (root := self.folder.path / "root").mkdir()
        paths = python_paths()
        self._process, self._pidfd = zygote_process.start(self._theirs.fileno(), paths, self._seed)
        self._theirs.close()
        context = self._preparation.context
        configure = Configure(
            level=self._level.name,
            new_root=refusals.utf8(root),
            readable=[refusals.utf8(path) for path in readable(paths)],
            hidden=[refusals.utf8(Path(path) / "litellm") for path in paths],
            preload=list(self._preparation.imports),
            setup=self._preparation.setup,
            form=None if context is None else context.info.form,
            seed=self._seed,
        )
        try:
            socket.send_fds(self._control, [pack(configure)], [] if context is None else [context.fd])
            answer, _ = await self._answer(self._preparation.timeout_s)
        except _ZygoteGone as error:
            raise SandboxFailed(str(error)) from None  # a minute is enough: it is not tried again
        except (OSError, EOFError):
            with contextlib.suppress(TimeoutError):  # its socket closes before it has an exit status
                await asyncio.wait_for(self._gone(), END_TIMEOUT_S)
            why = refusals.ended(self._level, self._process)
            if self._process.poll() == -signal.SIGKILL:  # not by a system call filter, which kills with SIGSYS
                raise _ZygoteGone(str(why)) from None
            raise why from None
        if isinstance(answer, NotPrepared):
            raise ConfigurationError(f"a template cannot be made: its {answer.step} failed: {answer.reason}")
        if isinstance(answer, ZygoteFailed):
            raise unavailable(self._level, answer.layer, answer.reason, answer.code)
        if not isinstance(answer, ZygoteReady):
            raise SandboxFailed("the sandbox's fork server answered out of turn")
        if self._level.has_own_root:
            self.folder.remove()  # the root is mounted in the zygote's own namespace only
        return answer

    async def spawn(self, request: Spawn, fds: list[int], timeout_s: float) -> int:
        """The pidfd of a new worker's init.

        Args:
            fds: Init's end of its control socket, and the way into the worker's control group if there is one.
        """
        try:
            socket.send_fds(self._control, [pack(request)], fds)
            answer, answer_fds = await self._answer(timeout_s)
        except (OSError, EOFError):
            self._usable = False
            assert self._process is not None
            raise _ZygoteGone(f"the sandbox's fork server is gone: {zygote_process.why_ended(self._process)}") from None
        if isinstance(answer, SpawnFailed):
            raise SandboxFailed(f"no worker could be forked: {answer.reason}")
        if not isinstance(answer, Spawned) or len(answer_fds) != 1:
            raise SandboxFailed("the sandbox's fork server answered out of turn")
        return answer_fds[0]

    def make_scratch(self) -> str:
        """A worker's scratch folder on the host, at a level without a root of its own; else nothing."""
        if self._level.has_own_root:
            return ""
        try:
            return tempfile.mkdtemp(prefix="scratch-", dir=self.folder.path)
        except OSError as error:
            raise SandboxFailed(f"no scratch folder can be made: {error.strerror}: {self.folder.path}") from None

    def is_usable(self) -> bool:
        """Whether it lives, as far as is known, and has answered everything that it was asked."""
        return self._usable and self._process is not None and self._process.poll() is None

    async def end(self) -> bool:
        """Hang up, which is its end and that of all workers; return when its processes are gone.

        Returns:
            Whether its folder is gone, too.
        """
        self._control.close()
        self._theirs.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._gone(), END_TIMEOUT_S if self._usable else 0)
            except TimeoutError:
                # PermissionError: it is another user's, and root lacks CAP_KILL.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                await self._gone()
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
            os.close(self._pidfd)
            self._process = None
        return self.folder.remove()

    async def _gone(self) -> None:
        """Wait until its first process has ended."""
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self._pidfd)

    async def _answer(self, timeout_s: float) -> tuple[FromZygote, list[int]]:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        control_fd = self._control.fileno()
        loop.add_reader(control_fd, readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await readable.wait()
        except TimeoutError:
            self._usable = False  # its answer may still come, and would be taken for the next one's
            raise _ZygoteGone(f"the sandbox's fork server did not answer within {timeout_s:g} s") from None
        finally:
            loop.remove_reader(control_fd)
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            raise EOFError
        return unpack_from_zygote(packet), list(fds)
