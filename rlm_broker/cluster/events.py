"""The events of a run on a node, as they reach the receivers in the orchestrator: typed, bounded and numbered anew.

Theory of operation. Receivers see one tree of runs, however many attempts there were. Code in a REPL is seeded and
answered calls are not made again, so a further attempt repeats the events of the one before it, up to the place where
that ended. What was told already is left out: each event has an identity in its tree, such as the number of its call.
Of printed text and of pieces of replies the first characters are left out, as many as were told. So each thing begins
once and ends once, and the numbers have no gap.

A node is not trusted. Each event is decoded to its class, with bounds on names and numbers, and secrets in its texts
are replaced again. The id of the tree and the numbers are the orchestrator's. The times are those of the node, moved to
the orchestrator's clock and kept in order, since durations are read off them.

The end of the root run is told only when it is certain: an attempt that failed because of its node did not end the run.
"""

import contextvars
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from rlm_broker.cluster.messages import EVENTS_BYTES, EVENTS_VALUES, MOST_EVENTS
from rlm_broker.cluster.outcomes import BlockForm, read_block
from rlm_broker.errors import ProtocolViolation
from rlm_broker.events.event import (
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
    EventsMissed,
    IterationStarted,
    Replied,
    ReplReady,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
    TreeEvents,
)
from rlm_broker.events.trace import name_of
from rlm_broker.results import Completion
from sandbox_worker.wire.counting import has_more_values_than
from sandbox_worker.wire.mime import MimeType

MOST_TOLD = 1 << 17
"""Maximum identities of events, and of texts, that are kept for a run. Beyond it, a further attempt may repeat some."""
MOST_NUMBER = 1 << 53
"""Maximum number in the identity of an event."""
ROOT = "1"
_RUN = re.compile(r"1(\.[1-9][0-9]{0,8}){0,100}")
"""Name of a run in its tree."""

_NUMBERS: dict[type[Event], tuple[str, ...]] = {
    RunStarted: (),
    ReplReady: (),
    IterationStarted: ("number",),
    Replied: ("number",),
    BlockStarted: ("block",),
    BlockEnded: ("block",),
    CallStarted: ("call",),
    CallRetried: ("call", "attempt"),
    CallEnded: ("call",),
    ToolStarted: ("call",),
    ToolEnded: ("call",),
    RunEnded: (),
}
"""Class of an event → its fields that say, with its run, which of its kind it is."""
_TEXTS: dict[type[Event], tuple[str, ...]] = {BlockPrinted: ("block", "stream"), CallText: ("call",)}
"""The same for events whose text is a piece of one that goes on."""
_IDENTITY = _NUMBERS | _TEXTS


class _BlockEndedForm(msgspec.Struct, frozen=True):
    """A `BlockEnded` on its way."""

    run: str
    depth: int
    block: int
    outcome: BlockForm
    displays: tuple[dict[MimeType, int], ...] = ()
    time: float = 0.0


class _Kind(msgspec.Struct, frozen=True):
    """Name of an event's class, as a trace has it."""

    event: str


_kind = msgspec.json.Decoder(_Kind)
_KINDS: tuple[type[Event], ...] = (*_NUMBERS, *_TEXTS, EventsMissed)
_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    name_of(kind): msgspec.json.Decoder(_BlockEndedForm if kind is BlockEnded else kind) for kind in _KINDS
}


class RunEvents:
    """Passes the events of one run on, over all of its attempts. Make it in the run's task. Lives on one event loop.

    Args:
        events: Numbers the events, and has the receivers.
    """

    def __init__(self, events: TreeEvents) -> None:
        self._events = events
        self._context = contextvars.copy_context()
        self._told: set[tuple[object, ...]] = set()
        self._chars = Counter[tuple[object, ...]]()
        """Pieces of a text → characters that were told."""
        self._seen = Counter[tuple[object, ...]]()
        """The same → characters that this attempt has sent."""
        self._offset_s: float | None = None
        self._last_time = 0.0
        self._end: RunEnded | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether there are receivers."""
        return self._events.is_wanted

    def begin(self) -> None:
        """Begin with the events of a further attempt."""
        self._seen.clear()
        self._offset_s = self._end = None

    def take(self, encoded: Sequence[msgspec.Raw]) -> None:
        """Pass events of the node on.

        Raises:
            ProtocolViolation: They are more than one message may have, or one of them is not an event of a run.
        """
        if not self.is_wanted:
            return
        if not are_few(encoded):
            raise ProtocolViolation("an agent has sent more events in one message than it may have")
        for each in encoded:
            try:
                event = _decoded(each)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise ProtocolViolation(f"an agent has sent an event that cannot be read: {error}") from None
            if isinstance(event, RunEnded) and event.run == ROOT:
                self._end = event
            elif (new := self._new(event)) is not None:
                self._tell(new)

    def end(self, completion: Completion, failure: BaseException | None, kind: str) -> None:
        """Tell the end of the root run, once it is certain.

        Args:
            completion: Outcome of the run, also of one that failed. Its usage is told.
            failure: Error that ended the run, or None.
            kind: "answered", "stopped" or the kind of the error.
        """
        if not self.is_wanted or (RunStarted, ROOT) not in self._told:
            return
        ended = RunEnded(
            ROOT,
            0,
            None if failure else completion.response,
            None if failure is None else str(failure) or kind,
            completion.iterations,
            completion.execution_time,
            completion.usage_summary,
            kind,
            getattr(failure, "limit", None) or completion.limit,
            getattr(failure, "partial_answer", None) or (None if self._end is None else self._end.partial_answer),
            completion.usage_summary.total.total_cost,
            time=0.0 if self._end is None else self._end.time,
        )
        self._tell(ended)

    def _new(self, event: Event) -> Event | None:
        """Return an event without what was told before; None if all of it was."""
        kind = type(event)
        if (names := _TEXTS.get(kind)) is not None:
            key = (kind, event.run, *(getattr(event, name) for name in names))
            text: str = getattr(event, "text")  # noqa: B009 - both classes have it, and no class above them
            before = self._seen[key]
            now = before + len(text)
            new = text[max(0, self._chars[key] - before) :]
            if key in self._seen or len(self._seen) < MOST_TOLD:
                self._seen[key] = now
            if key in self._chars or len(self._chars) < MOST_TOLD:
                self._chars[key] = max(self._chars[key], now)
            return msgspec.structs.replace(event, text=new) if new else None
        if kind is EventsMissed:
            return event
        key = (kind, event.run, *(getattr(event, name) for name in _NUMBERS[kind]))
        if key in self._told:
            return None
        if len(self._told) < MOST_TOLD:
            self._told.add(key)
        return event

    def _tell(self, event: Event) -> None:
        """Pass an event on, with a number of ours and the time of our clock."""
        now = time.time()
        if self._offset_s is None:
            self._offset_s = now - (event.time or now)
        at = event.time + self._offset_s if event.time else now
        self._last_time = max(self._last_time, min(at, now))
        # A receiver finds the context variables of the run, such as the span of its caller. Those that it sets end with
        # the event: calls are made in other tasks, and one call must not get what belongs to another.
        self._context.copy().run(self._events.take, event, self._last_time)


def are_few(encoded: Sequence[msgspec.Raw]) -> bool:
    """Whether events are within the bounds of one message."""
    sizes = [memoryview(each).nbytes for each in encoded[: MOST_EVENTS + 1]]
    if len(sizes) > MOST_EVENTS or sum(sizes) > EVENTS_BYTES:
        return False
    return not has_more_values_than(EVENTS_VALUES, b",".join(map(bytes, encoded)))


def _decoded(encoded: msgspec.Raw) -> Event:
    """Return an event.

    Raises:
        ValueError, msgspec.MsgspecError: It is none, or has a name or a number that no run has.
    """
    decoder = _decoders.get(_kind.decode(encoded).event)
    if decoder is None:
        raise ValueError("there is no such event")
    event = decoder.decode(encoded)
    if isinstance(event, _BlockEndedForm):
        outcome = read_block(event.outcome)
        event = BlockEnded(event.run, event.depth, event.block, outcome, event.displays, time=event.time)
    names = _IDENTITY.get(type(event), ())
    numbers = [value for value in (event.depth, *(getattr(event, name) for name in names)) if isinstance(value, int)]
    if not _RUN.fullmatch(event.run) or not all(0 <= number < MOST_NUMBER for number in numbers):
        raise ValueError("its run or its number is none")
    return event  # type: ignore[no-any-return]
