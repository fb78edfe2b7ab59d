"""Replay: a fresh REPL runs the blocks of a record again.

Nothing is paid or done twice. Output goes nowhere, and queries, tools and waits get the answers that they got before:
each answer once, by the digest of what was asked. A block whose outcome is another one ends the replay.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from rlm_broker.broker.transport.connection import refuse
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ContextRefused, FileRefused, ReplClosed, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.blocks import block_result
from rlm_broker.sandbox.blocks.block import BlockRun
from rlm_broker.sandbox.blocks.block_result import BlockOutput
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
from rlm_broker.values.remembered import Remembered
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import Query, Slot, Submit

TIMES = 3
"""Ratio of the seconds that a block may compute in a replay to those that it computed before."""
LEAST_S = 1.0
"""Seconds that each block may compute in a replay: a short one may have to wait for a busy machine."""
MOST_IN_VAIN = 1
"""Kills in a row, with no block that ends between them, after which the blocks are run again, beside the first kill."""
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


class Replays:
    """The replays of one REPL: after a loss of its variables, or of another REPL's record when it opens.

    Args:
        worker: Its worker, with its record.
        write: Writes a file into its scratch folder, or removes it if there are no bytes.

    Attributes:
        replayed: What the last one brought back.
    """

    def __init__(
        self,
        worker: ReplWorker,
        contexts: QueryContexts,
        limits: ReplLimits,
        write: Callable[[str, bytes | None], Awaitable[None]],
    ) -> None:
        self.replayed = Replayed()
        self._worker = worker
        self._contexts = contexts
        self._limits = limits
        self._write = write
        self._answers = Remembered[bytes, Slot]()
        self._run: BlockAgain | None = None
        self._ends_at = 0.0
        self._in_vain = self._blocks_before = 0
        self._is_over = False

    def interrupt(self) -> None:
        """End the present replay."""
        self._is_over = True
        if self._run is not None:
            self._run.interrupt("was not wanted any more")

    async def opened(self, record: ReplRecord) -> None:
        """Run the blocks of the record that the REPL was opened with. `replayed` says what came back."""
        self._worker.adopt(record)
        self.replayed = Replayed(0, record.problem or await self._obstacle(record.entries, is_on_top=False))
        connection = self._worker.connection
        if self.replayed.problem is None and connection is not None:
            self._worker.seed_again(connection)
            await self._replay([], record.entries)

    async def restored(self, undone: int | None) -> int | None:
        """Have a REPL without variables, or one that goes on from a checkpoint, run its recorded blocks again.

        Args:
            undone: Number of blocks whose variables are lost, as `ReplWorker.roll_back` returns it.

        Returns:
            The number of those that are lost now; None for all of them.
        """
        self._is_over = self._worker.is_behind = False
        recorder, is_on_top = self._worker.recorder, undone is not None
        entries = recorder.entries = recorder.record().entries  # without the block that was killed
        places = [place for place, each in enumerate(entries) if isinstance(each, RecordedBlock)]
        # Counted here, and not from `undone`: a replay that was cancelled has run a part of them again.
        lost = len(places) if undone is None else len(places) - self._worker.checkpoints.blocks
        self.replayed = Replayed(0, None if is_on_top else recorder.problem)
        if lost <= 0:
            return undone
        kept = len(places) - lost
        last = entries[places[kept - 1] + 1 if kept else 0 :]
        problem = self._vain(len(places)) or await self._obstacle(last, is_on_top)
        self.replayed = Replayed(0, problem)
        if problem is None:
            try:
                if not is_on_top:
                    await self._worker.begin_again()
                kept = await self._replay(entries[: len(entries) - len(last)], last)
            except (ReplClosed, SandboxFailed) as failure:
                kept, self.replayed = 0, Replayed(0, str(failure))
            except BaseException:
                if self._worker.started is not None:
                    await to_its_end(self._worker.end_repl)
                raise
        back = kept + self.replayed.blocks
        if problem is not None or self._worker.connection is None:
            recorder.cut(back)
        return len(places) + 1 - back if back or is_on_top else None

    def told(self, undone: int | None) -> str:
        """Return sentences on what has not come back of a killed REPL, and why; empty if all has.

        Args:
            undone: Number of blocks whose variables are lost; None for all of them.
        """
        told = []
        if undone is None and (why := self._worker.checkpoints.problem) is not None:
            told.append(f"There was no checkpoint of its variables: {why}")
        if self.replayed.problem is not None and self._limits.max_replay_s:
            back = "No variables" if undone is None else "Not all variables"
            told.append(f"{back} came back: {self.replayed.problem}")
        elif self.replayed.blocks and self._worker.has_new_folder:
            told.append("Files that the killed block wrote are gone")
        return ". ".join(told)

    def _vain(self, blocks: int) -> str | None:
        """Return why a REPL is not replayed that has been killed again and again, as a clause. Its blocks may have
        ruined it. So a fresh one takes its place."""
        self._in_vain = self._in_vain + 1 if blocks <= self._blocks_before else 0
        self._blocks_before = blocks
        if self._in_vain <= MOST_IN_VAIN:
            return None
        self._blocks_before = 0
        return f"it was killed {self._in_vain + 1} times in a row, and its earlier blocks may be the reason"

    async def _obstacle(self, entries: Sequence[Entry], is_on_top: bool) -> str | None:
        """Return why blocks are not run again, as a clause; None if they are."""
        most_s = self._limits.max_replay_s
        blocks = [each for each in entries if isinstance(each, RecordedBlock)]
        took_s = sum(each.seconds for each in blocks)
        if took_s > most_s:
            return f"its blocks computed for {took_s:.3g} s, longer than max_replay_s = {most_s:g} s"
        if is_on_top and len(blocks) < len(entries):
            return "it was given values, contexts or files since the checkpoint"
        if is_on_top and await self._worker.has_files():
            return "its blocks since the checkpoint may have changed files"
        return None

    async def _replay(self, earlier: Sequence[Entry], entries: Sequence[Entry]) -> int:
        """Run blocks again, and put what the REPL has then into its record. After a block that was killed, begin once
        more from the first block, and stop before that one.

        Args:
            earlier: Entries that the REPL has, since it goes on from a checkpoint.

        Returns:
            The number of blocks that the REPL has beside those that ran again.
        """
        recorder, last = self._worker.recorder, self._worker.last_block
        before = len(recorder.entries)
        self._ends_at = time.monotonic() + self._limits.max_replay_s
        most, problem = len(entries), None
        while True:
            self._answers = Remembered[bytes, Slot]()
            self.replayed, kept = await self._once(entries, most, problem)
            if (connection := self._worker.connection) is not None:
                break
            most, problem = self.replayed.blocks + _blocks_in(earlier), self.replayed.problem
            earlier, entries = [], [*earlier, *entries]
            await self._worker.begin_again()
        connection.on_answered = recorder.answered
        connection.count_from(max(last, connection.block))
        recorder.entries = [*earlier, *kept, *recorder.entries[before:]]
        return _blocks_in(earlier)

    async def _once(self, entries: Sequence[Entry], most: int, why: str | None) -> tuple[Replayed, list[Entry]]:
        """Run at most so many blocks, and stop with the reason `why`."""
        done, problem = 0, None
        kept: list[Entry] = []
        if self._worker.connection is not None:
            self._worker.connection.on_answered = _ignore
        for entry in entries:
            if isinstance(entry, RecordedBlock) and problem is None:
                ran, problem = (None, why) if done == most else await self._block(entry)
                if self._worker.connection is None:
                    break
                if ran is not None:
                    kept.append(ran)
                done += problem is None
            elif isinstance(entry, Gap):
                problem = problem or entry.why
            elif not isinstance(entry, RecordedBlock):
                kept.append(entry)
                problem = await self._give(entry) or problem
        return Replayed(done, problem), kept

    async def _give(self, entry: Given | HostFile) -> str | None:
        """Give the REPL what it was given; return why that cannot be done, as a clause."""
        try:
            if isinstance(entry, Given):
                return await self._worker.give(entry)
            await self._write(entry.path, entry.data)
        except (FileRefused, ContextRefused) as refused:
            return str(refused)
        return None

    async def _block(self, recorded: RecordedBlock) -> tuple[RecordedBlock | None, str | None]:
        """Run one block.

        Returns:
            The block as the record has it now, None if it did not run; and why the replay ends with it, as a clause.
        """
        connection = self._worker.connection
        assert connection is not None
        number = recorded.number or connection.block + 1
        which, left_s = f"block {number}", self._ends_at - time.monotonic()
        if recorded.problem is not None:
            return None, f"{which} {recorded.problem}"
        if left_s <= 0 or self._is_over:
            over = f"max_replay_s = {self._limits.max_replay_s:g} s were over before {which}"
            return None, INTERRUPTED if self._is_over else over
        connection.count_from(number - 1)
        for key, slot in recorded.answers:
            self._answers.add(key, slot)
        stdin = _nothing if recorded.asks_stdin else recorded.stdin
        wanted = Wanted(recorded.value, stdin=stdin, submit=recorded.submit, echo=recorded.echo)
        output = BlockOutput(self._limits.repl_bounds(), None)
        timeout_s = min(left_s, max(LEAST_S, TIMES * recorded.seconds))
        worker, limits = self._worker.worker, self._limits
        run = self._run = BlockAgain(worker, connection, output, limits, refuse, timeout_s, left_s, self._contexts)
        run.answers = self._answers
        try:
            result = await run.result(recorded.code, wanted)
        except (FrameTooLarge, UnicodeEncodeError) as error:
            return None, f"{which} cannot be sent: {error}"
        finally:
            self._run = None
        if result is None:
            await self._worker.end_repl()
            return None, f"{which} was killed when it ran again: {run.killed_because}"
        self._worker.checkpoints.block_ended(wanted, run.clock.used_s(time.monotonic()))
        block = block_result.ended_block(recorded.code, output, result, run.limit, wanted, None, 0.0)
        if run.has_asked:
            return replace(recorded, problem=CUT_SHORT), f"{which} asked what the record has no answer to"
        if block.status == "interrupted":
            why = INTERRUPTED if self._is_over else f"{which} did not end in {timeout_s:.3g} s this time"
            return replace(recorded, problem=CUT_SHORT), why
        if (outcome := outcome_of(block)) != recorded.outcome:
            return replace(recorded, outcome=outcome), f"{which} printed or raised something else when it ran again"
        return recorded, None


def _blocks_in(entries: Sequence[Entry]) -> int:
    return sum(isinstance(each, RecordedBlock) for each in entries)


def _ignore(*_answered: object) -> None:
    """Note no answer: the record has it."""


async def _nothing() -> str:
    """Stand for the function that gave a block its stdin. It is not called: each piece is an answer in the record."""
    return ""
