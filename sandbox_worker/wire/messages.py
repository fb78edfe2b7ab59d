"""What the two ends of a connection say to each other: one frozen Struct each, as JSON.

A field that the sender may not decide (depth, budget, deadline, the models it may use) is in no message at all: it
belongs to the session on the orchestrator's side.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.counting import split_prompts
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.frames import Payload
from sandbox_worker.wire.mime import PictureType, TextType
from sandbox_worker.wire.prompts import Prompt, Prompts
from sandbox_worker.wire.tasks import ChildContext
from sandbox_worker.wire.text_json import encode_written_out
from sandbox_worker.wire.variables import MAX_VARIABLES, VariableFact

T = TypeVar("T")

Status = Literal["ok", "error", "exited", "interrupted"]
"""How a block ended, as far as the REPL itself can tell: it ran through, raised, called `sys.exit`, got SIGINT."""

Stream = Literal["stdout", "stderr"]
"""Where a piece of output was printed."""
Want = Literal["llm", "rlm", "budget", "tool", "submit"]
"""What a query asks for: a completion, a child run, what may still be used, a call of a tool, a check of what code
submits."""
MAX_PROMPTS = 1 << 16
"""Of one query. Far above the default `max_batch_prompts`, which refuses in words: a slot for each of the 20 million
empty prompts that fit into a frame would be gigabytes."""
FEW_BYTES = 1 << 20
"""Longest message in bytes of any kind. A longer one must be a query, a result or a display."""
MAX_QUERY_BYTES = 16 << 20
"""Bytes of a `Query` as JSON. A larger batch is asked in parts; reading one of this size takes up to 100 ms."""
MAX_RESULT_BYTES = 16 << 20
"""Bytes of a `Result` as JSON, which is to say of a final answer; the REPL reports a larger one as an error."""
MAX_DISPLAY_BYTES = 4 << 20
"""Bytes of a `Display` as JSON, in which a picture takes four thirds of its own; the REPL leaves out a larger one."""
MAX_DISPLAYS = 32
"""Displays of one block. The REPL counts what is over."""
MAX_DISPLAYS_BYTES = 16 << 20
"""Bytes of all displays of one block as JSON."""
EncodedValue = msgspec.Raw | msgspec.UnsetType
"""A value as `values` encodes it, or none."""
MAX_DRAFT_CHARS = 1 << 16
"""Characters of the draft of an answer; the rest of a longer one is cut."""
MAX_RELEASE_CHARS = 40
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """A message is a value: frozen, compared by content, complete when it exists."""


# -- on every connection, before anything else -----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of a connection: the one-time token of a session. The orchestrator says it, never a worker."""

    token: str


class Welcome(Message, frozen=True):
    """The token was right; the connection now belongs to its session. From here on the other side is a REPL."""


# -- the worker says -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The REPL waits for its first block. No model code ran before this.

    Attributes:
        release: Of the worker's code. The orchestrator talks to its own release alone: one that was installed over it
            while it runs may have other messages.
    """

    release: Annotated[str, msgspec.Meta(max_length=MAX_RELEASE_CHARS)] = "unknown"


class Query(Message, frozen=True, omit_defaults=True):
    """Model code wants what only the orchestrator has. One thread of the REPL waits for the `Reply` with the same id.

    Attributes:
        id: `block:n`, counted up by the REPL.
        prompts: One or many; the reply has one slot for each, in order. Only for "llm" may they be content parts or
            chat messages. For "budget" one, which says nothing; its slot's text is a JSON object. For "tool" a JSON
            object of `args` and `kwargs`, and its slot's text is a value: both as `values` encodes them. For "submit" a
            JSON object of the fields, encoded in the same way; its slot has no text.
        model: The model's wish. The session's policy decides.
        max_concurrent: How many of the prompts at once, at most; the orchestrator's own limit binds as well.
        timeout_s: For all prompts together; those that have no answer by then get an error.
        samples: Whether the same prompt twice is to be answered twice.
        tool: The tool's name, for "tool".
        contexts: For "rlm" the context of each prompt's child, None where the prompt is that, too; or none at all.
        repl: Whether children get a REPL; None leaves it to the orchestrator, which also gives none below `max_depth`.
        temperature: Of sampling; None leaves it to the client.
    """

    id: str
    want: Want
    prompts: Annotated[Sequence[Prompt], msgspec.Meta(max_length=MAX_PROMPTS)]
    model: str | None = None
    system: str | None = None
    max_completion_tokens: PositiveInt | None = None
    max_concurrent: PositiveInt | None = None
    timeout_s: PositiveFloat | None = None
    samples: bool = False
    tool: str | None = None
    contexts: Annotated[Sequence[ChildContext | None], msgspec.Meta(max_length=MAX_PROMPTS)] = ()
    repl: bool | None = None
    temperature: Temperature | None = None

    @property
    def texts(self) -> list[str]:
        """The prompts that are text."""
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    @property
    def is_text(self) -> bool:
        """Whether all prompts are text."""
        prompts = self.prompts
        if isinstance(prompts, Prompts):
            return all(map(prompts.is_text, range(len(prompts))))
        return all(isinstance(prompt, str) for prompt in prompts)


class Output(Message, frozen=True):
    """Text that Python code printed, as it happens. (What C code and subprocesses write comes through init.)"""

    block: int
    stream: Stream
    text: str


class Display(Message, frozen=True, omit_defaults=True):
    """Something that code has shown, as it happens: one thing in one or more forms.

    Attributes:
        texts, pictures: MIME type → what it is in that form.
    """

    block: int
    texts: dict[TextType, str] = {}
    pictures: dict[PictureType, bytes] = {}


class Result(Message, frozen=True, omit_defaults=True):
    """A block has ended.

    Attributes:
        block: Number of the `Execute` that it answers.
        error: One line, for `error` (`ZeroDivisionError: division by zero`) and `exited` (what `sys.exit` was given).
        exit_code: For `exited`: what the process would have returned.
        final_answer: Text that code submitted by one of the agreed ways, or None.
        descriptor_output: Something may have been written to descriptors 1 and 2, so that init must be asked for it.
        value: What the `Execute` asked for, as `values` encodes it, if it asked for something and there is one.
        value_problem: Why there is none.
        final_value: What was submitted, where that is no text.
        final_value_problem: Why it is not there although it is no text.
        draft: Text in `answer["content"]` that is not submitted: the best answer so far. At most `MAX_DRAFT_CHARS`.
        displays_omitted: How many displays were too large, or too many.
        variables: What the block has made or changed, if the `Execute` asked for it.
    """

    block: int
    status: Status
    error: str | None = None
    exit_code: int | None = None
    final_answer: str | None = None
    descriptor_output: bool = False
    value: EncodedValue = msgspec.UNSET
    value_problem: str | None = None
    final_value: EncodedValue = msgspec.UNSET
    final_value_problem: str | None = None
    draft: str | None = None
    displays_omitted: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    variables: Annotated[list[VariableFact], msgspec.Meta(max_length=MAX_VARIABLES)] = []


# -- the orchestrator says -------------------------------------------------------------------------------------------


class Execute(Message, frozen=True, omit_defaults=True):
    """Run one block. Its `Result` comes before the next `Execute` is sent.

    Attributes:
        tools: Names of all functions of the orchestrator's that code may call from now on; None leaves them as they
            are.
        wants_value: Whether the result is to have the value of the last statement, if that is an expression.
        names: Variables whose values the result is to have, as a list. Then there is no code.
        stdin: What code reads from `sys.stdin`; None is nothing.
        submit: The block ends where it submits, and these are the names of the fields that it has to submit; none for
            any value. None lets it go on.
        tells_variables: Whether the result is to tell which variables the block has made or changed.
    """

    block: int
    code: str
    tools: list[str] | None = None
    wants_value: bool = False
    names: list[str] = []
    stdin: str | None = None
    submit: list[str] | None = None
    tells_variables: bool = False


class Environment(Message, frozen=True):
    """What the process begins with. Said before the first block of a connection.

    Attributes:
        variables: Of `os.environ`.
        seed: What `random` and numpy's global generator begin with; None leaves them as they are.
    """

    variables: dict[str, str] = {}
    seed: int | None = None


class Provide(Message, frozen=True, omit_defaults=True):
    """From the next block on, code finds `value` under `name`. Said between two blocks.

    Attributes:
        value: As `values` encodes it.
        is_restored: Whether each later block finds it again, whatever code has made of the name.
    """

    name: str
    value: msgspec.Raw
    is_restored: bool = True


class Attach(Message, frozen=True):
    """From the next block on, code finds a context under `name`. Said between two blocks.

    Attributes:
        pieces: Init has handed their memfds to the REPL, in this order.
    """

    name: str
    pieces: Annotated[list[ContextPiece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of one prompt: `text`, or why there is none. A failed child run may have both.

    Attributes:
        note: What code is told on stderr about the way in which the prompt was answered.
    """

    text: str = ""
    error: str | None = None
    note: str | None = None


class Reply(Message, frozen=True):
    """One slot for each prompt of the `Query` with this id, in order."""

    id: str
    slots: list[Slot]


class _RawQuery(msgspec.Struct, frozen=True, tag_field="type", tag="query", forbid_unknown_fields=True):
    """A `Query` of which nothing is decoded. A field that was left out is empty."""

    id: msgspec.Raw
    want: msgspec.Raw
    prompts: msgspec.Raw
    model: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_concurrent: msgspec.Raw = msgspec.Raw()
    timeout_s: msgspec.Raw = msgspec.Raw()
    samples: msgspec.Raw = msgspec.Raw()
    tool: msgspec.Raw = msgspec.Raw()
    contexts: msgspec.Raw = msgspec.Raw()
    repl: msgspec.Raw = msgspec.Raw()
    temperature: msgspec.Raw = msgspec.Raw()


FromWorker = Ready | Query | Output | Display | Result
FromOrchestrator = Execute | Environment | Provide | Attach | Reply


def plain(value: object) -> str | int | float:
    """Return the plain value of a subclass such as `numpy.str_` or `numpy.float64`, which msgspec does not take."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


_MOST_BYTES = {b'{"type":"result"': MAX_RESULT_BYTES, b'{"type":"display"': MAX_DISPLAY_BYTES}
"""How a message begins that may have more than `FEW_BYTES`: how many it may have."""
_encoder = msgspec.json.Encoder(enc_hook=plain)
_hello = msgspec.json.Decoder(Hello)
_welcome = msgspec.json.Decoder(Welcome)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_raw_query = msgspec.json.Decoder(_RawQuery)
_from_orchestrator: msgspec.json.Decoder[FromOrchestrator] = msgspec.json.Decoder(FromOrchestrator)


def encode(message: Message) -> bytes:
    """The message as UTF-8 JSON.

    In what is to be read, output and answers of models, lone surrogates are written out, see `text_json`.

    Raises:
        UnicodeEncodeError: There are some in what code works with: a block, a value, a question.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        if isinstance(message, Execute | Environment | Provide | Attach | Query):
            raise
        return encode_written_out(message, plain)


def decode_hello(payload: Payload) -> Hello:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_hello, payload)


def decode_welcome(payload: Payload) -> Welcome:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_welcome, payload)


def decode_from_worker(payload: Payload) -> FromWorker:
    """Parse and validate what a worker said.

    The prompts of a query of more than `FEW_BYTES` are left as they came, see `Prompts`: a decoded text may take four
    times its bytes, and decoding 64 MB of it would keep the event loop for 0.2 s.

    Raises:
        MessageInvalid: Anything else; no other exception leaves here, whatever the bytes.
    """
    if len(payload) <= FEW_BYTES:
        return _decode(_from_worker, payload)
    if payload.startswith(b'{"type":"query"'):  # the tag comes first in all that a worker encodes
        return _decode_large_query(payload)
    most = next((most for begin, most in _MOST_BYTES.items() if payload.startswith(begin)), 0)
    if len(payload) > most:
        raise MessageInvalid(f"a message of {len(payload):,} bytes that may not be as long")
    return _decode(_from_worker, payload)


def _decode_large_query(payload: Payload) -> FromWorker:
    if len(payload) > MAX_QUERY_BYTES:
        raise MessageInvalid(f"a query of {len(payload):,} bytes, more than {MAX_QUERY_BYTES:,}")
    raw = _decode(_raw_query, payload)
    fields = [(name, bytes(getattr(raw, name))) for name in raw.__struct_fields__ if name != "prompts"]
    if sum(len(value) for _, value in fields) > FEW_BYTES:
        raise MessageInvalid(f"a query with more than {FEW_BYTES:,} bytes beside its prompts")
    head = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields if value)
    query = _decode(_from_worker, b'{"type":"query","prompts":[],%s}' % head)
    prompts = split_prompts(bytes(raw.prompts), MAX_PROMPTS)
    if prompts is None:
        raise MessageInvalid(f"prompts are text, content parts or chat messages, {MAX_PROMPTS:,} at most")
    return msgspec.structs.replace(query, prompts=Prompts(prompts))


def decode_from_orchestrator(payload: Payload) -> FromOrchestrator:
    """Raises: MessageInvalid, see `decode_from_worker`."""
    return _decode(_from_orchestrator, payload)


def _decode(decoder: "msgspec.json.Decoder[T]", payload: Payload) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:  # 100,000 '[' is a RecursionError
        raise MessageInvalid(str(error) or type(error).__name__) from None
