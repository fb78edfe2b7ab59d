"""One REPL's conversation, without I/O: bytes in, messages out, and which message may come when."""

from collections.abc import Mapping
from enum import IntEnum, auto
from typing import Any

from rlm_broker.errors import ProtocolViolation
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    Execute,
    FromOrchestrator,
    FromWorker,
    Message,
    Output,
    Provide,
    Query,
    Ready,
    Reply,
    Result,
    decode_from_worker,
    encode,
)

LONGEST_QUERY_ID = 40


class State(IntEnum):
    """Where a conversation stands. An `IntEnum`, whose hash is a number's own: it is looked up for each message."""

    STARTING = auto()  # the worker locks itself down and loads the context
    IDLE = auto()  # the REPL waits for a block
    RUNNING = auto()  # it runs one, and may be waiting for any number of replies
    CLOSED = auto()


TRANSITIONS: dict[State, dict[type[Message], State]] = {
    State.STARTING: {Ready: State.IDLE},
    # A block may end while its threads still wait: their replies come late, and the REPL drops them.
    State.IDLE: {Execute: State.RUNNING, Provide: State.IDLE, Reply: State.IDLE},
    State.RUNNING: {Query: State.RUNNING, Reply: State.RUNNING, Output: State.RUNNING, Result: State.IDLE},
    State.CLOSED: {},
}


Provided = tuple[list[str], dict[str, bytes]]
"""Names of tools, and the frames of plain values by name, that the REPL gets with its first block."""


def frames_of(values: Mapping[str, Any], max_frame_bytes: int) -> dict[str, bytes]:
    """Plain values by name, each as the frame that gives it to a REPL.

    Raises:
        FrameTooLarge: One of them is more than a message may hold.
    """
    return {name: encode_frame(encode(Provide(name, value)), max_frame_bytes) for name, value in values.items()}


class Session:
    """The state of one conversation. What the worker claims is checked here, once, for everybody above.

    Attributes:
        state: What may come next, see `TRANSITIONS`.
        block: Number of the current or last block; the first is 1.
        open_queries: Ids of the queries that still want their reply, with the bytes that each came in.
        open_bytes: Of all of these.
        max_frame_bytes: Largest payload, either way.
    """

    def __init__(self, max_frame_bytes: int, provided: Provided = ([], {})) -> None:
        self._unsent = provided
        self.state = State.STARTING
        self.block = 0
        self.open_queries: dict[str, int] = {}
        self.open_bytes = 0
        self.max_frame_bytes = max_frame_bytes
        self._frames = FrameDecoder(max_frame_bytes)

    def receive(self, data: bytes | memoryview) -> list[FromWorker]:
        """The messages that `data` completes, each legal in the state it came in.

        Raises:
            ProtocolViolation: The bytes or their order are wrong. Close the connection.
        """
        messages = []
        try:
            for payload in self._frames.feed(data):
                message = decode_from_worker(payload)
                self._check(message, len(payload))
                messages.append(message)
        except WireError as error:
            self.close()
            raise ProtocolViolation(str(error)) from error
        return messages

    def execute(self, code: str) -> bytes:
        """The frame that starts the next block.

        Raises:
            ProtocolViolation: The REPL is not idle.
            FrameTooLarge: The code is longer than a frame may be. Nothing has changed.
        """
        tools, values = self._unsent
        frame = self._frame(Execute(block=self.block + 1, code=code, tools=tools))
        self._unsent = ([], {})
        self.block += 1
        return b"".join([*values.values(), frame])

    def provide(self, provided: Provided) -> None:
        """Give the REPL more tools and values, with its next block; see `frames_of`."""
        tools, frames = self._unsent
        self._unsent = ([*tools, *provided[0]], {**frames, **provided[1]})

    def reply(self, reply: Reply) -> bytes:
        """The frame that answers an open query.

        Raises:
            ProtocolViolation: No query with this id is open.
            FrameTooLarge: The reply is longer than a frame may be. The query is still open.
        """
        if reply.id not in self.open_queries:
            raise ProtocolViolation(f"a reply to query {reply.id}, which is not open")
        frame = self._frame(reply)
        self.open_bytes -= self.open_queries.pop(reply.id)
        return frame

    def close(self) -> None:
        """Nothing may come any more, in either direction."""
        self.state = State.CLOSED
        self.open_queries.clear()
        self.open_bytes = 0

    def _frame(self, message: FromOrchestrator) -> bytes:
        frame = encode_frame(encode(message), self.max_frame_bytes)
        self._step(message)
        return frame

    def _check(self, message: FromWorker, payload_bytes: int) -> None:
        self._step(message)
        match message:
            case Query():
                if not message.id.startswith(f"{self.block}:") or len(message.id) > LONGEST_QUERY_ID:
                    self._violated(f"query id {message.id[:40]!r} while block {self.block} runs")
                if message.id in self.open_queries:
                    self._violated(f"query id {message.id!r} is open already")
                self.open_queries[message.id] = payload_bytes
                self.open_bytes += payload_bytes
            case Output() | Result():
                if message.block != self.block:
                    self._violated(f"{type(message).__name__} of block {message.block} while block {self.block} runs")

    def _step(self, message: Message) -> None:
        try:
            self.state = TRANSITIONS[self.state][type(message)]
        except KeyError:
            self._violated(f"{type(message).__name__} while {self.state.name}")

    def _violated(self, why: str) -> None:
        self.close()
        raise ProtocolViolation(why) from None
