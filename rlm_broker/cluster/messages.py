"""Messages between the broker of a cluster and the agent of a node: one frozen Struct each, encoded as JSON.

A connection is dialed by the agent. Its first frame is a `Join`, and the broker answers with `Welcome` or `Refused`.
From then on both sides send the messages below, in any order, and each side at least one in `BEAT_S` seconds.

A run is named by a number that the broker draws, and a call or a tool's call by a number that the agent draws within
the run. `Piece` announces bytes: the next frame of the connection is those bytes as they are.
"""

from typing import Annotated, Any, Literal

import msgspec

from rlm_broker.broker.clients.base import CallId
from rlm_broker.broker.routing import ModelPolicy
from rlm_broker.errors import FailureCause
from sandbox_worker.loading.form import ContextPiece

PROTOCOL = 1
"""Version of these messages. Both sides must have the same, and the same release of rlm-broker."""
BEAT_S = 0.5
"""Seconds between two heartbeats, in either direction."""
SILENCE_S = 2.0
"""Seconds of silence after which the other side counts as lost. A broker that is only busy gets more, see `silence`."""
JOIN_BYTES = 4 << 10
"""Maximum bytes of the first frame, before which no agent is trusted with more."""
PIECE_BYTES = 256 << 10
"""Maximum bytes of a piece of a context, so that no call waits long behind one."""
FRAME_BYTES = 64 << 20
"""Maximum bytes of any other frame."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """Base of all messages of a cluster."""


# -- joining ---------------------------------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """First frame of an agent.

    Attributes:
        token: A join token, or the secret of an earlier `Welcome`.
        protocol, release: Version of the messages and release of rlm-broker that the agent has.
        name: Name of the node, such as its host name.
        cpus, memory_bytes: CPUs and memory of the node that the agent may use.
        max_runs: Runs that the node takes at the same time.
    """

    token: str
    protocol: int
    release: str
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    cpus: Annotated[float, msgspec.Meta(gt=0, le=1 << 16)]
    memory_bytes: Count
    max_runs: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Welcome(Message, frozen=True):
    """Answer to a valid join.

    Attributes:
        node: Name of the node in the cluster.
        rejoin: Secret with which this agent may join again, as long as the broker lives.
    """

    node: str
    rejoin: str


class Refused(Message, frozen=True):
    """Answer to a join that is not valid, before the broker closes the connection. `why` is one sentence."""

    why: str


# -- in both directions ----------------------------------------------------------------------------------------------


class Beat(Message, frozen=True):
    """Heartbeat of the broker."""


class Load(Message, frozen=True):
    """Heartbeat of an agent.

    Attributes:
        runs: Runs that the node has now.
        free_bytes: Memory that is available on the node.
        is_full: Whether the node takes no further run for now, for want of memory.
    """

    runs: Count
    free_bytes: Count
    is_full: bool = False


# -- from the broker -------------------------------------------------------------------------------------------------


class ModelSpec(msgspec.Struct, frozen=True):
    """The facts about a client that a run asks for. No key and no address of it reaches a node."""

    name: str
    context_tokens: int | None = None
    is_priced: bool | None = None
    answers_types: bool = True


class RoutingSpec(msgspec.Struct, frozen=True):
    """The routes of one run, with the facts about each of its models.

    Attributes:
        models: Each client of the run once.
        root, sub: Places of the root and the sub client in `models`. `sub` None: the root client serves these, too.
        named: The registered names, each with the place of its client.
        routes: `Route.to`, `Route.match` and `Route.depths` of each route.
        policy: Which models code may name.
        opens: Whether the policy `open` leads to clients of names that are not registered.
    """

    models: tuple[ModelSpec, ...]
    root: Count
    sub: Count | None
    named: tuple[tuple[str, Count], ...]
    routes: tuple[tuple[str, str | None, str], ...]
    policy: ModelPolicy
    opens: bool = False


class ToolSpec(msgspec.Struct, frozen=True):
    """A function of the user's, as code sees it. It runs in the orchestrator."""

    name: str
    signature: str
    description: str
    timeout_s: float | None = None


class ToolsSpec(msgspec.Struct, frozen=True):
    """Functions and values for code. `values` are encoded by `sandbox_worker.wire.values`. `for_children` None: the
    same."""

    tools: tuple[ToolSpec, ...] = ()
    values: dict[str, str] = {}
    descriptions: dict[str, str] = {}
    for_children: "ToolsSpec | None" = None


class ContextSpec(msgspec.Struct, frozen=True):
    """A context: the digest by which a node knows it, its pieces in the order of their bytes, and its `ContextInfo`."""

    digest: str
    size_bytes: Count
    pieces: tuple[ContextPiece, ...]
    info: dict[str, Any]


class EngineSpec(msgspec.Struct, frozen=True):
    """Settings of the sandbox of a run. An agent keeps a sandbox open for each of the last few settings that came.

    Several `RLM`s may share one cluster, and agents may join before any of them is there. So a run brings them.
    """

    limits: dict[str, Any]
    isolation: str
    allow_exec: bool | None = None
    seed: int | None = None
    python: str | None = None
    packages: tuple[str, ...] | None = None


class Begin(Message, frozen=True):
    """Start of a run.

    Attributes:
        run: Number of the run on this connection.
        engine: Settings of the sandbox, equal for most runs: an agent opens one sandbox for all with the same.
        tree: Id of the run's tree, which its events have.
        systems: System prompts of the user's by depth; the last one holds for all deeper runs. Empty: the built-in one.
        output_schema: JSON Schema of the answer as text, for the prompt; None takes any text. The orchestrator judges
            each answer, see `Judge`.
        tells_events, tells_text: Whether the events of the run, and the pieces of its replies, are wanted.
    """

    run: int
    tree: str
    engine: EngineSpec
    question: str | None
    context: ContextSpec
    limits: dict[str, Any]
    routing: RoutingSpec
    tools: ToolsSpec
    systems: tuple[str, ...] = ()
    profile: str = "both"
    prologue: str | None = None
    output_schema: str | None = None
    is_auto: bool = False
    tells_events: bool = False
    tells_text: bool = False


class Piece(Message, frozen=True):
    """Bytes of a context that the node has asked for; the next frame has them."""

    digest: str
    at: Count


class NoContext(Message, frozen=True):
    """Answer to a `Need` of a context that the broker does not have any more."""

    digest: str


class Stop(Message, frozen=True):
    """Wish that a run ends with its best answer so far."""

    run: int


class Cancel(Message, frozen=True):
    """Wish that a run ends now. The agent answers with `Ended`."""

    run: int


class Reply(Message, frozen=True):
    """End of a call of a model: its answer, or why it failed. `used` is calls, input tokens, output tokens, cost."""

    run: int
    call: int
    model: str = ""
    text: str = ""
    used: tuple[int, int, int, float | None] = (0, 0, 0, None)
    stored: int = 0
    cached_tokens: int = 0
    requested: str | None = None
    problem: str | None = None
    failure: str | None = None
    cause: FailureCause | Literal["unknown_model"] = "provider"


class ReplyText(Message, frozen=True):
    """A piece of the answer to a call, as it comes."""

    run: int
    call: int
    text: str


class Retried(Message, frozen=True):
    """Another attempt of a call: its number, the seconds until then, and the reason."""

    run: int
    call: int
    number: int
    after_s: float
    why: str


class ToolReply(Message, frozen=True):
    """End of a call of a tool, as `sandbox_worker.wire.messages.Slot` has it."""

    run: int
    call: int
    text: str = ""
    error: str | None = None


class Judged(Message, frozen=True):
    """Verdict on an answer.

    Attributes:
        problem: Message for the model that says what is wrong with the answer; None takes the answer.
        is_final: Whether the model was told often enough, so that the run ends with `OutputInvalid`. `problem` is then
            the text of that error.
    """

    run: int
    call: int
    problem: str | None = None
    is_final: bool = False


# -- from an agent ---------------------------------------------------------------------------------------------------


class Need(Message, frozen=True):
    """Wish for a context, from its first byte."""

    digest: str


class Ask(Message, frozen=True):
    """A call of a model. The broker picks the client by the routes of the run: a node names no client.

    Attributes:
        session: Run in the tree on whose behalf the call is made; the sessions take turns.
        Others: As in `clients.base.LMRequest`.
    """

    run: int
    call: int
    session: str
    messages: tuple[tuple[str, str | list[Any]], ...]
    timeout_s: float
    model: str | None = None
    max_completion_tokens: int | None = None
    depth: Count = 0
    question: str | None = None
    is_loop: bool = False
    sample: int = 0
    id: CallId | None = None
    has_own_prompt: bool = False
    temperature: float | None = None
    wants_text: bool = False


class Leave(Message, frozen=True):
    """Wish that a call of a model or of a tool ends, since its caller does not wait for it any more."""

    run: int
    call: int


class UseTool(Message, frozen=True):
    """A call of one of the user's functions, with its arguments as code encoded them."""

    run: int
    call: int
    name: str
    arguments: str
    timeout_s: float
    is_of_child: bool = False


class Judge(Message, frozen=True):
    """Wish for a verdict on an answer of a wanted type. The orchestrator has the type, and keeps the value."""

    run: int
    call: int
    answer: str


MOST_EVENTS = 1_000
"""Maximum events in one message. The orchestrator's loop passes them on in one turn."""
EVENTS_BYTES = 16 << 20
"""Maximum bytes of the events in one message. One event may have a long prompt."""
EVENTS_VALUES = 1 << 15
"""Maximum values of JSON in the events of one message."""


class Happened(Message, frozen=True):
    """Events of a run, in their order, each as `trace` writes it."""

    run: int
    events: tuple[msgspec.Raw, ...]


class Ended(Message, frozen=True):
    """End of a run.

    Attributes:
        completion: The `Completion`, also of a run that failed: then it has what the run had by then.
        error: Class of the error that ended it, by its name in `rlm_broker.errors`; None if there is an answer.
        message: Text of that error.
        facts: Further attributes of the error, such as `limit`, `spent` and `allowed`.
        partial_answer: Best answer that a failed run had.
        is_of_node: Whether the node is at fault, for example for want of memory: another node may do it.
    """

    run: int
    completion: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: str | None = None
    message: str = ""
    facts: dict[str, Any] = {}
    partial_answer: str | None = None
    is_of_node: bool = False


class Quit(Message, frozen=True):
    """Last message of a side that leaves by itself: an agent, or the broker when the cluster ends. `why` is one
    sentence. An agent that hears it ends in order, and does not join again."""

    why: str


FromBroker = Beat | Begin | Piece | NoContext | Stop | Cancel | Reply | ReplyText | Retried | ToolReply | Judged | Quit
FromAgent = Load | Need | Ask | Leave | UseTool | Judge | Happened | Ended | Quit
