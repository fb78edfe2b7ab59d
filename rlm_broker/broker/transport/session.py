"""The protocol of one REPL's connection, without I/O: bytes in, messages out, and the order of messages."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple, NoReturn

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.errors import ProtocolViolation
from sandbox_worker import RELEASE
from sandbox_worker.wire.errors import QueryTooLarge, WireError
from sandbox_worker.wire.frames import FrameDecoder, Payload
from sandbox_worker.wire.messages import (
    MAX_DISPLAYS,
    MAX_DISPLAYS_BYTES,
    Attach,
    DisplayMessage,
    Environment,
    Execute,
    FromWorker,
    Message,
    Output,
    Provide,
    Query,
    Read,
    Ready,
    Reply,
    Result,
    Submit,
    Values,
    decode_from_worker,
    framed,
    most_bytes,
)

LONGEST_QUERY_ID = 40
"""Characters of a query's id. A longer one violates the protocol: ids are keys that are kept while queries are open."""
BYTE_WEIGHT = 8
"""Bytes of memory for each byte of an open query: a wide character takes 4, small objects more."""
PROMPT_WEIGHT = 1024
"""Bytes of memory for each prompt of an open query, beside its text: its place, its id, its reply."""
ARGUMENT_WEIGHT = 512
"""Bytes of memory for each value among the arguments of a tool: pydantic makes an object or an error of it."""
Stdin = str | Callable[[], Awaitable[str | bytes]]
"""Text for `sys.stdin` of a block; or an async function called each time that code needs more of it, which returns the
next text or bytes, and nothing at the end."""


class Wanted(NamedTuple):
    """The input of a block beside its code, and values for its result.

    Attributes:
        value: Whether the result has the value of the last statement, if that is an expression.
        names: Variables to read, or an empty tuple for all public ones. The block then has no code. None reads none.
        stdin: Text for `sys.stdin`, or a function whose pieces the block asks for; None gives it no text.
        submit: Names of the fields of a submission, as the end of the block. An empty tuple takes any value; with None,
            the block does not end at a submission.
        variables: Whether the result names the new and the changed variables.
        echo: Whether the last expression and a traceback are printed, and not in the result.
        checkpoint: Processes of checkpoints, if the REPL makes one before the block; else 0. See `Execute`.
        becomes_hub: Whether the REPL becomes a hub before the block. Init has prepared it.
    """

    value: bool = False
    names: tuple[str, ...] | None = None
    stdin: Stdin | None = None
    submit: tuple[str, ...] | None = None
    variables: bool = False
    echo: bool = True
    checkpoint: int = 0
    becomes_hub: bool = False


NOTHING: Final = Wanted()


class State(IntEnum):
    """The state of a session. An `IntEnum`, since its hash is an int's: a state is looked up for each message."""

    STARTING = auto()  # the worker applies its layers and loads the context
    IDLE = auto()  # the REPL waits for a block
    RUNNING = auto()  # the REPL runs a block, and may wait for any number of replies
    CLOSED = auto()


TRANSITIONS: dict[State, dict[type[Message], State]] = {
    State.STARTING: {Ready: State.IDLE},
    # A block may end while its threads still wait for replies. Those replies come late, and the REPL drops them.
    State.IDLE: {
        Execute: State.RUNNING,
        Environment: State.IDLE,
        Provide: State.IDLE,
        Attach: State.IDLE,
        Reply: State.IDLE,
    },
    State.RUNNING: {
        Query: State.RUNNING,
        Submit: State.RUNNING,
        Reply: State.RUNNING,
        Read: State.RUNNING,
        Values: State.RUNNING,
        Output: State.RUNNING,
        DisplayMessage: State.RUNNING,
        Result: State.IDLE,
    },
    State.CLOSED: {},
}


class RefusedQuery(NamedTuple):
    """A query beyond the maximum length. It is not decoded, and waits for a reply like any other.

    Attributes:
        query: Its id, with one empty prompt.
        why: Reason, for the one slot of the reply.
    """

    query: Query
    why: str


class Session:
    """The state of the protocol on one connection. All claims of the worker are checked here, once for all callers.

    Args:
        max_frame_bytes: Largest payload of a frame in either direction.
        block: Number of the REPL's last block, on an earlier connection.

    Attributes:
        state: Decides about the next message, see `TRANSITIONS`.
        block: Number of the current or last block; the first is 1.
        open_queries: Id of each query without a reply → its maximum memory in bytes.
        open_weight: Sum of `open_queries`.
        open_reads: Numbers of the requests for variables without an answer. They end with their block.
        max_frame_bytes: Largest payload of a frame in either direction.
    """

    def __init__(self, max_frame_bytes: int, block: int = 0) -> None:
        self._unsent = Provisions()
        self.state = State.STARTING
        self.block = block
        self._id_prefix = "0:"
        self._displays = self._display_bytes = 0
        self.open_queries: dict[str, int] = {}
        self.open_weight = 0
        self.open_reads: set[int] = set()
        self._reads = 0
        self.max_frame_bytes = max_frame_bytes
        self._frames = FrameDecoder(max_frame_bytes, most_bytes)
        self._payloads: deque[Payload] = deque()

    def feed(self, data: bytes | memoryview) -> None:
        """Add received bytes. `next_message` decodes them, message by message.

        Raises:
            ProtocolViolation: A frame is larger than allowed, and no complete frame precedes it. Close the connection.
        """
        try:
            self._payloads.extend(self._frames.feed(data))
        except WireError as error:
            self._violated(str(error))

    def next_message(self) -> FromWorker | RefusedQuery | None:
        """Return the next complete message, if its state allows it; None if there is none.

        Raises:
            ProtocolViolation: The bytes or their order are wrong. Close the connection.
        """
        if not self._payloads:
            if self._frames.error is not None:
                self._violated(str(self._frames.error))
            return None
        payload = self._payloads.popleft()
        try:
            message = decode_from_worker(payload)
        except QueryTooLarge as refused:
            query = Query(refused.id, "llm", [""])
            self._step(query)
            self._open(query, b"")
            return RefusedQuery(query, str(refused))
        except WireError as error:
            self._violated(str(error))
        self._step(message)
        if isinstance(message, Query | Submit):
            self._open(message, payload)
        elif isinstance(message, Ready):
            self._require_own(message.release)
        elif message.block != self.block:
            self._violated(f"{type(message).__name__} of block {message.block} while block {self.block} runs")
        elif isinstance(message, DisplayMessage):
            self._count(len(payload))
        elif isinstance(message, Values):
            self._end_read(message.number)
        return message

    def execute(self, code: str, wanted: Wanted = NOTHING) -> bytes:
        """Return the frames for starting the next block, with all provisions since the last one.

        Args:
            code: Python source.
            wanted: Further input, and values for the result.

        Raises:
            ProtocolViolation: The REPL is not idle.
            FrameTooLarge: `code` and `stdin` are longer than a frame may be. The session is unchanged.
        """
        unsent = self._unsent
        submit = None if wanted.submit is None else [*wanted.submit]
        message = Execute(
            self.block + 1,
            code,
            unsent.tools(),
            wanted.value,
            None if wanted.names is None else [*wanted.names],
            wanted.stdin if isinstance(wanted.stdin, str) else None,
            submit,
            wanted.variables,
            wanted.echo,
            callable(wanted.stdin),
            wanted.checkpoint,
            wanted.becomes_hub,
        )
        frame = framed(message, self.max_frame_bytes)
        self._step(message)
        self._unsent = Provisions()
        self.block += 1
        self._id_prefix = f"{self.block}:"
        self._displays = self._display_bytes = 0
        self.open_reads.clear()
        return b"".join([*unsent.frames(), frame])

    def provide(self, provisions: Provisions) -> None:
        """Keep more tools and values for the REPL. They go out with its next block."""
        self._unsent.add(provisions)

    def reply(self, reply: Reply) -> bytes | bytearray:
        """Return the frame for answering an open query.

        Raises:
            ProtocolViolation: No query with this id is open.
            FrameTooLarge: The reply is longer than a frame may be. The query is still open.
        """
        if reply.id not in self.open_queries:
            raise ProtocolViolation(f"a reply to query {reply.id}, which is not open")
        frame = framed(reply, self.max_frame_bytes)
        self._step(reply)
        self.open_weight -= self.open_queries.pop(reply.id)
        return frame

    def read(self, names: Sequence[str]) -> tuple[int, bytes | bytearray]:
        """Return the number and the frame of a request for variables of a block that waits. See `Wanted.names`.

        Raises:
            ProtocolViolation: No block runs.
            FrameTooLarge: The names are longer than a frame may be. The session is unchanged.
        """
        request = Read(self.block, self._reads + 1, [*names])
        frame = framed(request, self.max_frame_bytes)
        self._step(request)
        self._reads += 1
        self.open_reads.add(self._reads)
        return self._reads, frame

    def close(self) -> None:
        """Accept no further message, in either direction, and drop the waiting ones."""
        self.state = State.CLOSED
        self._payloads.clear()
        self.open_queries.clear()
        self.open_weight = 0
        self.open_reads.clear()

    def _open(self, query: Query | Submit, payload: Payload) -> None:
        id = query.id
        if not id.startswith(self._id_prefix) or len(id) > LONGEST_QUERY_ID:
            self._violated(f"query id {id[:40]!r} while block {self.block} runs")
        if id in self.open_queries:
            self._violated(f"query id {id!r} is open already")
        weight = BYTE_WEIGHT * len(payload) + PROMPT_WEIGHT * (len(query.prompts) + len(query.contexts))
        if query.want == "tool":
            weight += ARGUMENT_WEIGHT * (payload.count(b",") + payload.count(b"[") + payload.count(b"{"))
        self.open_queries[id] = weight
        self.open_weight += weight

    def _end_read(self, number: int) -> None:
        if number not in self.open_reads:
            self._violated(f"variables that answer no request, number {number}")
        self.open_reads.remove(number)

    def _count(self, display_bytes: int) -> None:
        self._displays += 1
        self._display_bytes += display_bytes
        if self._displays > MAX_DISPLAYS or self._display_bytes > MAX_DISPLAYS_BYTES:
            self._violated(f"{self._displays} displays of {self._display_bytes:,} bytes in block {self.block}")

    def _require_own(self, release: str) -> None:
        if release != RELEASE:
            self._violated(
                f"the worker runs release {release!r} of rlm-broker and this process {RELEASE!r}: restart this process"
            )

    def _step(self, message: Message) -> None:
        try:
            self.state = TRANSITIONS[self.state][type(message)]
        except KeyError:
            self._violated(f"{type(message).__name__} while {self.state.name}")

    def _violated(self, why: str) -> NoReturn:
        self.close()
        raise ProtocolViolation(why) from None
