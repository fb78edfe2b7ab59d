"""What the two ends of a door say to each other: one frozen Struct each, as JSON.

A field that the sender may not decide (depth, budget, deadline, the models it may use) is in no message at all: it
belongs to the session on the orchestrator's side.
"""

import itertools
import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sandbox_worker.wire.errors import MessageInvalid

T = TypeVar("T")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""In one pass over whatever there is: nothing is looked at twice, and the last string need not end."""

Status = Literal["ok", "error", "exited", "interrupted"]
"""How a block ended, as far as the REPL itself can tell: it ran through, raised, called `sys.exit`, got SIGINT."""

Stream = Literal["stdout", "stderr"]
Want = Literal["llm", "rlm", "budget", "tool"]
MAX_PROMPTS = 1 << 16
"""Of one query. Far above the default `max_batch_prompts`, which refuses in words: a slot for each of the 20 million
empty prompts that fit into a frame would be gigabytes."""
MAX_PARTS = 256
"""Of one prompt."""
MAX_STRINGS = MAX_PROMPTS + 64
"""In one message of a worker: each of a frame full of short ones would take 20 times its bytes in our memory."""
FEW_BYTES = 1 << 20
"""A message of this length may hold what it wants."""
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """A message is a value: frozen, compared by content, complete when it exists."""


# -- what a prompt may consist of, in the shape of OpenAI's API. Typed to the last field: of an empty list or dict, a
#    frame could hold so many that they would be gigabytes.


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageUrl


class Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str
    format: str


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    input_audio: Audio


Part = TextPart | ImagePart | AudioPart
Prompt = str | Annotated[list[Part], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]


# -- on every connection, before anything else -----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of a connection: the one-time token of a session. The host says it, never a worker."""

    token: str


class Welcome(Message, frozen=True):
    """The token was right; the connection now belongs to its session. From here on the other side is a REPL."""


# -- the worker says -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The REPL waits for its first block. No model code ran before this."""


class Query(Message, frozen=True):
    """Model code wants what only the orchestrator has. One thread of the REPL waits for the `Reply` with the same id.

    Attributes:
        id: `block:n`, counted up by the REPL.
        prompts: One or many; the reply has one slot for each, in order. Only for "llm" may they be content parts. For
            "budget" one, which says nothing; its slot's text is a JSON object. For "tool" a JSON object of `args` and
            `kwargs`; its slot's text is JSON, too.
        model: The model's wish. The session's policy decides.
        max_concurrent: How many of the prompts at once, at most; the orchestrator's own limit binds as well.
        timeout_s: For all prompts together; those that have no answer by then get an error.
        samples: Whether the same prompt twice is to be answered twice.
        tool: The tool's name, for "tool".
    """

    id: str
    want: Want
    prompts: Annotated[list[Prompt], msgspec.Meta(max_length=MAX_PROMPTS)]
    model: str | None = None
    system: str | None = None
    max_completion_tokens: PositiveInt | None = None
    max_concurrent: PositiveInt | None = None
    timeout_s: PositiveFloat | None = None
    samples: bool = False
    tool: str | None = None

    @property
    def texts(self) -> list[str]:
        """The prompts that are text."""
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]


class Output(Message, frozen=True):
    """Text that Python code printed, as it happens. (What C code and subprocesses write comes through init.)"""

    block: int
    stream: Stream
    text: str


class Result(Message, frozen=True):
    """A block has ended.

    Attributes:
        block: Number of the `Execute` that it answers.
        error: One line, for `error` (`ZeroDivisionError: division by zero`) and `exited` (what `sys.exit` was given).
        exit_code: For `exited`: what the process would have returned.
        final_answer: Text that code submitted by one of the agreed ways, or None.
        descriptor_output: Something may have been written to descriptors 1 and 2, so that init must be asked for it.
    """

    block: int
    status: Status
    error: str | None = None
    exit_code: int | None = None
    final_answer: str | None = None
    descriptor_output: bool = False


# -- the orchestrator says -------------------------------------------------------------------------------------------


class Execute(Message, frozen=True, omit_defaults=True):
    """Run one block. Its `Result` comes before the next `Execute` is sent.

    Attributes:
        tools: Names of functions of the orchestrator's that code may call. Said with the first block of a connection.
    """

    block: int
    code: str
    tools: list[str] = []


class Provide(Message, frozen=True):
    """From the next block on, code finds `value` under `name`. Said between two blocks."""

    name: str
    value: Any


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of one prompt: `text`, or why there is none. A failed child run may have both."""

    text: str = ""
    error: str | None = None


class Reply(Message, frozen=True):
    """One slot for each prompt of the `Query` with this id, in order."""

    id: str
    slots: list[Slot]


FromWorker = Ready | Query | Output | Result
FromOrchestrator = Execute | Provide | Reply


def _plain(value: object) -> str:
    """What msgspec does not take for text: `numpy.str_` and other subclasses, which model code hands around as text."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_hello = msgspec.json.Decoder(Hello)
_welcome = msgspec.json.Decoder(Welcome)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_orchestrator: msgspec.json.Decoder[FromOrchestrator] = msgspec.json.Decoder(FromOrchestrator)


def encode(message: Message) -> bytes:
    """The message as UTF-8 JSON.

    Text with lone surrogates, which UTF-8 cannot hold, is sent with "?" in their place: an answer with one
    broken character is worth more than none, and no peer can be made to see invalid UTF-8.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        escaped = json.dumps(msgspec.to_builtins(message, enc_hook=_plain), ensure_ascii=False)
        return escaped.encode("utf-8", "replace")


def decode_hello(payload: bytes) -> Hello:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_hello, payload)


def decode_welcome(payload: bytes) -> Welcome:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_welcome, payload)


def decode_from_worker(payload: bytes) -> FromWorker:
    """Parse and validate what a worker said.

    Raises:
        MessageInvalid: Anything else; no other exception leaves here, whatever the bytes.
    """
    if len(payload) > FEW_BYTES and payload.count(b'"') > 2 * MAX_STRINGS:
        strings = sum(1 for _ in itertools.islice(_STRING.finditer(payload), MAX_STRINGS + 1))
        if strings > MAX_STRINGS:
            raise MessageInvalid(f"more than {MAX_STRINGS:,} strings in a message")
    return _decode(_from_worker, payload)


def decode_from_orchestrator(payload: bytes) -> FromOrchestrator:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_from_orchestrator, payload)


def _decode(decoder: "msgspec.json.Decoder[T]", payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:  # 100,000 '[' is a RecursionError
        raise MessageInvalid(str(error) or type(error).__name__) from None
