"""Copies of a live REPL: one from which it goes back, and forks for tree search, best-of-N and rollouts.

`sandbox_worker/repl/checkpoint.py` and `sandbox_worker/init/hub.py` have the theory of operation.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Self

from rlm_broker.broker.transport.connection import Connection, QueryHandler, refuse
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ForkRefused, ReplBusy, ReplClosed, require_kind
from rlm_broker.events.observers import ReplState
from rlm_broker.sandbox.arguments import require_answer
from rlm_broker.sandbox.blocks.block import BlockRun
from rlm_broker.sandbox.blocks.block_result import BlockOutput
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.blocks.replay import Replays
from rlm_broker.sandbox.files import ReplFiles
from rlm_broker.sandbox.programs import ReplPrograms
from rlm_broker.sandbox.repl_process import ReplWorker
from rlm_broker.sandbox.supplies import SuppliedRepl
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.worker import NOT_FORKED
from sandbox_worker.wire.bounds import OutputBounds


class ForkableRepl(SuppliedRepl):
    """A REPL that can be forked, and can go back to its checkpoints. `SandboxedRepl` is the only one."""

    answer: QueryHandler
    _bounds: OutputBounds
    _fork_server: Forker
    _env: Mapping[str, str] | None

    def _opens(self) -> None:
        """Tell the observers that it opens."""
        raise NotImplementedError

    def _became(self, state: ReplState) -> None:
        """Tell the observers its state."""
        raise NotImplementedError

    def _use(self, worker: ReplWorker) -> None:
        """Run blocks in this worker from now on."""
        self._worker = worker
        # These know the worker and not this object, which has them: without cycles, no REPL waits for the collector.
        limits, record = self._limits, worker.recorder
        self._files = ReplFiles(self.bind_loop(), worker.beside_blocks, limits.scratch_bytes, record.file)
        self._contexts = QueryContexts(worker.beside_blocks, worker.context_named, limits.scratch_bytes)
        self._replays = Replays(worker, self._contexts, limits, self._files.put)
        self._programs = ReplPrograms(self._fork_server, worker, limits, self._env)
        self._run: BlockRun | None = None
        self._is_interrupted = False
        self._forks: list[Self] = []

    def fork(self, answer: QueryHandler | None = None, *, detached: bool = False) -> Self:
        """Return a second live REPL with the same variables. From then on, each is independent of the other.

        The fork is open: close it, or use it as a context manager. Memory is shared until one of the two writes to it.
        They share the scratch folder, the files and pipes that code has open, `memory_bytes` and `max_processes`, of
        which each fork takes two. They make no checkpoints. A killed one goes on in a worker of its own with an empty
        scratch folder, where its blocks run again, those before the fork included; see `ReplLimits.max_replay_s`.

        Example:
            ```python
            repl.execute("chosen = []")
            with repl.fork() as fork:
                fork.execute("chosen.append(1)")
                print(fork.get("chosen"), repl.get("chosen"))  # [1] []
            ```

        Args:
            answer: Answers the queries of the fork, as for `Sandbox.repl`; None takes this REPL's.
            detached: Whether the fork stays open when this REPL is closed.

        Raises:
            ConfigurationError: `answer` cannot be called.
            ForkRefused: It is not at isolation level "strict", or on a node; or code has left threads or processes
                running, or `max_processes` leaves no room. The message says which.
            ReplBusy: The REPL runs a block.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._fork(answer, detached))

    async def afork(self, answer: QueryHandler | None = None, *, detached: bool = False) -> Self:
        """Return a fork as `fork` does, awaited."""
        return await self.bind_loop().arun(self._fork(answer, detached))

    async def _fork(self, answer: QueryHandler | None, detached: bool) -> Self:
        answer = self.answer if answer is None else answer
        require_answer(answer)
        require_kind("detached", detached, bool)
        if self._worker.busy.locked():
            raise ReplBusy("this REPL runs a block: fork it when that has ended")
        async with self._worker.busy:
            await self._live_connection()
            forked: list[ReplWorker] = []

            async def make() -> None:
                forked.append(await self._worker.fork(self._become_hub))

            try:
                await to_its_end(make)
                if self._worker.is_closed:
                    raise ReplClosed("this REPL was closed while it was forked")
            except BaseException:
                for each in forked:
                    await to_its_end(each.close)
                raise
        fork = copy.copy(self)
        fork._turn = fork._opener = None
        fork._provisions, fork.answer = forked[0].provisions, answer
        fork._use(forked[0])
        fork._opens()
        fork._became("idle")
        if not detached:
            self._forks = [*(each for each in self._forks if not each._worker.is_closed), fork]
        return fork

    async def _become_hub(self) -> None:
        """Run the block without code, with which the REPL becomes a hub."""
        connection, limits = self._worker.connection, self._limits
        assert connection is not None
        self._worker.checkpoints.given_up()
        times = limits.block_timeout_s, limits.block_wall_timeout_s
        output = BlockOutput(self._bounds, None, None)
        run = BlockRun(self._worker.worker, connection, output, limits, refuse, *times, self._contexts)
        if await run.result("", Wanted(becomes_hub=True)) is None:
            await self._worker.end_repl()
            raise ForkRefused(f"{NOT_FORKED}: {run.killed_because or 'its processes are gone'}")

    def rollback(self, k: int = 1) -> int:
        """Go back to before one of the last blocks: all variables are as they were. Return the number of undone blocks.

        The REPL goes on from a checkpoint, see `ReplLimits.checkpoint` and `ReplLimits.keep_checkpoints`. Values given
        since are given again. Files stay as they are. Programs beside the code end.

        Example:
            ```python
            with sandbox.repl(limits=ReplLimits(checkpoint="each", keep_checkpoints=3)) as repl:
                for code in ("n = 1", "n = 2", "n = 3"):
                    repl.execute(code)
                print(repl.rollback(2), repl.get("n"))  # 2 1
            ```

        Args:
            k: Number of checkpoints to go back. With `checkpoint="each"` each block has one.

        Raises:
            ConfigurationError: There are not so many checkpoints. The REPL is as it was.
            ReplBusy: The REPL runs a block.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._roll_back(k))

    async def arollback(self, k: int = 1) -> int:
        """Go back to before one of the last blocks as `rollback` does, awaited."""
        return await self.bind_loop().arun(self._roll_back(k))

    async def _roll_back(self, k: int) -> int:
        if self._worker.busy.locked():
            raise ReplBusy("this REPL runs a block: roll it back once the block has ended")
        async with self._worker.busy:
            await self._live_connection()
            return await to_its_end(partial(self._worker.go_back, k))

    async def _live_connection(self) -> Connection:
        worker = self._worker
        if worker.is_open and (worker.connection is None or worker.is_behind):  # its last caller was cancelled
            await self._replays.restored(await to_its_end(worker.roll_back) if worker.connection is None else 1)
        return await worker.require_repl()
