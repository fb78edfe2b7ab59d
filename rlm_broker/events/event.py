"""Events of a run, each a frozen value, in the order in which they happened.

The events of a run tree are enough to rebuild it. They have the prompts (`CallStarted.prompt`, and `system` when it is
new), the replies, the code that ran and its output. Each call, tool and child names the block it belongs to. Text that
looks like a secret is replaced when an event is made, so that all receivers get the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

import msgspec

from rlm_broker.events.redaction import LONGEST_CHARS, fields_of, holds_no_secret, redacted
from rlm_broker.results import Block, Isolation
from rlm_broker.usage import Usage, UsageSummary
from sandbox_worker.wire.mime import MimeType

P = ParamSpec("P")

PREVIEW_CHARS = 80
"""Characters of a prompt or result in a preview; longer text is cut."""


class _OfARun(msgspec.Struct, frozen=True):
    run: str
    depth: int

    def __post_init__(self) -> None:
        fields = fields_of(type(self))
        if fields is not None and holds_no_secret(fields(self)):
            return
        for name in self.__struct_fields__:
            if name == "extra":  # numbers, and the tokens of a text that a trainer wants as it is
                continue
            value = getattr(self, name)
            if (shown := redacted(value, LONGEST_CHARS)) is not value:
                msgspec.structs.force_setattr(self, name, shown)


class EventOfRun(_OfARun, frozen=True, kw_only=True):
    """Fields of every event: its run and its place in the tree. `Event` is the union of all events.

    Example:
        ```python
        def follow(event: Event) -> None:
            if isinstance(event, BlockEnded):
                print(event.run, event.block, event.outcome.status)

        RLM("offline", on_event=follow)
        ```

    Attributes:
        run: Name of the run in its tree: "1" is the root, "1.2" the second child it started.
        depth: Depth of the run; 0 is the root.
        tree: Id of the run tree, equal to `Run.id`.
        n: Number of the event in its tree, from 1 and without a gap.
        time: Unix time in seconds.
    """

    tree: str = ""
    n: int = 0
    time: float = 0.0


class RunStarted(EventOfRun, frozen=True):
    """A run began.

    Example:
        ```python
        def follow(event: Event) -> None:
            if isinstance(event, RunStarted):
                print(event.depth, event.model, event.question)

        RLM("offline", on_event=follow).completion("a", "Which letter is it?")
        ```

    Attributes:
        question: Question of the root run; without one, the beginning of the text with the task in it. Of a child
            run, its whole prompt.
        model: Name of the run's model.
        metadata: Models, limits, versions and context of the root run, without secrets; empty for a child.
        block: Block of the parent run that started a child; 0 for the root.
        branch_of: Id of the tree whose root run it goes on from; empty for a run that begins anew.
        after_turn: Number of the turns of that run that came before.
        is_resumed: Whether it goes on in place of that run, so that it has paid for what that run has used.
    """

    question: str | None
    model: str
    metadata: Mapping[str, Any]
    block: int = 0
    branch_of: str = ""
    after_turn: int = 0
    is_resumed: bool = False


class ReplReady(EventOfRun, frozen=True):
    """The REPL of the run is isolated and has the context. Its start took `duration_s` seconds."""

    isolation: Isolation
    duration_s: float


class IterationStarted(EventOfRun, frozen=True):
    """A turn began: the model is being called. `number` counts from 1."""

    number: int


class Replied(EventOfRun, frozen=True):
    """The model replied in its turn. `not_run` has a sentence for each part of the reply that is not run, and why.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, Replied):
                print(event.number, event.text, *event.not_run)
        ```
    """

    number: int
    text: str
    not_run: tuple[str, ...] = ()


class BlockStarted(EventOfRun, frozen=True):
    """A code block of turn `iteration` is starting. `block` counts from 1 over the whole run."""

    iteration: int
    block: int
    code: str


class BlockPrinted(EventOfRun, frozen=True):
    """The running block printed text.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, BlockPrinted):
                print(event.text, end="")
        ```
    """

    block: int
    stream: Literal["stdout", "stderr"]
    text: str


class BlockEnded(EventOfRun, frozen=True):
    """A block ended, in one of the ways of `Block.status`.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, BlockEnded) and event.outcome.status != "ok":
                print(event.outcome.error)
        ```

    Attributes:
        outcome: The block, without its displays: the pictures are in `Completion.trajectory`.
        displays: One mapping for each display, from MIME type to the number of bytes or characters.
    """

    block: int
    outcome: Block
    displays: tuple[Mapping[MimeType, int], ...] = ()


class CallStarted(EventOfRun, frozen=True):
    """A language model is being called.

    Attributes:
        call: Number of the call in its tree, from 1.
        requested_model: Name asked for, or None.
        prompt: Last message of the conversation. Earlier messages are in earlier events. If code asks with chat
            messages, it is the list of them: dicts with `role` and `content`.
        system: System prompt, in the first call with it, else None.
        block: Block that makes the call; 0 for the run's own loop.
        batch: Number of the batch in its tree, from 1; 0 for a single call.
        of: Calls of the batch, one for each different prompt; 0 for a single call.
    """

    call: int
    requested_model: str | None
    prompt: str | list[Any]
    system: str | None = None
    block: int = 0
    batch: int = 0
    of: int = 0


class CallText(EventOfRun, frozen=True):
    """A piece of a reply, as it arrives, if the run is followed by `stream` or `start` and the client can stream.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, CallText):
                print(event.text, end="")
        ```
    """

    call: int
    text: str


class CallRetried(EventOfRun, frozen=True):
    """An attempt of a call failed for `reason`. Attempt number `attempt` begins anew after `wait_s` seconds."""

    call: int
    attempt: int
    wait_s: float
    reason: str


class CallEnded(EventOfRun, frozen=True):
    """A call was answered, or failed with `error`. A prompt refused before it is sent makes no call.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, CallEnded):
                print(event.model, event.usage.total_output_tokens, event.duration_s)
        ```

    Attributes:
        model: Name of the model that served the call.
        usage: Usage of this call.
        duration_s: Duration in seconds.
        response: Whole reply; empty if the call failed.
        extra: Token ids and log probabilities, as in `LMReply.extra`. A trace has them if its writer wants extras.
        batch, of: As in `CallStarted`.
        done: Calls of the batch ended so far, with this one; 0 for a single call.
        is_remembered: Whether a killed or interrupted block had paid. No request was sent, and `usage` is zero.
    """

    call: int
    model: str | None
    usage: Usage
    duration_s: float
    response: str
    error: str | None = None
    batch: int = 0
    done: int = 0
    of: int = 0
    extra: Mapping[str, Any] | None = None
    is_remembered: bool = False


class ToolStarted(EventOfRun, frozen=True):
    """Code in block `block` calls a tool. `call` counts the tool calls of the run, from 1; `arguments` is JSON text."""

    call: int
    block: int
    tool: str
    arguments: str


class ToolEnded(EventOfRun, frozen=True):
    """A tool returned `result`, as it is sent to the code, or failed with `error`, after `duration_s` seconds."""

    call: int
    tool: str
    duration_s: float
    result: str
    error: str | None = None


class RunEnded(EventOfRun, frozen=True):
    """A run ended, with a response or with `error`.

    Example:
        ```python
        async for event in rlm.stream("a", "How many?"):
            if isinstance(event, RunEnded) and event.depth == 0:
                print(event.how, event.cost_usd)
        ```

    Attributes:
        iterations: Turns taken.
        duration_s: Duration in seconds.
        usage: Usage of the run and everything below it, by model.
        kind: "answered", "stopped" after `Run.stop`, or the `kind` of the error.
        limit: Name of the limit that ended the run, or None.
        partial_answer: Best answer so far, if the run failed.
        cost_usd: Cost in US dollars; None if a price is not known.
    """

    response: str | None
    error: str | None
    iterations: int
    duration_s: float
    usage: UsageSummary
    kind: str = "answered"
    limit: str | None = None
    partial_answer: str | None = None
    cost_usd: float | None = None

    @property
    def how(self) -> str:
        """The end of the run in one word: "answered", "stopped" or "failed"."""
        return "stopped" if self.kind == "stopped" else "failed" if self.error else "answered"


class EventsMissed(EventOfRun, frozen=True):
    """`count` events were dropped because their follower was too slow. `n` is the number of the last of them.

    Example:
        ```python
        async for event in rlm.start("a", "How many?").events():
            if isinstance(event, EventsMissed):
                print(f"{event.count} events are lost")
        ```
    """

    count: int


Event = (
    RunStarted
    | ReplReady
    | IterationStarted
    | Replied
    | BlockStarted
    | BlockPrinted
    | BlockEnded
    | CallStarted
    | CallText
    | CallRetried
    | CallEnded
    | ToolStarted
    | ToolEnded
    | RunEnded
    | EventsMissed
)
"""Any event of a run. `match` with a case for each class, and `typing.assert_never` for the rest, misses none."""

Emit = Callable[[Event], None]
"""A callback for events. It runs on the run's event loop, so it must not block. Its first exception is logged."""


def all_of(receivers: Sequence[Emit]) -> Emit:
    """Return a receiver that passes each event on to all of these, also to those added to the list later.

    Example:
        ```python
        with TraceWriter("all.jsonl") as trace:
            RLM("offline", on_event=all_of([trace, print_events])).completion("a", "Which letter is it?")
        ```
    """

    def tell(event: Event) -> None:
        for receive in receivers:
            receive(event)

    return tell


class TreeEvents:
    """Numbers the events of one run tree, and passes each to all receivers.

    Args:
        tree: Id of the tree.
        receivers: Callbacks, called with each event in this order. If there are none, no event is made.
    """

    def __init__(self, tree: str, receivers: Sequence[Emit]) -> None:
        self.is_wanted = bool(receivers)
        self.tree = tree
        self._receivers = tuple(receivers)
        self._number = 0

    def of(self, run: str, depth: int) -> "Emitter":
        """Return an emitter for the events of one run, so that callers need not name the run."""
        return Emitter(self, run, depth)

    def emit(self, kind: Callable[..., Event], *fields: Any, **named: Any) -> None:
        """Make an event of class `kind`, and pass it to all receivers."""
        if self.is_wanted:
            self._number += 1
            event = kind(*fields, **named, tree=self.tree, n=self._number, time=round(time.time(), 6))
            for receive in self._receivers:
                receive(event)


class Emitter:
    """Emits the events of one run."""

    __slots__ = ("_depth", "_events", "_run")

    def __init__(self, events: TreeEvents, run: str, depth: int) -> None:
        self._events = events
        self._run = run
        self._depth = depth

    @property
    def is_wanted(self) -> bool:
        """Whether there are receivers. If not, callers need not compute expensive fields."""
        return self._events.is_wanted

    def __call__(self, kind: Callable[Concatenate[str, int, P], Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event of class `kind` with these further fields."""
        self._events.emit(kind, self._run, self._depth, *args, **kwargs)
