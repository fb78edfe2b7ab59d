"""A fork server over its whole life: its zygote, replaced when it dies, and the workers it forked."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from rlm_broker.concurrency.deadline import to_its_end, unlisted
from rlm_broker.errors import IsolationUnavailable, RlmBrokerError, SandboxFailed, refused_by_machine
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.cgroups import GROUP_REMEDY, MemoryGroup, MemoryGroups
from rlm_broker.sandbox.workers.private_folder import removed
from rlm_broker.sandbox.workers.python_paths import Venv, installed
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation, Zygote, ZygoteGone, raise_descriptor_limit
from sandbox_worker.wire.control import ZygoteReady
from sandbox_worker.wire.level import Level

GROUP_TRIES, GROUP_PAUSE_S = 100, 0.01
"""Attempts to remove a control group, and seconds between them. Beyond them it is reported as left behind."""
TRIES = 3
"""Attempts to start a REPL while its fork server or worker dies. Beyond them the caller gets the error."""
PREPARED_TRIES = 2
"""Attempts to start a zygote with a preparation. Fewer than `TRIES`: it may have been killed for taking all memory."""


class Forker(Protocol):
    """A source of forked workers: a `ForkServer`, or the nodes of a cluster, each with one.

    Attributes:
        level: Isolation level.
        layers: Layers of all workers.
        allow_exec: Whether code may start programs.
        memory_bytes: Memory it takes.
    """

    level: Level
    layers: tuple[str, ...]
    allow_exec: bool
    memory_bytes: int

    def counts(self) -> tuple[int, int]:
        """Return how many workers live and how many were forked."""

    def importable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of these modules code in the workers can import."""

    async def prepared(self, preparation: Preparation) -> "Forker":
        """Return another one of the same level, with a preparation. It ends with this one at the latest."""

    async def spawn(self, limits: ReplLimits) -> Worker:
        """Fork a worker. It is not isolated before `Worker.launch` has returned. `end` ends it."""

    async def end(self, worker: Worker) -> None:
        """End a worker and what it leaves. Has no effect when repeated."""

    async def close(self) -> None:
        """End all workers for good; return when they have ended. Has no effect when repeated."""


class ForkServer:
    """One zygote and the workers it forked. The object that made it, or had it `prepared`, closes it.

    When the zygote dies, its workers die with it. The next `spawn` starts a new zygote.

    Args:
        exact_memory: Whether a control group limits each worker's memory.
        preparation: Imports, set-up code and context of the zygote.
        seed: Seed of the hashes of all workers; None draws one.
        venv: Environment of the workers; None for the orchestrator's packages.

    Attributes: As of a `Forker`. `layers` is empty before the start, `memory_bytes` that of the zygote when it was
    ready.
    """

    def __init__(
        self,
        level: Level,
        allow_exec: bool,
        exact_memory: bool = False,
        preparation: Preparation | None = None,
        seed: int | None = None,
        venv: Venv | None = None,
    ) -> None:
        self.level = level
        self.layers: tuple[str, ...] = ()
        self.memory_bytes = 0
        self._preparation = preparation or Preparation()
        self.allow_exec = allow_exec
        self._exact_memory = exact_memory
        self._seed = seed
        self._venv = venv
        self._zygote: Zygote | None = None
        self._groups: MemoryGroups | None = None
        self._one_at_a_time = asyncio.Lock()
        self._workers: set[Worker] = set()
        self._forked = 0
        self._left_behind: list[str] = []
        self._closed = False
        self._others: list[ForkServer] = []

    def counts(self) -> tuple[int, int]:
        """Return how many workers live and how many were forked, by this fork server and those that it prepared."""
        others = [other.counts() for other in self._others]
        alive = len(self._workers) + sum(count for count, _ in others)
        return alive, self._forked + sum(count for _, count in others)

    def importable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of these modules code in the workers can import."""
        return installed(names, self._venv)

    async def prepared(self, preparation: Preparation) -> "ForkServer":
        """Start another fork server of the same level, with a preparation. It ends with this one at the latest.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: It cannot be started. All of it has ended.
        """
        self._require_open()
        other = ForkServer(self.level, self.allow_exec, self._exact_memory, preparation, self._seed, self._venv)
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
            raise_descriptor_limit()
            try:
                self._zygote, ready = await self._new_zygote()
            except OSError as error:
                raise refused_by_machine("the sandbox's fork server cannot be started", error) from None
            self.layers, self.memory_bytes = tuple(ready.layers), ready.memory_bytes
            if self._exact_memory and self._groups is None:
                self._groups = MemoryGroups.find()
                if self._groups is None:
                    raise IsolationUnavailable(
                        f"exact_memory needs a control group for memory that this process may write to: "
                        f"{GROUP_REMEDY}; without it memory is watched instead"
                    )

    async def spawn(self, limits: ReplLimits) -> Worker:
        """Fork a worker. It is not isolated before `Worker.launch` has returned. `end` ends it."""
        forking = asyncio.get_running_loop().create_task(self._fork(limits))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            # The zygote's answer is awaited also now: the next request would take it for its own answer.
            await to_its_end(partial(self._end_forked, forking))
            raise

    async def end(self, worker: Worker) -> None:
        """Kill a worker, and remove its folder and its control group. Has no effect when repeated."""
        await worker.kill()
        self._workers.discard(worker)
        if worker.scratch and not await removed(Path(worker.scratch)):
            self._left_behind.append(worker.scratch)
        if worker.group is not None and not await _removed_group(worker.group):
            self._left_behind.append(str(worker.group.folder))

    async def close(self) -> None:
        """End all workers and the zygote for good; return when they have ended. Has no effect when repeated. Raise
        SandboxFailed with the folders and groups that could not be removed; all processes have ended then, too."""
        self._closed = True
        await asyncio.gather(*(unlisted(other.close()) for other in self._others))
        async with self._one_at_a_time:  # waits for a worker being forked, and so ends it, too
            await asyncio.gather(*(unlisted(self.end(worker)) for worker in list(self._workers)))
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

    async def _new_zygote(self) -> tuple[Zygote, ZygoteReady]:
        """Start a zygote. If it is killed meanwhile, try again with another one."""
        tries = TRIES if self._preparation == Preparation() else PREPARED_TRIES
        while True:
            zygote = Zygote(self.level, self.allow_exec, self._preparation, self._seed, self._venv)
            try:
                ready = await zygote.start()
                self._require_open()  # checked again: a `close` meanwhile did not know of this zygote
                return zygote, ready
            except BaseException as error:
                await to_its_end(zygote.end)  # also when cancelled: no other object knows of this zygote
                tries -= 1
                if not isinstance(error, ZygoteGone) or not tries:
                    raise

    async def _end_zygote(self, zygote: Zygote) -> None:
        self._zygote = None
        if not await zygote.end():
            self._left_behind.append(str(zygote.folder.path))

    async def _fork(self, limits: ReplLimits) -> Worker:
        """Fork a worker. If the zygote dies meanwhile, ask the next zygote, up to `TRIES` in all."""
        tries = TRIES
        async with self._one_at_a_time:
            while True:
                try:
                    await self.start()  # the zygote may have died since the last worker
                    assert self._zygote is not None
                    worker = await self._zygote.spawn(limits, self._new_group(limits))
                except ZygoteGone:
                    tries -= 1
                    if not tries:
                        raise
                else:
                    self._workers.add(worker)
                    self._forked += 1
                    return worker

    def _new_group(self, limits: ReplLimits) -> MemoryGroup | None:
        """Make a worker's control group, if memory is exact.

        Init's watch catches slow growth, and adds a post-mortem; the group catches growth between two looks. The kernel
        counts the scratch folder (a tmpfs) as memory, too.
        """
        return self._groups.make(limits.memory_bytes + limits.scratch_bytes) if self._groups else None

    async def _end_forked(self, forking: "asyncio.Task[Worker]") -> None:
        with contextlib.suppress(RlmBrokerError):
            await self.end(await forking)


async def _removed_group(group: MemoryGroup) -> bool:
    """Remove a group, and return whether it is gone. The kernel holds it for a moment after its last process."""
    for _ in range(GROUP_TRIES):
        if group.remove():
            return True
        await asyncio.sleep(GROUP_PAUSE_S)
    return False
