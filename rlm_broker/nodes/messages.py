"""Messages on the link between an orchestrator and the agent of a node, and their bounds.

A frame has a length and a stream's number, then bytes. Stream 0 has these messages, as MessagePack. All other streams
have bytes alone, for example a REPL's connection, a program's pipe, a file or a context. An empty frame ends a stream.

The orchestrator draws all numbers, of requests, workers, servers and streams, from one counter. So an agent can name
only what it was told of.
"""

from typing import Annotated, Any, Literal

import msgspec

from rlm_broker import errors
from rlm_broker.sandbox.workers.levels import IsolationName
from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.control import MAX_PACKET_BYTES, MAX_PROGRAM_BYTES
from sandbox_worker.wire.level import Layer, LevelName

PROTOCOL = 1
"""Number of this protocol. An agent of another one is refused."""
PIECE_BYTES = 1 << 18
"""Bytes of a file or a context in one frame."""
MAX_FRAME_BYTES = MAX_PACKET_BYTES + MAX_PROGRAM_BYTES + (1 << 16)
"""Maximum bytes of a frame: a packet to init, the arguments of a program beside it, and the message around both. A
longer one ends the link."""
MAX_JOIN_BYTES = 512
"""Maximum bytes of the first frame, from a stranger."""
MAX_REASON_CHARS = 2_000
"""Characters of an agent's reason. A longer one ends the link."""

Number = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
RefusalKind = Literal["configuration", "isolation", "context", "memory", "file", "sandbox"]
ERRORS: dict[RefusalKind, type[errors.RlmBrokerError]] = {
    "context": errors.ContextRefused,  # before its base class
    "configuration": errors.ConfigurationError,
    "isolation": errors.IsolationUnavailable,
    "memory": errors.WorkerDied,  # of an OSError there; another node may have the memory
    "file": errors.FileRefused,
    "sandbox": errors.SandboxFailed,
}
"""Kind of an agent's refusal → the error for the caller here."""


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First frame of an agent: the one-time token of its order."""

    token: str
    protocol: int
    release: str


class LinkMessage(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """Base of all messages on a link."""


class Credit(LinkMessage, frozen=True):
    """Permission, in either direction, to send so many more bytes of a stream."""

    stream: Number
    size_bytes: Bytes


class Beat(LinkMessage, frozen=True):
    """Sign of life, in either direction. A node says whether it has memory for another REPL."""

    has_room: bool = True


# -- from the orchestrator ---------------------------------------------------------------------------------------------


class OpenNode(LinkMessage, frozen=True):
    """Request to open a sandbox of this kind, in place of an open one. `names` are modules to look for."""

    request: Number
    isolation: IsolationName
    allow_exec: bool | None
    seed: int | None
    python: str | None
    packages: tuple[str, ...] | None
    names: tuple[str, ...]


class Prepare(LinkMessage, frozen=True):
    """Request for a further fork server, with a preparation. The pieces of its context are held under `keys`."""

    request: Number
    server: Number
    imports: tuple[str, ...]
    setup: str
    timeout_s: float
    pieces: Annotated[tuple[ContextPiece, ...], msgspec.Meta(max_length=MAX_PIECES)] | None
    keys: tuple[str, ...]


class EndServer(LinkMessage, frozen=True):
    """Command to end such a fork server with all of its workers."""

    server: Number


class Fork(LinkMessage, frozen=True):
    """Request to fork a worker. `server` 0 is the fork server of the sandbox."""

    request: Number
    worker: Number
    server: Annotated[int, msgspec.Meta(ge=0)]
    limits: dict[str, Any]


class Say(LinkMessage, frozen=True):
    """Packet for an init, and what travels beside it.

    Attributes:
        packet: Message, see `sandbox_worker.wire.control`.
        key: Key of the memfd beside it; empty if there is none.
        data: Content of a memfd beside it, in place of a key.
        streams: Streams; their ends on the node travel beside it, as descriptors.
    """

    worker: Number
    packet: bytes
    key: str = ""
    data: bytes = b""
    streams: tuple[Number, ...] = ()


class Kill(LinkMessage, frozen=True):
    """Command to end a worker."""

    worker: Number


class HoldMemory(LinkMessage, frozen=True):
    """Request to hold a memfd under a key. Its bytes follow on the stream with the number of the request."""

    request: Number
    key: str
    size_bytes: Bytes


class DropMemory(LinkMessage, frozen=True):
    """Command to hold a memfd no more. Processes with a mapping keep it."""

    key: str


# -- from the agent ----------------------------------------------------------------------------------------------------


class NodeOpened(LinkMessage, frozen=True):
    """Report of an open sandbox: what is in force, and what the node has. `places` are REPLs at the same time."""

    request: Number
    level: LevelName
    layers: list[Layer]
    allow_exec: bool
    places: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    cpus: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    memory_bytes: Bytes
    importable: Annotated[list[Name], msgspec.Meta(max_length=1000)]


class RequestDone(LinkMessage, frozen=True):
    """Report of a request's success. `memory_bytes` is a fork server's."""

    request: Number
    memory_bytes: Bytes = 0


class RequestRefused(LinkMessage, frozen=True):
    """Report of a request's failure."""

    request: Number
    kind: RefusalKind
    reason: Reason


class Heard(LinkMessage, frozen=True):
    """Packet of an init. `size_bytes` is the size of the file it has opened."""

    worker: Number
    packet: Annotated[bytes, msgspec.Meta(max_length=MAX_PACKET_BYTES)]
    size_bytes: Bytes = 0


class Gone(LinkMessage, frozen=True):
    """Report of a worker's end."""

    worker: Number


AgentRequest = OpenNode | Prepare | Fork | HoldMemory
FromOrchestrator = AgentRequest | Credit | Beat | EndServer | Say | Kill | DropMemory
FromAgent = Credit | Beat | NodeOpened | RequestDone | RequestRefused | Heard | Gone

_encoder = msgspec.msgpack.Encoder()
from_orchestrator: msgspec.msgpack.Decoder[FromOrchestrator] = msgspec.msgpack.Decoder(FromOrchestrator)
from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
join_decoder: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)


def encoded(message: msgspec.Struct) -> bytes:
    """Return the message as MessagePack."""
    return _encoder.encode(message)
