"""A run as its client reads it: its turns while it goes on, and its end, with the answer and what it took."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlm_broker import (
    Block,
    BlockEnded,
    CallStarted,
    CallText,
    Completion,
    Event,
    EventsMissed,
    LimitReached,
    Replied,
    RunStarted,
    Usage,
)
from rlm_broker.events.story import printed
from rlm_broker.serve.questions.client_tools import ClientCall, forced_call
from rlm_broker.serve.questions.request import AnswerForm
from rlm_broker.values.text import shorten


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a response: an answer, the limit that ended the run, or calls of the client's functions.

    Attributes:
        usage: Usage of the run and all below it so far.
        text: Answer, or the best one so far; if there is none, a sentence on what ended the run. Empty with calls.
        calls: Calls whose results the client brings.
        limit: Name of the limit that ended the run, or None.
        is_stopped: Whether the run was stopped.
        facts: Further facts about a run that has ended, for the object `rlm`.
    """

    usage: Usage
    text: str = ""
    calls: tuple[ClientCall, ...] = ()
    limit: str | None = None
    is_stopped: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the response is complete: no limit and no stop has cut it."""
        return self.limit is None and not self.is_stopped

    def told(self) -> dict[str, Any]:
        """Return what the object `rlm` of a response says about the end of its run."""
        return {"cost_usd": self.usage.total_cost, "calls": self.usage.total_calls, "limit": self.limit, **self.facts}


def outcome_of(ended: Completion | LimitReached, form: AnswerForm) -> RunOutcome:
    """Return the outcome of a run.

    Args:
        ended: Its completion, or the limit that ended it.
        form: Form of the answer that the request has asked for. An answer of a type is reported as JSON.
    """
    is_stopped = not isinstance(ended, LimitReached) and ended.is_stopped
    facts = {
        "stopped": is_stopped,
        "isolation": None if ended.isolation is None else ended.isolation.level,
        "turns": len(ended.trajectory) if isinstance(ended, LimitReached) else ended.iterations,
        "seconds": round(ended.execution_time, 3),
    }
    made = RunOutcome(ended.usage_summary.total, limit=ended.limit, is_stopped=is_stopped, facts=facts)
    if isinstance(ended, LimitReached):
        reached = f"the limit {ended.limit} = {ended.allowed:,.10g} was reached before there was an answer"
        return replace(made, text=ended.partial_answer or reached)
    if is_stopped:
        return replace(made, text=ended.response or "the run was stopped before there was an answer")
    if form.forced and ended.limit is None:
        return replace(made, calls=(forced_call(form.forced, ended.parsed),))
    text = json.dumps(ended.parsed, ensure_ascii=False) if form.output_type is not None else ended.response
    return replace(made, text=text or "")


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
                return f"\n> run {event.run}: {shorten(' '.join((event.question or '').split()), PREVIEW_CHARS)}\n"
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
