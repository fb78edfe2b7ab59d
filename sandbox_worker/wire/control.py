"""What the orchestrator says to each worker's init, and what it answers; `zygote_control` has the zygote's part.

These travel over AF_UNIX sockets of kind SOCK_SEQPACKET, one message a packet, often with descriptors beside it. No
model code ever holds one of these sockets. They carry raw output, so they are MessagePack and not JSON.
"""

from typing import Annotated, Literal, TypeVar

import msgspec

from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.wire.bounds import WatchedLimit
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.messages import Stream

MAX_PACKET_BYTES = 1 << 16
"""Longest packet. Output is cut into pieces well below it."""

OUT_OF_MEMORY, BROKEN = 250, 251
"""Exit codes of a REPL whose own code could not go on: without memory, or because model code has broken it."""

EntryKind = Literal["file", "folder", "link", "other"]
InitStep = Literal["lock down", "load", "start", "go on", "speak"]
"""What init can fail to do; "speak" is the orchestrator's word for an init whose packet is no message."""

Path = Annotated[list[bytes], msgspec.Meta(min_length=1)]

T = TypeVar("T")


class Control(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """A message is a value, like those on the connection."""


# -- the orchestrator says to init -------------------------------------------------------------------------------------


class Load(Control, frozen=True):
    """Load one piece of the context; beside it travels the memfd that holds it. None: there is one already, or none."""

    piece: ContextPiece | None


class Start(Control, frozen=True):
    """Fork a fresh REPL; beside it travels its connection, a socket that has been welcomed."""


class Hand(Control, frozen=True):
    """Hand on to the REPL the memfd that travels beside it: a piece of a context that it is given later."""


class Begin(Control, frozen=True):
    """A block starts, and what it uses is looked at often.

    Attributes:
        cpu_s: That the REPL's processes may use from here until the next block starts, however long that takes.
    """

    cpu_s: float


class Interrupt(Control, frozen=True):
    """SIGINT to the REPL, for the block of that number."""

    block: int


class Drain(Control, frozen=True):
    """Hand over what was written to descriptors 1 and 2 so far."""


class Stop(Control, frozen=True):
    """SIGKILL to the REPL and everything it started.

    Attributes:
        explain: Find out first what it is doing, for a moment at most.
    """

    explain: bool = False


class OpenToRead(Control, frozen=True):
    """Open a regular file of the scratch folder. `path` is its folders' names and its own; no name is ".."."""

    path: Path


class OpenToWrite(Control, frozen=True):
    """The same to write `size_bytes` to it, in the place of what is there. Missing folders are made."""

    path: Path
    size_bytes: int


class ListFolder(Control, frozen=True):
    """Say what is in a folder of the scratch folder, by name, from behind `after` on."""

    path: list[bytes]
    after: bytes = b""


class RunProgram(Control, frozen=True):
    """Start a program beside the REPL. Beside it travel a memfd of a `Program`, and its descriptors 0, 1 and 2.

    No other program has the number. `cwd` is the path of its current folder below the scratch folder.
    """

    number: int
    cwd: list[bytes]


class EndProgram(Control, frozen=True):
    """SIGKILL to a program and everything that it started; it may have ended."""

    number: int


class LastSeen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a REPL was doing when it was killed, as far as could be seen from outside.

    Attributes:
        stack: As `faulthandler` prints it, newest frame first. The REPL wrote it: it may say anything.
        memory_bytes, cpu_s, processes, threads: Of all its processes together; `cpu_s` of its block.
    """

    stack: str = ""
    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0


# -- init says -------------------------------------------------------------------------------------------------------


class Loaded(Control, frozen=True):
    """The context is in memory and its descriptor closed. `layers` are those that init had applied before."""

    layers: list[Layer]


class Forked(Control, frozen=True):
    """A REPL was forked. Beside it travels a pidfd of it, where the end of init does not end everything below it."""


class Started(Control, frozen=True):
    """The REPL has applied its own layers. Said by the REPL itself, as the last thing before it drops this socket."""

    layers: list[Layer]


class Failed(Control, frozen=True):
    """`step` failed, and init ends.

    Attributes:
        layer: Name of the isolation layer that failed, if one did.
        code: The kernel's error number, or 0.
    """

    step: InitStep
    reason: str
    layer: Layer | None = None
    code: int = 0


class Written(Control, frozen=True):
    """Bytes that something wrote to descriptor 1 or 2 of the REPL."""

    stream: Stream
    data: bytes


class Handed(Control, frozen=True):
    """The REPL can take the memfd; or not, since too many wait for it."""

    taken: bool


class Interrupted(Control, frozen=True):
    """The signal is queued: whatever the REPL reads from now on comes after it."""


class Drained(Control, frozen=True):
    """All that was in the pipes when `Drain` came has been sent before this."""


class Stopped(Control, frozen=True):
    """Nothing of the REPL is left."""

    post_mortem: LastSeen | None = None


class Opened(Control, frozen=True):
    """A file was opened. Beside it travels its descriptor.

    Attributes:
        fd: Filled in where the descriptor has arrived.
    """

    fd: int = -1


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a folder, as `lstat` tells of it. A name may be any bytes."""

    name: bytes
    kind: EntryKind
    size_bytes: int


class Listed(Control, frozen=True):
    """Entries of a folder. `is_all` says whether these are the last."""

    entries: list[Entry]
    is_all: bool


class Refused(Control, frozen=True):
    """A file or folder cannot be had: `reason` is the rest of a sentence about it."""

    reason: str


class Burned(Control, frozen=True):
    """The REPL's processes used so much CPU time since this was said last."""

    cpu_s: float


class Exceeded(Control, frozen=True):
    """The REPL used more than it may, in the unit that the field's name gives, and nothing of it is left."""

    limit: WatchedLimit
    used: float
    allowed: float
    post_mortem: LastSeen


class Died(Control, frozen=True):
    """The REPL ended by itself: by `signal`, or with `exit_code`."""

    exit_code: int | None = None
    signal: int | None = None


class ProgramEnded(Control, frozen=True):
    """Nothing of a program is left. Its first process ended by `signal`, or with `exit_code`.

    Attributes:
        limit: At which it was ended, if it was one; `with_repl`: since the REPL was.
        not_started, no_folder: Why it or its current folder cannot be had, as the rest of a sentence.
    """

    number: int
    exit_code: int | None = None
    signal: int | None = None
    limit: WatchedLimit | None = None
    with_repl: bool = False
    not_started: str | None = None
    no_folder: str | None = None


FileRequest = OpenToRead | OpenToWrite | ListFolder
ToInit = Load | Start | Hand | Begin | Interrupt | Drain | Stop | RunProgram | EndProgram | FileRequest
FromInit = (
    Loaded
    | Forked
    | Started
    | Failed
    | Written
    | Handed
    | Interrupted
    | Drained
    | Stopped
    | Opened
    | Listed
    | Refused
    | Burned
    | Exceeded
    | Died
    | ProgramEnded
)

_encoder = msgspec.msgpack.Encoder()
_to_init: msgspec.msgpack.Decoder[ToInit] = msgspec.msgpack.Decoder(ToInit)
_from_init: msgspec.msgpack.Decoder[FromInit] = msgspec.msgpack.Decoder(FromInit)


def pack(message: Control) -> bytes:
    """The message as one packet."""
    return _encoder.encode(message)


def unpack_to_init(packet: bytes) -> ToInit:
    """Raises: MessageInvalid."""
    return unpack(_to_init, packet)


def unpack_from_init(packet: bytes) -> FromInit:
    """Raises: MessageInvalid."""
    return unpack(_from_init, packet)


def unpack(decoder: "msgspec.msgpack.Decoder[T]", packet: bytes) -> T:
    """Return the message. Raises: MessageInvalid."""
    try:
        return decoder.decode(packet)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageInvalid(str(error) or type(error).__name__) from None
