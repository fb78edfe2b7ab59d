"""The turns of a run as text for people, while it goes on: what the model says, and what its code prints."""

from typing import Final

from rlm_broker.events.event import BlockEnded, CallStarted, CallText, Event, EventsMissed, Replied, RunStarted
from rlm_broker.events.story import printed
from rlm_broker.results import Block
from rlm_broker.values.text import label, shorten

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
