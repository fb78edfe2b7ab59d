"""Actions of one run's replies: running their code, block by block, and finding the answer in them."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from msgspec import Struct

from rlm_broker.errors import LimitReached, ReplClosed
from rlm_broker.events.event import BlockEnded, BlockPrinted, BlockStarted, Emitter, Replied
from rlm_broker.limits import Limits
from rlm_broker.results import Block, without_displays
from rlm_broker.run.calls import BlockCalls
from rlm_broker.run.tree import Progress
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.values.parsing import ParsedReply, parse_reply
from rlm_broker.values.parsing.finals import FinalText, FinalVar
from rlm_broker.values.parsing.notes import NotRun

MAX_DISPLAYS_BYTES = 64 << 20
"""Memory in bytes of the displays of one run's blocks. Displays of blocks beyond it are only counted, as omitted."""
MAX_REPLY_CHARS = 1_000_000
"""Longest reply, in characters, that is read; none of a longer one is run. Reading it takes 0.1 s, and the longest
replies of models today have half as many characters."""
SHORT_REPLY_CHARS = 50_000
"""Longest reply, in characters, that is read on the event loop, where it takes some milliseconds; a longer one takes a
thread."""
_FAILED = "A block before it did not run through: look at its output first, then submit."


class ReplyAnswer(Struct, frozen=True):
    """An answer that a reply has given.

    Attributes:
        is_guess: Whether the model wrote it without code, or before the outcome of the code beside it was known.
    """

    text: str
    is_guess: bool = False


class ReplyActions:
    """Does what the replies of one run say.

    Args:
        progress: Progress of the run; the number of blocks, the draft and the last text are kept there.
        paid: Answered calls of the blocks of its tree.
        run: Name of the run.
    """

    def __init__(
        self, repl: SandboxedRepl, limits: Limits, emit: Emitter, progress: Progress, paid: BlockCalls, run: str
    ) -> None:
        self._repl = repl
        self._limits = limits
        self._emit = emit
        self._progress = progress
        self._paid = paid
        self._run = run
        self._display_bytes = 0

    def blocks_left(self) -> int | None:
        """Return how many more blocks the run may have; None is without a bound."""
        most = self._limits.max_blocks
        return None if most is None else max(0, most - self._progress.blocks)

    async def act(self, number: int, reply: str, blocks: list[Block]) -> tuple[ReplyAnswer | None, Sequence[NotRun]]:
        """Do what the reply of turn `number` says; add each block that ran to `blocks`.

        Blocks run in order, until one submits an answer or is killed. After a kill the rest is not run, since it was
        written for lost variables.

        Returns:
            The answer, and what was not run.

        Raises:
            LimitReached: The REPL was killed more often than `max_repl_restarts` allows.
        """
        parsed = await read_reply(reply)
        not_run = tuple(f"{item.what}: {item.reason}" for item in parsed.not_run)
        self._emit(Replied, number, reply, not_run)
        self._progress.said = parsed.prose or self._progress.said
        for code in parsed.code[: self.blocks_left()]:
            blocks.append(await self._execute(number, code))
            if blocks[-1].final_answer is not None:
                return ReplyAnswer(blocks[-1].final_answer), ()
            if blocks[-1].status == "killed":
                break
        skipped = blocks_not_run(parsed, blocks)
        if isinstance(parsed.final, FinalText):
            is_guess = not blocks or bool(skipped) or any(map(_tells_something, blocks))
            return ReplyAnswer(parsed.final.text, is_guess), (*parsed.not_run, *skipped)
        if parsed.final is None or skipped:
            return None, (*parsed.not_run, *skipped)
        found = await self.look_up(number, parsed.final, blocks)
        return None if found is None else ReplyAnswer(found), parsed.not_run

    async def look_up(self, number: int, final: FinalVar, blocks: list[Block]) -> str | None:
        """Return the value of a variable that a reply submits. If there is none, the REPL tells the model."""
        blocks.append(await self._execute(number, _lookup(final)))
        return blocks[-1].final_answer

    async def _execute(self, iteration: int, code: str) -> Block:
        self._progress.blocks += 1
        number = self._progress.blocks
        self._emit(BlockStarted, iteration, number, code)
        self._paid.begin(self._run)
        try:
            block = await self._repl.aexecute(
                code,
                self._limits.block_timeout_s,
                lambda stream, text: self._emit(BlockPrinted, number, stream, text),
                variables=True,
            )
            if block.status in ("killed", "interrupted"):
                block = replace(block, calls_remembered=await self._paid.remember(self._run))
        except ReplClosed as closed:
            if self._repl.is_closed:
                raise
            allowed = self._limits.max_repl_restarts
            raise LimitReached("max_repl_restarts", allowed, allowed) from closed
        finally:
            self._paid.end(self._run)
        self._emit(BlockEnded, number, without_displays(block), tuple(each.sizes for each in block.displays))
        self._display_bytes += sum(sys.getsizeof(data) for each in block.displays for data in each.data.values())
        if self._display_bytes > MAX_DISPLAYS_BYTES:
            block = without_displays(block, omitted=len(block.displays))
        self._progress.take_draft(block)
        return block


async def read_reply(reply: str) -> ParsedReply:
    """Read a reply; a long one in a thread. A reply that is too long is not run, and the model is informed."""
    if len(reply) > MAX_REPLY_CHARS:
        why = f"A reply may have {MAX_REPLY_CHARS:,} characters: write less, and keep long values in variables."
        return ParsedReply((), None, (NotRun(f"all of a reply of {len(reply):,} characters", why),))
    return parse_reply(reply) if len(reply) < SHORT_REPLY_CHARS else await asyncio.to_thread(parse_reply, reply)


def _lookup(final: FinalVar) -> str:
    return f"FINAL_VAR({final.name!r})"


def _tells_something(block: Block) -> bool:
    """Whether the outcome of a block may contradict an answer beside it."""
    return block.status != "ok" or bool(block.stdout or block.stderr or block.displays)


def blocks_not_run(parsed: ParsedReply, blocks: Sequence[Block]) -> list[NotRun]:
    """Return what was not run: a lookup after a failure, the blocks after a killed one, and those past `max_blocks`."""
    was_killed = bool(blocks) and blocks[-1].status == "killed"
    names = [f"block {number}" for number in range(len(blocks) + 1, len(parsed.code) + 1)]
    has_failed = any(block.status != "ok" for block in blocks)
    if isinstance(parsed.final, FinalVar) and (names or has_failed):
        names.append(_lookup(parsed.final))
    if not names:
        return []
    left_out = "As many blocks were run as this run may have."
    why = f"Block {len(blocks)} was killed." if was_killed else _FAILED if has_failed else left_out
    return [NotRun(", ".join(names), why)]
