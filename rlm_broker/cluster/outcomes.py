"""The outcome of a run as JSON: how an agent writes it down, and how the orchestrator reads it.

An agent is not trusted with more than the answer of its own runs. So each field is typed, errors are made of data by a
list of classes, and no object of Python is unpickled. Values of blocks that are no JSON stay on the node. The
orchestrator gets the text of a submitted value.
"""

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from rlm_broker.cluster.messages import Ended
from rlm_broker.errors import (
    ConfigurationError,
    ContextRefused,
    FailureCause,
    IsolationUnavailable,
    LimitReached,
    ModelFailed,
    OutputInvalid,
    ProtocolViolation,
    ReplClosed,
    RlmBrokerError,
    SandboxFailed,
    UnknownModel,
    ValueTooLarge,
    WorkerDied,
)
from rlm_broker.results import (
    Block,
    BlockStatus,
    ChatMessage,
    ChildTrace,
    Completion,
    Isolation,
    Iteration,
    PostMortem,
    Variable,
)
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.display import Display
from rlm_broker.values.text import printable
from sandbox_worker.wire.counting import has_more_values_than
from sandbox_worker.wire.mime import PICTURE_TYPES, MimeType
from sandbox_worker.wire.text_json import encode_written_out

OUTCOME_BYTES = 32 << 20
"""Maximum bytes of a completion on the link."""
OUTCOME_VALUES = 1 << 18
"""Maximum values of JSON in a completion, likewise."""
MOST_NUMBER = 1e18
"""Bound of the numbers among the attributes of an error: a float and a line of text can show them."""
MESSAGE_CHARS = 20_000
"""Maximum characters of an error's text; of a longer one the rest is cut."""

_FACTS = ("limit", "spent", "allowed", "cause", "retry_after_s", "answer", "layer", "reason", "remedy")
"""Attributes of errors that cross."""

_PLAIN: dict[str, type[RlmBrokerError]] = {
    kind.__name__: kind
    for kind in (ConfigurationError, ContextRefused, ReplClosed, SandboxFailed, UnknownModel, ValueTooLarge, WorkerDied)
}
"""Errors whose text says all."""


class BlockForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Block` on its way. Its displays are in their JSON form, where a picture is base64 text."""

    code: str
    status: BlockStatus
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    exit_code: int | None = None
    final_answer: str | None = None
    execution_time: float = 0.0
    limit: str | None = None
    post_mortem: PostMortem | None = None
    draft: str | None = None
    displays: tuple[dict[MimeType, str], ...] = ()
    displays_omitted: int = 0
    variables: tuple[Variable, ...] = ()


class _TurnForm(msgspec.Struct, frozen=True):
    """An `Iteration`."""

    number: int
    reply: str
    blocks: tuple[BlockForm, ...] = ()


class _CompletionForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `Completion`, without the context, the question and the parsed answer, which the orchestrator has."""

    response: str | None
    root_model: str
    iterations: int
    execution_time: float
    usage: dict[str, Usage] = {}
    usage_by_depth: tuple[tuple[int, Usage], ...] = ()
    limit: str | None = None
    is_stopped: bool = False
    isolation: Isolation | None = None
    messages: tuple[ChatMessage, ...] = ()
    trajectory: tuple[_TurnForm, ...] = ()
    child_traces: tuple[ChildTrace, ...] = ()


# -- on the node -----------------------------------------------------------------------------------------------------


def encoded_completion(completion: Completion) -> msgspec.Raw:
    """Return a completion as the value of `Ended.completion`. Lone surrogates in it are written out."""
    form = _CompletionForm(
        completion.response,
        completion.root_model,
        completion.iterations,
        completion.execution_time,
        dict(completion.usage_summary.model_usage_summaries),
        tuple(completion.usage_by_depth.items()),
        completion.limit,
        completion.is_stopped,
        completion.isolation,
        completion.messages,
        tuple(_TurnForm(turn.number, turn.reply, tuple(map(_written, turn.blocks))) for turn in completion.trajectory),
        completion.child_traces,
    )
    return msgspec.Raw(encode_written_out(form))


def facts_of(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an error that `Ended.facts` takes."""
    facts = {name: getattr(error, name, None) for name in _FACTS}
    return {name: value for name, value in facts.items() if isinstance(value, str | int | float)}


def _written(block: Block) -> BlockForm:
    fields = {each.name: getattr(block, each.name) for each in dataclasses.fields(block)}
    return BlockForm(**{**fields, "displays": tuple(display.to_dict() for display in block.displays)})


# -- in the orchestrator ---------------------------------------------------------------------------------------------


def read_completion(raw: msgspec.Raw) -> Completion:
    """Return the completion that an agent has sent. Its usage is what the agent says.

    Raises:
        ProtocolViolation: It is not of the form, or larger than an agent makes it.
    """
    data = bytes(raw)
    if len(data) > OUTCOME_BYTES or has_more_values_than(OUTCOME_VALUES, data):
        raise ProtocolViolation("an agent has sent a completion with more bytes or values than one may have")
    try:
        form = msgspec.json.decode(raw, type=_CompletionForm)
        turns = [Iteration(turn.number, turn.reply, tuple(map(read_block, turn.blocks))) for turn in form.trajectory]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolViolation(f"an agent has sent a completion that cannot be read: {error}") from None
    return Completion(
        response=form.response,
        root_model=form.root_model,
        depth=0,
        iterations=form.iterations,
        execution_time=form.execution_time,
        usage_summary=UsageSummary(form.usage),
        usage_by_depth=dict(form.usage_by_depth),
        limit=form.limit,
        is_stopped=form.is_stopped,
        isolation=form.isolation,
        messages=form.messages,
        trajectory=tuple(turns),
        child_traces=form.child_traces,
    )


def read_error(ended: Ended) -> RlmBrokerError:
    """Return the error that ended a run on a node, and that this side has not cancelled.

    One of an unknown class becomes a `SandboxFailed`.
    """
    facts = ended.facts
    message = printable(ended.message[:MESSAGE_CHARS]) or "the run failed on its node without a reason"
    match ended.error:
        case "LimitReached":
            limit = printable(_text(facts, "limit") or "(unknown)")
            return LimitReached(limit, _number(facts, "spent"), _number(facts, "allowed"), ended.partial_answer)
        case "OutputInvalid":
            invalid = OutputInvalid("", _text(facts, "answer") or "")
            invalid.args = (message,)
            return invalid
        case "IsolationUnavailable":
            return IsolationUnavailable(message, *(_line(facts, name) for name in ("layer", "reason", "remedy")))
        case "RunCancelled":
            return SandboxFailed("the node has ended the run as cancelled, and this side has not cancelled it")
        case "ModelFailed" | "ReplayDiverged":
            cause: Any = facts.get("cause")
            cause = cause if cause in get_args(FailureCause) else "provider"
            return ModelFailed(message, cause, _number(facts, "retry_after_s") or None)
    return _PLAIN.get(ended.error or "", SandboxFailed)(message)


def is_of_node(ended: Ended) -> bool:
    """Whether the node is at fault, by its own word or since it ended a run that this side has not cancelled."""
    return ended.is_of_node or ended.error == "RunCancelled"


def read_block(form: BlockForm) -> Block:
    """Return the block that a form stands for.

    Raises:
        ValueError: A picture in it is no base64 text.
    """
    fields = {name: getattr(form, name) for name in form.__struct_fields__}
    return Block(**{**fields, "displays": tuple(map(_display, form.displays))})


def _display(forms: Mapping[MimeType, str]) -> Display:
    def data(mime: MimeType, text: str) -> str | bytes:
        is_binary = mime in PICTURE_TYPES
        try:
            return base64.b64decode(text, validate=True) if is_binary else text
        except binascii.Error as error:
            raise ValueError(f"a picture is no base64 text: {error}") from None

    return Display({mime: data(mime, text) for mime, text in forms.items()})


def _text(facts: Mapping[str, Any], name: str) -> str | None:
    value = facts.get(name)
    return value[:MESSAGE_CHARS] if isinstance(value, str) else None


def _line(facts: Mapping[str, Any], name: str) -> str | None:
    text = _text(facts, name)
    return None if text is None else printable(text)


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < MOST_NUMBER else 0.0  # type: ignore[operator,return-value]
