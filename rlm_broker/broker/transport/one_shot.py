"""The field's one-shot protocol, without I/O: one request, one reply, and the connection ends.

A request is a JSON object without a token:

    {"prompt": P | "prompts": [P, ...], "model"?: str | null, "depth"?: int}

`P` is text, one chat message or a list of them. If `prompts` is not empty, `prompt` is ignored. A reply has exactly
these keys:

    {"chat_completion": C | null, "chat_completions": [C, ...] | null, "error": str | null}

Both may hold lone surrogates as `\\ud800`, and NaN, so that `json` reads and writes them. For the usual ones, with one
text, msgspec does that in a tenth of the time. Errors have the words of the field's own handler wherever it has any.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from rlm_broker.errors import ProtocolViolation
from rlm_broker.results import Call, ChatMessage, Role
from rlm_broker.usage import UsageSummary
from sandbox_worker.wire.counts import MAX_VALUES, has_more_values_than
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.messages import decode_hello

Prompt = str | dict[str, Any] | list[Any]

MAX_REQUEST_BYTES = 8 << 20
"""Bytes of one request; a larger one is refused."""
MAX_BATCH_PROMPTS = 4_096
"""Prompts of one batch; a larger one is refused."""
MAX_MODEL_CHARS = 256
"""Characters of a model's name; a longer one is refused."""
MAX_PROMPT_NESTING = 100
"""Lists and objects inside each other; a deeper prompt is refused. `json` gives up near 1,000, and earlier in a deep
stack, but must be able to write the prompt again, into the reply to a paid call."""

_NOT_AN_OBJECT = "Request must be a JSON object"
_NO_PROMPT = "Missing 'prompt' or 'prompts' in request."
_NOT_A_PROMPT = "must be a string, a chat message or a list of chat messages"

_ROLES: dict[Any, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a client's message → role in ours. `developer` is a newer name of "system"."""


class OneShotRefused(ProtocolViolation):
    """A request cannot be served. The message is the `error` of the reply."""


class OneShotRequest(Struct, frozen=True):
    """One request.

    Attributes:
        prompts: One prompt for a single request. Unchanged, since the reply repeats them.
        is_batch: Whether the reply is a list, also for one prompt.
        model: Requested model; None leaves the choice to the handler.
        depth: Depth claimed by the caller; -1 if it claims none.
    """

    prompts: tuple[Prompt, ...]
    is_batch: bool
    model: str | None = None
    depth: int = -1


class _OneText(Struct, forbid_unknown_fields=True):
    """A request of one text. Any other request does not decode as one."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    model: Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARS)] | None = None
    depth: int = -1


_read_one_text = msgspec.json.Decoder(_OneText).decode
_write_text = msgspec.json.Encoder().encode


def is_one_shot(payload: bytes | bytearray) -> bool:
    """Whether a connection's first frame is of this protocol. All frames are, but for our `Hello`."""
    if b'"token"' not in payload:  # most requests: a search in the bytes takes less time than a failed decoding
        return True
    try:
        decode_hello(payload)
    except MessageInvalid:
        return True
    return "type" not in json.loads(payload)  # msgspec decodes a Struct without its tag if the type is not a union


def parse_request(payload: bytes) -> OneShotRequest:
    """Read a request. Unknown fields are ignored.

    Raises:
        OneShotRefused: The payload is not a request. No other exception is raised, for any bytes.
    """
    try:
        usual = _read_one_text(payload)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _parse_any(payload)
    return OneShotRequest((usual.prompt,), False, usual.model or None, usual.depth)


def _parse_any(payload: bytes) -> OneShotRequest:
    if has_more_values_than(MAX_VALUES, payload):
        raise OneShotRefused(f"the request holds more than {MAX_VALUES:,} values")
    try:
        request = json.loads(payload.decode())
    except (ValueError, RecursionError) as error:  # bad UTF-8 or JSON, an int of 5,000 digits; deep nesting
        raise OneShotRefused(str(error)) from None
    if not isinstance(request, dict):
        raise OneShotRefused(_NOT_AN_OBJECT)
    model = request.get("model")
    if model is not None and not isinstance(model, str):
        raise OneShotRefused("'model' must be a string or null")
    if model is not None and len(model) > MAX_MODEL_CHARS:  # bounded, since each reply of a batch repeats it
        raise OneShotRefused(f"'model' has {len(model):,} characters, more than {MAX_MODEL_CHARS}")
    depth = request.get("depth")
    return OneShotRequest(
        prompts=_prompts(request),
        is_batch=bool(request.get("prompts")),
        model=model or None,
        depth=depth if type(depth) is int else -1,  # not isinstance: a bool is not a depth
    )


def to_messages(prompt: Prompt) -> tuple[ChatMessage, ...]:
    """Return the conversation of a prompt. Text is one message of the user.

    Raises:
        OneShotRefused: A chat message has an unknown role or no content, or the list is empty.
    """
    if isinstance(prompt, str):
        return (ChatMessage("user", prompt),)
    messages = [prompt] if isinstance(prompt, dict) else prompt
    if not messages:
        raise OneShotRefused("a list of chat messages must not be empty")
    return tuple(map(_to_message, messages))


def single_reply(request: OneShotRequest, call: Call) -> bytes:
    """Return the reply to an answered single request. A failed one gets an `error_reply`."""
    completion = _completion(request.prompts[0], call)
    if isinstance(request.prompts[0], str):
        try:
            return _write_text({"chat_completion": completion, "chat_completions": None, "error": None})
        except (UnicodeEncodeError, TypeError):  # `json` escapes a lone surrogate, and writes classes below str
            pass
    return _reply(chat_completion=completion)


def batch_reply(request: OneShotRequest, outcomes: Sequence[Call | str], model_name: str) -> bytes:
    """Return the reply to a batch.

    Args:
        outcomes: For each prompt, in order: its call, or the reason of its failure.
        model_name: Model of the failed prompts.
    """
    return _reply(
        chat_completions=[
            _failed(prompt, outcome, request.model, model_name)
            if isinstance(outcome, str)
            else _completion(prompt, outcome)
            for prompt, outcome in zip(request.prompts, outcomes, strict=True)
        ]
    )


def error_reply(text: str) -> bytes:
    """Return the reply to a refused request."""
    # Never empty: a client that tests the truth of `error` would read it as success without a completion.
    return _reply(error=text or "unknown error")


def _prompts(request: dict[str, Any]) -> tuple[Prompt, ...]:
    batch, single = request.get("prompts"), request.get("prompt")
    if batch:
        if not isinstance(batch, list):
            raise OneShotRefused("'prompts' must be a list")
        if len(batch) > MAX_BATCH_PROMPTS:
            raise OneShotRefused(f"batch too large: {len(batch):,} > {MAX_BATCH_PROMPTS:,}")
        return tuple(_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(batch))
    if single:
        return (_prompt(single, "'prompt'"),)
    raise OneShotRefused(_NO_PROMPT)


def _prompt(prompt: object, name: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, dict | list):
        raise OneShotRefused(f"{name} {_NOT_A_PROMPT}")
    if _is_nested_deeper_than(MAX_PROMPT_NESTING, prompt):
        raise OneShotRefused(f"{name} is nested deeper than {MAX_PROMPT_NESTING} levels")
    return prompt


def _is_nested_deeper_than(limit: int, value: object) -> bool:
    level: list[object] = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _to_message(message: object) -> ChatMessage:
    if not isinstance(message, dict):
        raise OneShotRefused("a chat message must be an object with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise OneShotRefused("the 'role' of a chat message must be system, developer, user or assistant")
    if not isinstance(content, str | list):
        raise OneShotRefused("the 'content' of a chat message must be a string or a list of parts")
    return ChatMessage(_ROLES[role], content)


def _completion(prompt: Prompt, call: Call) -> dict[str, Any]:
    return {
        "root_model": call.root_model,
        "prompt": prompt,
        "response": call.response,
        "usage_summary": UsageSummary({call.root_model: call.usage}).to_dict(),
        "execution_time": call.execution_time,
        **_requested(call.requested_model, call.root_model),
    }


def _failed(prompt: Prompt, error: str, requested_model: str | None, model_name: str) -> dict[str, Any]:
    return {
        "root_model": model_name,
        "prompt": prompt,
        "response": "",
        "usage_summary": UsageSummary().to_dict(),
        "execution_time": 0.0,
        "error": f"llm() call failed - {error}",
        **_requested(requested_model, model_name),
    }


def _requested(requested_model: str | None, served_model: str) -> dict[str, str]:
    return {} if requested_model in (None, served_model) else {"requested_model": str(requested_model)}


def _reply(
    chat_completion: dict[str, Any] | None = None,
    chat_completions: list[dict[str, Any]] | None = None,
    error: str | None = None,
) -> bytes:
    reply = {"chat_completion": chat_completion, "chat_completions": chat_completions, "error": error}
    return json.dumps(reply).encode("ascii")
