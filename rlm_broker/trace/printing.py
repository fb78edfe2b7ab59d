"""Events as lines for people, printed while a run goes on."""

from typing import TextIO

from rlm_broker.results import Block
from rlm_broker.trace.events import (
    BlockEnded,
    CallEnded,
    CallRetried,
    Event,
    IterationStarted,
    ReplReady,
    RunEnded,
    RunStarted,
)
from rlm_broker.values.text import printable

CANCELLED = "cancelled"
"""Error of a call that was cancelled by its caller."""
MAX_ERROR_CHARS = 300
"""Characters of untrusted code's error in a note; longer text is cut."""
TOLD_OF_A_BATCH = 10
"""Maximum lines for one batch: one for each tenth of its calls."""


def print_event(event: Event, stream: TextIO) -> None:
    """Write the line of an event to a text stream, if it has one."""
    if note := trouble(event) or milestone(event):
        stream.write(f"{line_of(event, note)}\n")
        stream.flush()


def line_of(event: Event, note: str) -> str:
    """Return a note about an event as one line, with control characters escaped."""
    return f"[depth {event.depth}] {printable(note)}"


def trouble(event: Event) -> str | None:
    """Return a note on a failure or a retry, which users should see even in a small space; None for other events."""
    match event:
        case CallRetried():
            return f"call {event.call} failed, attempt {event.attempt} in {event.wait_s:.1f} s: {event.reason}"
        case CallEnded(error=str(error)) if error != CANCELLED:  # its block or run has a note of its own
            return f"call {event.call} failed: {_head(error)}"
        case BlockEnded(outcome=outcome) if outcome.status not in ("ok", "exited"):
            return f"block {event.block}: {_ended(outcome)}: {_head(outcome.error or '')}"
        case RunEnded(error=str(error)) if event.depth:  # the command line prints the root's error itself
            return f"run {event.run}: {_head(error)} after {event.duration_s:.2f} s"
    return None


def milestone(event: Event) -> str | None:
    """Return a line for what goes well; None if the event needs none."""
    match event:
        case RunStarted():
            return f"run {event.run} with {event.model}"
        case ReplReady(isolation=isolation):
            layers = f"isolation {isolation.level} ({len(isolation.layers)} layers)"
            return f"REPL ready in {event.duration_s * 1e3:.0f} ms, {layers}"
        case IterationStarted():
            return f"turn {event.number}"
        case CallEnded(batch=batch, done=done, of=of) if (
            batch and TOLD_OF_A_BATCH * done // of > TOLD_OF_A_BATCH * (done - 1) // of
        ):
            return f"batch {batch}: {done:,} of {of:,} calls"
        case BlockEnded(outcome=outcome):
            return f"block {event.block}: {_ended(outcome)}"
        case RunEnded():
            return f"run {event.run}: {event.how} after {event.duration_s:.2f} s"
    return None


def _head(error: str) -> str:
    """Return the first line of an error. The command line prints the rest, such as a difference, once."""
    return error.partition("\n")[0][:MAX_ERROR_CHARS]


def _ended(outcome: Block) -> str:
    return f"{outcome.status} after {outcome.execution_time:.2f} s"
