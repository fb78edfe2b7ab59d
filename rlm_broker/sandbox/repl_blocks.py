"""The blocks of one REPL: each is run once, and again where its variables were lost.

After a loss the REPL goes on from its checkpoint, and runs the blocks since again. Without one, a fresh REPL runs all
blocks of the record. Nothing is paid or done twice in such a replay. Output goes nowhere, and queries, tools and waits
get the answers that they got before: each answer once, by the digest of what was asked. A block with another outcome
ends the replay.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from msgspec.structs import replace

from rlm_broker.broker.transport.connection import Connection, refuse
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ContextRefused, FileRefused, ForkRefused, ReplBusy, ReplClosed, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.blocks import block_result
from rlm_broker.sandbox.blocks.block import BlockRun
from rlm_broker.sandbox.blocks.block_result import BlockOutput, BlockSpec
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.blocks.record import (
    ANY_MODEL,
    Entry,
    Gap,
    Given,
    HostFile,
    RecordedBlock,
    Replayed,
    ReplRecord,
    keys_of,
    outcome_of,
)
from rlm_broker.sandbox.repl_process import ReplWorker
from rlm_broker.sandbox.workers.worker import NOT_FORKED
from rlm_broker.values.remembered import Remembered
from sandbox_worker.wire.control import ListedEntry
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import Query, Slot, Submit

BY_CALLER = "was interrupted by its caller"
TIMES = 3
"""Ratio of the seconds that a block may compute in a replay to those that it computed before."""
LEAST_S = 1.0
"""Seconds that each block may compute in a replay: a short one may have to wait for a busy machine."""
MOST_KILLS = 2
"""Kills in a row, with no block that ends between them, after which the blocks are run again."""
INTERRUPTED = "its caller interrupted the replay"
CUT_SHORT = "was interrupted when it ran again"
ENDED_WITH_IT = "it ended with the REPL that had started it"
"""Error of a child in the background that had not answered before its REPL was lost."""


class BlockAgain(BlockRun):
    """A block of a replay.

    Attributes:
        answers: Answers that the blocks up to this one got, as far as they are not taken.
        has_asked: Whether the block has asked what has no answer there. It is interrupted then.
    """

    answers: Remembered[bytes, Slot]
    has_asked = False

    async def _off_the_clock(self, query: Query | Submit) -> list[Slot]:
        slots: dict[bytes, Slot] = {}
        found: list[Slot] = []
        others: list[bytes] | None = None  # made once: a query may have thousands of prompts
        for place, key in enumerate(keys := keys_of(query)):
            slot = self.answers.take(key) or slots.get(key)  # equal prompts of one query may have one answer
            if slot is None:
                others = keys_of(query, ANY_MODEL) if others is None else others
                slot = self.answers.take(others[place])
            if slot is None and query.background:
                slot = Slot(error=ENDED_WITH_IT)
            if slot is None:
                self.has_asked = True
                self.interrupt("asked what the record has no answer to")
                await asyncio.get_running_loop().create_future()  # until the interrupt cancels it
                raise AssertionError
            slots[key] = slot
            found.append(slot)
        return found if keys else []


class ReplBlocks:
    """Runs the blocks of one REPL, and those again whose variables were lost.

    Args:
        worker: Its worker, with its record.
        contexts: Contexts for children of the queries of its blocks.
        limits: Its limits.
        write: Writes a file into its scratch folder, or removes it if there are no bytes.

    Attributes:
        replayed: What the last replay brought back.
        run: The block that runs; None while none does.
    """

    def __init__(
        self,
        worker: ReplWorker,
        contexts: QueryContexts,
        limits: ReplLimits,
        write: Callable[[str, bytes | None], Awaitable[None]],
    ) -> None:
        self.replayed = Replayed()
        self.run: BlockRun | None = None
        self._worker = worker
        self._contexts = contexts
        self._limits = limits
        self._write = write
        self._answers = Remembered[bytes, Slot]()
        self._ends_at = 0.0
        self._kills = 0
        self._is_interrupted = False
        self._are_files_lost = False

    def turn(self, advice: str) -> asyncio.Lock:
        """Return the lock to hold while blocks run. Raise ReplBusy if a block runs, with this advice."""
        if self._worker.busy.locked():
            raise ReplBusy(f"this REPL runs a block{advice}")
        self._is_interrupted = False
        return self._worker.busy

    async def execute(self, spec: BlockSpec, kills: bool) -> Block:
        """Run one block in its `turn`. If `kills`, the block of a cancelled caller is killed, and not interrupted."""
        worker, recorder = self._worker, self._worker.recorder
        connection = await self._live()
        if worker.is_at_hub or (spec.wanted.names is None and worker.checkpoints.is_due):
            spec.wanted = await worker.with_checkpoint(spec.wanted)
        if self._is_interrupted:
            return Block(spec.code, "interrupted", error=f"it {BY_CALLER}")
        started, wanted = time.monotonic(), spec.wanted
        recorded = recorder.begun(spec.code, wanted, connection.block + 1)
        run = self.run = BlockRun(worker.worker, connection, self._limits, self._contexts, spec)
        try:
            result = await run.result()
        except (FrameTooLarge, UnicodeEncodeError) as error:
            recorder.forget(recorded)
            return spec.unsent(error)
        except asyncio.CancelledError:
            await to_its_end(partial(self._cancelled, run, spec, recorded, kills))
            raise
        except BaseException:  # the block has no caller any more
            await to_its_end(worker.end_repl)
            raise
        finally:
            self.run = None
        taken_s = (now := time.monotonic()) - started
        if result is None:
            return await self._killed(spec, run, connection.block, taken_s)
        block = spec.ended(result, run.limit, taken_s)
        if wanted.names is None:  # a block that reads variables makes none
            worker.checkpoints.block_ended(taken_s)
            recorder.ended(recorded, block, run.clock.used_s(now))
            self._kills = 0
        return block

    async def _cancelled(self, run: BlockRun, spec: BlockSpec, recorded: RecordedBlock, kills: bool) -> None:
        """End a block whose caller was cancelled. If the block reacts, the REPL goes on with its variables."""
        if kills or not await run.end(BY_CALLER):
            if not self._worker.is_closed:
                await self._worker.end_repl()
        elif spec.wanted.names is None:
            self._worker.checkpoints.block_ended(run.clock.used_s(time.monotonic()))
            self._worker.recorder.ended(recorded, None, 0.0)

    async def _killed(self, spec: BlockSpec, run: BlockRun, number: int, taken_s: float) -> Block:
        """Kill a block, and bring the variables of the earlier ones back."""
        limit, blocks = run.limit, self._worker.checkpoints.blocks  # before `end_repl`, which may end the worker
        seen = block_result.located(await to_its_end(partial(self._worker.end_repl, True)), number)
        self._is_interrupted = False
        there = await self._restored()
        undone = None if there is None else blocks + 1 - there
        why = block_result.sentence_of_death(run.killed_because or "its processes are gone", seen)
        return spec.killed(". ".join([why, *self._told(undone)]), seen, limit, taken_s, undone)

    def _told(self, undone: int | None) -> list[str]:
        """Return sentences on what has not come back of a killed REPL, and why; none if all has."""
        told = []
        if undone is None and (why := self._worker.checkpoints.problem) is not None:
            told.append(f"There was no checkpoint of its variables: {why}")
        if self.replayed.problem is not None and self._limits.max_replay_s:
            back = "No variables" if undone is None else "Not all variables"
            told.append(f"{back} came back as they were: {self.replayed.problem}")
        elif self.replayed.blocks and self._are_files_lost:
            told.append("Files that the killed block wrote are gone")
        return told

    def interrupt(self) -> None:
        """Interrupt the block that runs, or the replay before it."""
        self._is_interrupted = True
        if self.run is not None:
            self.run.interrupt(BY_CALLER)

    async def fork(self) -> ReplWorker:
        """Return the worker of a fork of the REPL, see `ReplWorker.fork`."""
        async with self.turn(": fork it when that has ended"):
            await self._live()
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
        return forked[0]

    async def _become_hub(self) -> None:
        """Run the block without code, with which the REPL becomes a hub."""
        worker, limits, connection = self._worker, self._limits, self._worker.connection
        assert connection is not None
        worker.checkpoints.given_up()
        times = limits.block_timeout_s, limits.block_wall_timeout_s
        spec = BlockSpec("", Wanted(becomes_hub=True), BlockOutput(limits.repl_bounds()), refuse, *times)
        run = BlockRun(worker.worker, connection, limits, self._contexts, spec)
        if await run.result() is None:
            await worker.end_repl()
            raise ForkRefused(f"{NOT_FORKED}: {run.killed_because or 'its processes are gone'}")

    async def roll_back(self, k: int) -> int:
        """Go back by so many checkpoints, see `ReplWorker.go_back`."""
        async with self.turn(": roll it back once the block has ended"):
            await self._live()
            return await to_its_end(partial(self._worker.go_back, k))

    # -- after a loss ------------------------------------------------------------------------------------------------

    async def _live(self) -> Connection:
        """Return the connection of a live REPL process, with all variables that can be had.

        Raises:
            ReplClosed: The REPL was closed, or has been restarted too often.
            SandboxFailed: The REPL is not open, or no process can be started.
        """
        worker = self._worker
        if worker.connection is None or worker.is_behind or not worker.connection.block:
            worker.require_open()
            is_unused = worker.is_lost_unused
            if is_unused:
                await worker.end_repl()
                await worker.end()  # also if init lives, and only its REPL died
            if worker.connection is None or worker.is_behind:  # also if the last caller was cancelled
                await self._restored()
            if worker.connection is None:
                if not is_unused:
                    worker.count_restart()
                await worker.start_afresh()
        assert worker.connection is not None
        return worker.connection

    async def opened(self, record: ReplRecord) -> None:
        """Run the blocks of the record that the REPL was opened with. `replayed` says what came back."""
        self._worker.adopt(record)
        problem = record.problem or await self._obstacle(record.entries, is_on_top=False)
        self.replayed = Replayed(0, problem)
        if problem is None:
            await self._replay(0)
        else:
            self._worker.recorder.cut(0)

    async def _restored(self) -> int | None:
        """Have a REPL that has ended, or goes on from a checkpoint, get the variables of its recorded blocks.

        Returns:
            The number of blocks whose variables are there. None if there are none, and no checkpoint.
        """
        worker, recorder = self._worker, self._worker.recorder
        if worker.connection is None:
            await to_its_end(worker.roll_back)
        worker.is_behind = False
        recorder.entries = recorder.record().entries  # without the block that was killed
        kept = None if worker.connection is None else worker.checkpoints.blocks
        last = recorder.entries[recorder.place(kept or 0) :]
        self.replayed = Replayed(0, recorder.problem if kept is None else None)
        if not any(isinstance(each, RecordedBlock) for each in last):
            return kept
        self._kills += 1
        if (problem := await self._obstacle(last, bool(kept))) is not None:
            self.replayed = Replayed(0, problem)
            recorder.cut(kept or 0)
            return kept
        try:
            files = [] if kept else await self._begin_again()
            there = await self._replay(kept or 0)
            # A change within a folder is not seen, and counts as one.
            self._are_files_lost = files is None or (
                any(each.kind == "folder" for each in files) or (files != [] and files != await worker.files())
            )
            return there or None
        except BaseException as failure:
            if worker.started is not None:
                await to_its_end(worker.end_repl)
            if not isinstance(failure, SandboxFailed):
                self._kills -= 1  # it is counted when the REPL is brought back for the next block
                raise
            self.replayed = Replayed(0, str(failure))
            recorder.cut(0)
            return None

    async def _obstacle(self, entries: Sequence[Entry], is_on_top: bool) -> str | None:
        """Return why blocks are not run again, as a clause; None if they are."""
        if self._kills > MOST_KILLS:
            return f"it was killed {self._kills} times in a row, and its earlier blocks may be the reason"
        most_s = self._limits.max_replay_s
        blocks = [each for each in entries if isinstance(each, RecordedBlock)]
        took_s = sum(each.seconds for each in blocks)
        if took_s > most_s:
            return f"its blocks computed for {took_s:.3g} s, longer than max_replay_s = {most_s:g} s"
        if is_on_top and len(blocks) < len(entries):
            return "it was given values, contexts or files since the checkpoint"
        if is_on_top and await self._worker.files() != []:
            return "its blocks since the checkpoint may have changed files"
        return None

    async def _begin_again(self) -> list[ListedEntry] | None:
        """Start a fresh REPL for a replay: with an empty scratch folder, and what the first one had when it opened.
        Return what was in the folder before, see `ReplWorker.files`."""
        worker = self._worker
        if worker.connection is not None:
            await worker.end_repl()
        worker.count_restart()
        files = await worker.files()
        if files != []:
            await worker.end()
        await worker.start_afresh(for_replay=True)
        return files

    async def _replay(self, kept: int) -> int:
        """Run the recorded blocks but for the first ones, which the REPL has kept. After a block that was killed, begin
        once more from the first block, without that one. Return the number of blocks whose variables are there."""
        worker, last = self._worker, self._worker.last_block
        self._ends_at = time.monotonic() + self._limits.max_replay_s
        problem = None
        while True:
            done, why = await self._once(kept)
            problem = why or problem
            if (connection := worker.connection) is not None:
                break
            kept = 0
            await self._begin_again()
        connection.on_answered = worker.recorder.answered
        connection.count_from(max(last, connection.block))
        self.replayed = Replayed(done, problem)
        return kept + done

    async def _once(self, kept: int) -> tuple[int, str | None]:
        """Run the recorded blocks but for the first ones, until the REPL is killed. Drop from the record what did not
        run. Return how many blocks ended as before, and why the others did not, as a clause."""
        worker, recorder = self._worker, self._worker.recorder
        assert worker.connection is not None
        worker.connection.on_answered = _ignore
        self._answers = Remembered[bytes, Slot]()
        place = recorder.place(kept)
        entries, there = recorder.entries[place:], list[Entry]()
        done, problem = 0, None
        for entry in entries:
            if isinstance(entry, RecordedBlock):
                if problem is None and worker.connection is not None:
                    ran, problem = await self._block(entry, worker.connection)
                    there += [] if ran is None else [ran]
                    done += problem is None
            elif isinstance(entry, Gap):
                problem = problem or entry.why
            else:
                there.append(entry)
                problem = await self._give(entry) or problem
        recorder.entries[place : place + len(entries)] = there
        return done, problem

    async def _give(self, entry: Given | HostFile) -> str | None:
        """Give the REPL what it was given; return why that cannot be done, as a clause."""
        try:
            if isinstance(entry, Given):
                return await self._worker.give(entry)
            await self._write(entry.path, entry.data)
        except (FileRefused, ContextRefused) as refused:
            return str(refused)
        return None

    async def _block(self, recorded: RecordedBlock, connection: Connection) -> tuple[RecordedBlock | None, str | None]:
        """Run one block again.

        Returns:
            The block as the record has it now, None if it did not run; and why the replay ends with it, as a clause.
        """
        number = recorded.number or connection.block + 1
        which, left_s = f"block {number}", self._ends_at - time.monotonic()
        if recorded.problem is not None:
            return None, f"{which} {recorded.problem}"
        if self._is_interrupted:
            return None, INTERRUPTED
        if left_s <= 0:
            return None, f"max_replay_s = {self._limits.max_replay_s:g} s were over before {which}"
        connection.count_from(number - 1)
        for key, slot in recorded.answers:
            self._answers.add(key, slot)
        stdin = _nothing if recorded.asks_stdin else recorded.stdin
        wanted = Wanted(recorded.value, stdin=stdin, submit=recorded.submit, echo=recorded.echo)
        timeout_s = min(left_s, max(LEAST_S, TIMES * recorded.seconds))
        output = BlockOutput(self._limits.repl_bounds())
        spec = BlockSpec(recorded.code, wanted, output, refuse, timeout_s, left_s)
        run = self.run = BlockAgain(self._worker.worker, connection, self._limits, self._contexts, spec)
        run.answers = self._answers
        try:
            result = await run.result()
        except (FrameTooLarge, UnicodeEncodeError) as error:
            return None, f"{which} cannot be sent: {error}"
        finally:
            self.run = None
        if result is None:
            await self._worker.end_repl()
            return None, f"{which} was killed when it ran again: {run.killed_because}"
        self._worker.checkpoints.block_ended(run.clock.used_s(time.monotonic()))
        block = spec.ended(result, run.limit, 0.0)
        if run.has_asked:
            return replace(recorded, problem=CUT_SHORT), f"{which} asked what the record has no answer to"
        if block.status == "interrupted":
            why = INTERRUPTED if self._is_interrupted else f"{which} did not end in {timeout_s:.3g} s this time"
            return replace(recorded, problem=CUT_SHORT), why
        if (outcome := outcome_of(block)) != recorded.outcome:
            return replace(recorded, outcome=outcome), f"{which} printed or raised something else when it ran again"
        return recorded, None


def _ignore(*_answered: object) -> None:
    """Note no answer: the record has it."""


async def _nothing() -> str:
    """Stand for the function that gave a block its stdin. It is not called: each piece is an answer in the record."""
    return ""
