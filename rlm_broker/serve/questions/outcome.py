"""A run as its client reads it: its turns while it goes on, and its end, with the answer and what it took."""

from dataclasses import dataclass
from typing import Any, Final

from rlm_broker.errors import LimitReached
from rlm_broker.events.event import BlockEnded, CallStarted, CallText, Event, EventsMissed, Replied, RunStarted
from rlm_broker.events.story import printed
from rlm_broker.results import Block, Completion
from rlm_broker.serve.questions.question import as_json
from rlm_broker.usage import Usage
from rlm_broker.values.text import label, shorten


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run that has an answer, or that a limit has ended.

    Attributes:
        text: Answer, or the best one so far; if there is none, a sentence on what ended the run.
        limit: Name of the limit that ended the run, or None.
        is_stopped: Whether the run was stopped.
        usage: Usage of the run and all below it.
        isolation: Isolation level of its REPL, or None if it had none.
        turns: Turns of the run.
        seconds: Duration of the run.
    """

    text: str
    limit: str | None
    is_stopped: bool
    usage: Usage
    isolation: str | None
    turns: int
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether the run has ended by itself, with its answer."""
        return self.limit is None and not self.is_stopped

    def told(self, run: str) -> dict[str, Any]:
        """Return the object `rlm` of a response.

        Args:
            run: Id of the run.
        """
        return {
            "run": run,
            "cost_usd": self.usage.total_cost,
            "calls": self.usage.total_calls,
            "limit": self.limit,
            "stopped": self.is_stopped,
            "isolation": self.isolation,
            "turns": self.turns,
            "seconds": round(self.seconds, 3),
        }


def outcome_of(ended: Completion | LimitReached, *, is_typed: bool = False) -> RunOutcome:
    """Return the outcome of a run.

    Args:
        ended: Its completion, or the limit that ended it.
        is_typed: Whether the answer is of a type, so that it is told as JSON.
    """
    level = None if ended.isolation is None else ended.isolation.level
    usage = ended.usage_summary.total
    if isinstance(ended, LimitReached):
        reached = f"the limit {ended.limit} = {ended.allowed:,.10g} was reached before there was an answer"
        text, turns = ended.partial_answer or reached, len(ended.trajectory)
        return RunOutcome(text, ended.limit, False, usage, level, turns, ended.execution_time)
    if ended.is_stopped:
        text = ended.response or "the run was stopped before there was an answer"
    else:
        text = as_json(ended.parsed) if is_typed else ended.response or ""
    return RunOutcome(text, ended.limit, ended.is_stopped, usage, level, ended.iterations, ended.execution_time)


SHOWN_CHARS: Final = 2_000
"""Characters of a block's output that are shown; of longer output, the beginning and the end."""
PREVIEW_CHARS: Final = 200
"""Characters of a child run's question that are shown."""


class Telling:
    """Makes text of the events of one run, in their order. Replies come as they are written, if the client streams."""

    def __init__(self) -> None:
        self._call = 0
        self._is_streamed = False

    def text(self, event: Event) -> str:
        """Return the text of an event; empty if it has none."""
        match event:
            case EventsMissed():
                return f"\n({event.count:,} events are left out: the client reads too slowly)\n"
            case RunStarted() if event.depth:
                return f"\n> run {event.run}: {label(event.question or '', PREVIEW_CHARS)}\n"
            case CallStarted() if not event.depth and not event.block:
                self._call, self._is_streamed = event.call, False
            case CallText() if event.call == self._call:
                self._is_streamed = True
                return event.text
            case Replied() if not event.depth:
                return "\n\n" if self._is_streamed else f"{event.text}\n\n"
            case BlockEnded() if not event.depth:
                return _fenced(event.outcome)
        return ""


def output_of(block: Block) -> str:
    """Return what a block has printed, and the reason of its end unless stderr has told it already."""
    return "\n".join(piece.text.rstrip("\n") for piece in printed(block) if piece.text.strip())


def _fenced(block: Block) -> str:
    said = output_of(block)
    if not said:
        return ""
    fence = "```"
    while fence in said:
        fence += "`"
    return f"{fence}text\n{shorten(said, SHOWN_CHARS)}\n{fence}\n\n"
