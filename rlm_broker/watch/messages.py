"""Messages on a control socket: one request for each connection, and the replies to it.

Each message is one frame of `sandbox_worker.wire.frames`: 4 bytes with the length, then JSON. After `FollowReply` come
the lines of a trace, a frame each, with a `HEARTBEAT` between them as a sign of life. `END` follows the last line.
"""

import asyncio
import socket
import struct
from typing import Annotated, Literal

import msgspec

from sandbox_worker.wire.frames import PREFIX

MAX_REQUEST_BYTES = 1 << 12
"""Most bytes of a request. A longer one ends its connection."""
MAX_REPLY_BYTES = 1 << 24
"""Most bytes of a reply: the status of some ten thousand runs and REPLs. The client refuses a longer one."""
MAX_LINE_BYTES = 1 << 28
"""Most bytes of one line of a trace. A longer event is sent with its long texts cut."""
MAX_NAME_CHARS = 256
"""Most characters of the name of a run, a REPL or a process in a request."""
REQUEST_S = 5.0
"""Seconds for a peer's request. Beyond them its connection is closed."""
STALLED_S = 20.0
"""Seconds in which a peer has to read a reply. Beyond them its connection is closed."""
HEARTBEAT_S = 5.0
"""Seconds between two signs of life to a follower."""
STOP_WAIT_S = 10.0
"""Seconds to wait for the end of a stopped run or REPL. Beyond them it is reported as going on."""
HEARTBEAT, END = b"null", b""
PROCESS = "process"
"""Target of `StopRequest` for all runs and REPLs of a process."""

_PEER = struct.Struct("3i")

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run tree at one moment.

    Attributes:
        id: Id of the run, equal to `Run.id`.
        pid: Its process.
        question: Question, cut to some hundred characters; None if the task is in the context.
        model: Name of the root model.
        state: "queued", "running", or how it ended: a `RunEnded.kind`, for example "answered".
        turn: Turn of the root run, from 1; 0 before the first.
        doing: Activity at this moment, in a few words, for example "calls gpt-5 (2 of 8)".
        doing_since: Unix time in seconds of the beginning of that.
        started: Unix time in seconds of the run's start.
        ended: Unix time in seconds of its end, or None.
        runs: Number of live runs of the tree, the root included.
        tokens: Tokens of the tree so far.
        cost_usd: Cost of the tree so far in US dollars; None if a price is not known.
        owner: Name of the key that asked over HTTP; empty for a run of the process itself.
    """

    id: str
    pid: int
    question: str | None
    model: str
    state: str
    turn: int
    doing: str
    doing_since: float
    started: float
    ended: float | None = None
    runs: int = 1
    tokens: int = 0
    cost_usd: float | None = 0.0
    owner: str = ""


class ReplStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A REPL at one moment.

    Attributes:
        id: Id of the REPL in its process.
        pid: Process of its orchestrator.
        run: Id of its run, or None for a REPL of its own, for example a container.
        state: "idle", "busy" or "starting".
        since: Unix time in seconds of the beginning of that state.
        memory_bytes: Memory of its processes together.
        owner: As in `RunStatus`.
    """

    id: str
    pid: int
    run: str | None
    state: str
    since: float
    memory_bytes: int
    owner: str = ""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this user that runs rlm-broker, at one moment.

    Attributes:
        pid: Process id of the orchestrator.
        command: Its command: "ask", "exec", "serve", "mcp", or "python" for a library process.
        started: Unix time in seconds of its start.
        memory_bytes: Memory of the orchestrator itself.
        runs: Its runs.
        repls: Its REPLs.
        is_hung: Whether it did not answer in time. All lists are empty then.
    """

    pid: int
    command: str
    started: float
    memory_bytes: int = 0
    runs: tuple[RunStatus, ...] = ()
    repls: tuple[ReplStatus, ...] = ()
    is_hung: bool = False


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Request for the `ProcessStatus`."""


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Request to end a run, a REPL's block or all of a process.

    Attributes:
        target: Id of the run or REPL, or `PROCESS`.
        now: Whether a run is cancelled instead of stopped, and a REPL closed instead of interrupted.
    """

    target: Name
    now: bool = False


class FollowRequest(msgspec.Struct, frozen=True, tag="follow"):
    """Request for the events of a run with a number above `after`, until its end."""

    run: Name
    after: Annotated[int, msgspec.Meta(ge=0)] = 0


class StopOutcome(msgspec.Struct, frozen=True):
    """Result of a stop for one run or REPL.

    Attributes:
        kind: "run", "repl" or "process".
        id: Its id.
        state: Its state afterwards, in one word, for example "stopped", "cancelled" or "running".
        has_ended: Whether the run, or the block of the REPL, has ended.
    """

    kind: Literal["run", "repl", "process"]
    id: str
    state: str
    has_ended: bool


class StopReply(msgspec.Struct, frozen=True, tag="stopped"):
    """Reply to `StopRequest`."""

    outcomes: tuple[StopOutcome, ...]


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    """Reply to `StatusRequest`."""

    process: ProcessStatus


class FollowReply(msgspec.Struct, frozen=True, tag="following"):
    """First reply to `FollowRequest`."""


class RefusedReply(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal of a request, with the reason."""

    reason: str


Request = StatusRequest | StopRequest | FollowRequest
Reply = StatusReply | StopReply | FollowReply | RefusedReply

requests = msgspec.json.Decoder(Request)
replies = msgspec.json.Decoder(Reply)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the process at the other end of a unix socket, as the kernel knows them.

    The process id is 0 for a process of another PID namespace.
    """
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


async def read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """Read one frame.

    Raises:
        ValueError: The frame is longer than `most_bytes`.
        asyncio.IncompleteReadError: The stream ended before the end of the frame.
    """
    (length,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if length > most_bytes:
        raise ValueError(f"a frame of {length:,} bytes is longer than {most_bytes:,}")
    return await reader.readexactly(length)
