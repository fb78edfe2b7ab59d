"""Messages of the two ends of a connection: one frozen Struct each, encoded as JSON.

No message has a field that its sender may not decide: depth, budget, deadline, the models it may use. Such facts
belong to the session, on the orchestrator's side.
"""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.counts import has_more_objects_than
from sandbox_worker.wire.errors import FrameTooLarge, MessageInvalid, QueryTooLarge
from sandbox_worker.wire.frames import PREFIX, Beginning, Payload, encode_frame
from sandbox_worker.wire.mime import PictureType, TextType
from sandbox_worker.wire.prompts import ChildContext, Prompt
from sandbox_worker.wire.text_json import encode_growing, encode_written_out

T = TypeVar("T")

Status = Literal["ok", "error", "exited", "interrupted"]
"""End of a block, as the REPL reports it: the code ran through, raised, called `sys.exit`, or got SIGINT."""

Stream = Literal["stdout", "stderr"]
"""Stream to which a piece of output was printed."""
Want = Literal["llm", "rlm", "budget", "tool", "stdin", "keep", "wait", "cancel"]
"""Kind of a query: a completion, a child run, the remaining means, a call of a tool, more of stdin, a REPL
for several tasks of one child; or a wait for children that run in the background, or their end."""
DONE = "done"
"""Text of a slot of "wait" whose query was answered."""
MAX_PROMPTS = 1 << 16
"""Maximum prompts of one query; a query with more is invalid. Without this bound, a slot for each of the 20 million
empty prompts that fit into a frame would take gigabytes. `max_batch_prompts`, far lower by default, answers with an
error text instead."""
FEW_BYTES = 1 << 20
"""Maximum bytes of a message from a worker, of any kind. A longer message must be a query, a result or a display."""
MAX_QUERY_BYTES = 4 << 20
"""Maximum bytes of a `Query` as JSON; a larger one is answered with an error. The REPL asks a larger batch in parts."""
MAX_QUERY_OBJECTS = 1 << 18
"""Maximum JSON objects in a `Query` of more than `FEW_BYTES`; a query with more is invalid. An empty context of a child
has two bytes, and takes 90 in memory. No query of the REPL's own code has so many."""
MAX_RESULT_BYTES = 16 << 20
"""Maximum bytes of a `Result` as JSON, and of other messages with values. The REPL reports a larger result, which has a
long final answer, as an error."""
MAX_AGAIN_BYTES = 1 << 16
"""Largest length of a text or bytes object given between two blocks that the REPL does not keep by its name. If a
longer one is given again, its `Provide` has no value."""
MAX_DISPLAY_BYTES = 4 << 20
"""Maximum bytes of a `DisplayMessage` as JSON; the REPL leaves out a larger one. Base64 makes a picture longer by a
third."""
MAX_DISPLAYS = 32
"""Maximum displays of one block. The REPL drops further ones and reports their number."""
MAX_DISPLAYS_BYTES = 16 << 20
"""Maximum bytes of all displays of one block as JSON. The REPL drops further ones and reports their number."""
EncodedValue = msgspec.Raw | msgspec.UnsetType
"""Value, encoded by `values`; or UNSET for no value."""
MAX_DRAFT_CHARS = 1 << 16
"""Maximum characters of the draft of an answer; the REPL cuts the rest."""
MAX_RELEASE_CHARS = 40
"""Maximum characters of a release in `Ready`; a message with more is invalid."""
MAX_VARIABLES = 40
"""Maximum variables in the result of one block; the REPL leaves out further ones."""
MAX_VARIABLE_CHARS = 60
"""Maximum characters of a variable's name and of its type's name. A variable with a longer name is left out; a longer
type name is cut."""
MAX_DIMENSIONS = 8
"""Maximum dimensions of a shape. An array with more is reported without a size."""
Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Length | Annotated[tuple[Length, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
"""Length of a value, or the shape of an array or a table."""
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_VARIABLE_CHARS)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """Base of all messages on a connection. A message is a value: frozen, compared by content, complete once made."""


# -- on every connection, before anything else -----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of a connection, with the one-time token of a session. The orchestrator sends it, never a worker."""

    token: str


class Welcome(Message, frozen=True):
    """Answer to a valid token: the connection belongs to its session now. From here on the other side is a REPL."""


# -- from the worker -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Report that the REPL waits for its first block. No model code ran before this.

    Attributes:
        release: Release of the worker's code. The orchestrator refuses any release but its own: after an upgrade in
            place, workers load newer code, whose messages may differ.
    """

    release: Annotated[str, msgspec.Meta(max_length=MAX_RELEASE_CHARS)] = "unknown"


class Query(Message, frozen=True, omit_defaults=True):
    """Request of model code to the orchestrator. The `Reply` has the same id. One thread of the REPL waits for it,
    unless the query is in the background.

    Example:
        ```python
        async def answer(query: Query) -> list[Slot]:
            print(query.want, query.model)
            return [Slot(f"{len(query.texts)} prompts")] * len(query.prompts)

        sandbox.repl("some text", answer)
        ```

    Attributes:
        id: `block:n`, where the REPL counts n upwards.
        want: Kind of the query.
        prompts: Prompts in order; the reply has one slot for each. Their meaning depends on `want`:

            - "llm": texts, content parts or chat messages.
            - "rlm": texts, the tasks of child runs.
            - "budget": one empty text. The slot's text is a JSON object.
            - "tool": one JSON object of `args` and `kwargs`. The slot's text is the result. `values` encodes both.
            - "stdin": one empty text. The slot's text has one character for each byte; none at the end.
            - "keep": one empty text, in the background. The REPL lives as long as the query is open.
            - "wait": ids of background queries. A slot's text is "done" if that query was answered.
            - "cancel": ids of background queries. The reply comes when they have ended.
        model: Name of the model that code wishes; the session's policy decides. None leaves the choice to the policy.
        system: System prompt of the calls, or None.
        max_completion_tokens: Maximum output tokens of each call; None leaves it to the orchestrator.
        max_concurrent: Maximum prompts answered at the same time. The orchestrator's own limit holds as well.
        timeout_s: Time for all prompts together, in seconds. Prompts without an answer by then get an error.
        samples: Whether equal prompts are separate samples, each with an answer of its own.
        tool: Name of the tool, for "tool".
        contexts: For "rlm", the context of each prompt's child, or None for a child whose context is the prompt. Empty
            if no child has a context of its own.
        repl: Whether children get a REPL. None leaves it to the orchestrator. Below `max_depth` no child gets one.
        temperature: Sampling temperature; None leaves it to the client.
        background: Whether no thread waits for the reply, and the query may outlive its block. It ends with its
            connection at the latest.
        child: For "rlm", the id of the open "keep" query whose REPL the child uses; None for a REPL of its own.
        count: For "wait", the number of answered queries to wait for; 0 only looks.
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
    background: bool = False
    child: str | None = None
    count: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def texts(self) -> list[str]:
        """The prompts that are text."""
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    @property
    def is_text(self) -> bool:
        """Whether all prompts are text."""
        return all(isinstance(prompt, str) for prompt in self.prompts)


class Submit(Message, frozen=True):
    """Request to check the fields that a block submits: a query of one prompt. The slot of its `Reply` has no text.

    Attributes:
        id: As in a `Query`.
        fields: Object of the fields, encoded by `values`.
    """

    want: ClassVar = "submit"
    prompts: ClassVar = ("",)
    contexts: ClassVar = ()
    background: ClassVar = False

    id: str
    fields: msgspec.Raw


class Values(Message, frozen=True, omit_defaults=True):
    """Answer to a `Read`: the variables, as in a `Result`."""

    block: int
    number: int
    value: EncodedValue = msgspec.UNSET
    value_problem: str | None = None


class Output(Message, frozen=True):
    """Text that Python code printed, sent while the block runs. (Output of C code and subprocesses comes from init.)"""

    block: int
    stream: Stream
    text: str


class DisplayMessage(Message, frozen=True, omit_defaults=True, tag="display"):
    """One object that code has shown, in one or more forms, sent while the block runs.

    Attributes:
        texts: MIME type → text.
        pictures: MIME type → bytes of the picture.
    """

    block: int
    texts: dict[TextType, str] = {}
    pictures: dict[PictureType, bytes] = {}


class VariableFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A variable of model code. The REPL reports it, so all fields are claims of model code, not facts."""

    name: ShortText
    type: ShortText
    size: Size | None = None


class Result(Message, frozen=True, omit_defaults=True):
    """End of a block.

    Attributes:
        block: Number of the `Execute` that this answers.
        status: End of the block.
        error: One line, for "error" (`ZeroDivisionError: division by zero`) and "exited" (argument of `sys.exit`).
        exit_code: Exit code that the process would have returned, for "exited".
        final_answer: Text that code submitted, or None.
        descriptor_output: Whether the block may have written to descriptors 1 and 2. If so, the orchestrator asks init
            for this output.
        value: Value that the `Execute` asked for; UNSET if it asked for none, or if there is none. For `names` it is a
            list of two objects: name → value, and name → reason why there is no value.
        value_problem: Reason why the requested value is missing.
        final_value: Submitted value, if it is not a text.
        final_value_problem: Reason why `final_value` is missing although the submitted value is not a text.
        draft: Text in `answer["content"]` that is not submitted: the best answer so far. At most `MAX_DRAFT_CHARS`.
        displays_omitted: Number of dropped displays, since they were too large or too many.
        variables: Variables that the block made or changed, if the `Execute` asked for them.
        texts, pictures: Forms of the last expression's value by MIME type, as in a display, if `Execute.echo` is false.
        error_type, error_text, traceback: Class, text and traceback of the exception, if `Execute.echo` is false.
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
    texts: dict[TextType, str] = {}
    pictures: dict[PictureType, bytes] = {}
    error_type: str | None = None
    error_text: str | None = None
    traceback: str | None = None


# -- from the orchestrator -------------------------------------------------------------------------------------------


class Execute(Message, frozen=True, omit_defaults=True):
    """Command to run one block. The orchestrator waits for its `Result` before it sends the next `Execute`.

    Attributes:
        tools: Names of all tools that code may call from now on; None leaves them as they are.
        wants_value: Whether the result shall have the value of the last statement, if that is an expression.
        names: Variables whose values the result shall have; none stands for all public ones. Then there is no code.
            None asks for no variables.
        stdin: Text that code reads from `sys.stdin`; None is an empty one.
        asks_stdin: Whether code gets more of `sys.stdin` by a query each time that it needs it.
        submit: Names of the fields that the block must submit; the block ends where it submits. An empty list permits
            any value. With None the block continues after it has submitted any value.
        tells_variables: Whether the result shall list the variables that the block made or changed.
        echo: Whether the last expression and a traceback are printed. If not, the result has them.
        checkpoint: Processes that checkpoints may have beyond those of code: the copies, and the parent of one. The
            REPL makes one before the block, by the socket that init has handed to it. With 0 it makes none.
        becomes_hub: Whether the REPL becomes a hub before the block, by such a socket. A fork of it runs the block.
    """

    block: int
    code: str
    tools: list[str] | None = None
    wants_value: bool = False
    names: list[str] | None = None
    stdin: str | None = None
    submit: list[str] | None = None
    tells_variables: bool = False
    echo: bool = True
    asks_stdin: bool = False
    checkpoint: int = 0
    becomes_hub: bool = False


class Environment(Message, frozen=True, omit_defaults=True):
    """Environment of the process. The orchestrator sends it before the first block of a connection.

    Attributes:
        variables: Variables set in `os.environ`.
        seed: Seed of `random` and of numpy's global generator; None leaves them as they are.
        scaffold: Whether code finds names that its caller did not give, such as `llm_query` and `answer`.
    """

    variables: dict[str, str] = {}
    seed: int | None = None
    scaffold: bool = True


class Provide(Message, frozen=True, omit_defaults=True):
    """Value that code finds under `name` from the next block on. Sent between two blocks.

    Attributes:
        value: Value, encoded by `values`; UNSET for the text or bytes object that the name was given last, which has
            more than `MAX_AGAIN_BYTES`.
        is_restored: Whether the REPL restores the variable before each block, even if code has reassigned it.
    """

    name: str
    value: EncodedValue = msgspec.UNSET
    is_restored: bool = True


class Read(Message, frozen=True):
    """Request for variables, sent while the block waits for a reply. A thread of the block that waits answers it.

    Attributes:
        number: Number of the request, from 1 in each connection.
        names: As in `Execute`.
    """

    block: int
    number: int
    names: list[str]


class Attach(Message, frozen=True):
    """Context that code finds under `name` from the next block on. Sent between two blocks.

    Attributes:
        pieces: Pieces of the context. Init has handed their memfds to the REPL before, in this order.
    """

    name: str
    pieces: Annotated[list[ContextPiece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Answer to one prompt, or the reason why there is none.

    Example:
        ```python
        Slot("Paris")
        Slot(error="the model is overloaded")
        ```

    Attributes:
        text: The answer. A failed child run may have both a text and an error.
        error: Reason of the failure, or None.
        note: Remark about the answer for stderr of the block, or None.
    """

    text: str = ""
    error: str | None = None
    note: str | None = None


class Reply(Message, frozen=True):
    """Answer to the `Query` with this id: one slot for each prompt, in order."""

    id: str
    slots: list[Slot]


FromWorker = Ready | Query | Submit | Values | Output | DisplayMessage | Result
FromOrchestrator = Execute | Environment | Provide | Attach | Reply | Read


def plain(value: object) -> str | int | float:
    """Return the plain value of a subclass such as `numpy.str_` or `numpy.float64`, which msgspec refuses.

    Raises:
        TypeError: The value is neither text nor a number.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


MOST_BYTES: dict[type[Message], int] = {
    Query: MAX_QUERY_BYTES,
    Submit: MAX_RESULT_BYTES,
    Values: MAX_RESULT_BYTES,
    Result: MAX_RESULT_BYTES,
    DisplayMessage: MAX_DISPLAY_BYTES,
}
"""Kind of a message from a worker that may be longer than `FEW_BYTES` → its maximum bytes."""
_MOST_BYTES = {b'{"type":"%s"' % str(kind.__struct_config__.tag).encode(): most for kind, most in MOST_BYTES.items()}
"""Beginning of such a message, as msgspec writes it → its maximum bytes."""
_QUERY = re.compile(rb'\{"type":"query","id":"([^"\\]++)"')
"""Beginning of a `Query`, as msgspec writes it, with its id."""
_encoder = msgspec.json.Encoder(enc_hook=plain)
_hello = msgspec.json.Decoder(Hello)
_welcome = msgspec.json.Decoder(Welcome)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_orchestrator: msgspec.json.Decoder[FromOrchestrator] = msgspec.json.Decoder(FromOrchestrator)


def encode(message: Message) -> bytes:
    """Return the message as UTF-8 JSON. Lone surrogates in output and in answers are written out, see `text_json`.

    Raises:
        UnicodeEncodeError: Text that code works with (a block, a value, a question) has lone surrogates. Such text must
            arrive unchanged.
    """
    try:
        return encode_growing(message, _encoder)
    except UnicodeEncodeError:
        if isinstance(message, Execute | Environment | Provide | Attach | Read | Query):
            raise
        return encode_written_out(message, plain)


def framed(message: Message, max_frame_bytes: int) -> bytes | bytearray:
    """Return the frame of a message, like `encode_frame(encode(message), max_frame_bytes)`, and copy no byte of it.

    Raises:
        FrameTooLarge: The message is longer than `max_frame_bytes`.
        UnicodeEncodeError: As for `encode`.
    """
    frame = bytearray(PREFIX.size)
    try:
        _encoder.encode_into(message, frame, PREFIX.size)
    except UnicodeEncodeError:
        return encode_frame(encode(message), max_frame_bytes)
    payload_bytes = len(frame) - PREFIX.size
    if payload_bytes > max_frame_bytes:
        raise FrameTooLarge(payload_bytes, max_frame_bytes)
    PREFIX.pack_into(frame, 0, payload_bytes)
    return frame


def decode_hello(payload: Payload) -> Hello:
    """Parse and validate the first frame of a connection. Errors: see `decode_from_worker`."""
    return _decode(_hello, payload)


def decode_welcome(payload: Payload) -> Welcome:
    """Parse and validate the answer to a token. Errors: see `decode_from_worker`."""
    return _decode(_welcome, payload)


def most_bytes(beginning: Payload) -> int:
    """Return the maximum bytes of a message from a worker beginning so."""
    return next((most for begin, most in _MOST_BYTES.items() if beginning.startswith(begin)), FEW_BYTES)


def decode_from_worker(payload: Payload) -> FromWorker:
    """Parse and validate a message from a worker, or the `Beginning` of one that was not kept.

    Raises:
        QueryTooLarge: The payload is a query that is too long. It was not decoded, and can be answered with an error.
        MessageInvalid: The payload is not such a message, or is too long. No payload causes any other exception.
    """
    if len(payload) <= FEW_BYTES and type(payload) is not Beginning:
        return _decode(_from_worker, payload)
    payload_bytes = payload.payload_bytes if isinstance(payload, Beginning) else len(payload)
    if payload_bytes > most_bytes(payload):
        if (query := _QUERY.match(payload)) is not None:
            raise QueryTooLarge(query[1].decode(errors="replace"), payload_bytes, MAX_QUERY_BYTES)
        raise MessageInvalid(f"a message has {payload_bytes:,} bytes, more than one of its kind may have")
    # Counted here, since a decoder builds all elements of a list before it compares their number with the maximum.
    if payload.startswith(b'{"type":"query"') and has_more_objects_than(MAX_QUERY_OBJECTS, payload):
        raise MessageInvalid(f"a query has more than {MAX_QUERY_OBJECTS:,} objects")
    return _decode(_from_worker, payload)


def decode_from_orchestrator(payload: Payload) -> FromOrchestrator:
    """Parse and validate a message from the orchestrator. Errors: see `decode_from_worker`."""
    return _decode(_from_orchestrator, payload)


def _decode(decoder: "msgspec.json.Decoder[T]", payload: Payload) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:  # 100,000 times "[" raises RecursionError
        raise MessageInvalid(str(error) or type(error).__name__) from None
