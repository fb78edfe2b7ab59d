"""Control messages between the orchestrator, its fork servers (zygotes) and the inits of its workers.

They travel over AF_UNIX sockets of type SOCK_SEQPACKET, one message per packet, often with descriptors beside it. Model
code never holds one of these sockets. The messages carry raw output, so their encoding is MessagePack: JSON has no
form for bytes.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.bounds import ReplBounds, WatchedLimit
from sandbox_worker.wire.errors import FileKind, MessageInvalid
from sandbox_worker.wire.level import Layer, LevelName
from sandbox_worker.wire.messages import Stream

MAX_PACKET_BYTES = 1 << 16
"""Maximum bytes of a packet. Init cuts output into pieces well below this."""

OUT_OF_MEMORY, BROKEN = 250, 251
"""Exit codes of a REPL after its own code could not continue: without memory, or broken by model code."""

EntryKind = Literal["file", "folder", "link", "other"]
InitStep = Literal["lock down", "load", "start", "go on", "speak", "fork"]
"""Step of init at its failure. The orchestrator itself uses "speak", after a packet without a valid message."""

NO_FREEZING = "its sandbox cannot freeze processes, which takes isolation level 'strict' with a /proc of its own"
IN_FAMILY = "it was forked, or is a fork"
"""Reasons of init why there can be no checkpoint, each as one clause."""

ROOT = b"/"
"""First name of an absolute path, as the REPL's code sees it. Any other path begins in the scratch folder."""
Path = Annotated[list[bytes], msgspec.Meta(min_length=1)]
"""Path of a file: the names of the folders, then the file's. No name is ".."."""


class Control(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True):
    """Base of all control messages. A message is a value, like those on a connection."""


# -- from the orchestrator to init -------------------------------------------------------------------------------------


class Load(Control, frozen=True):
    """Command to load one piece of the context. The memfd of the piece travels beside it.

    With None there is no memfd: the fork server has loaded the context already, or there is no context.
    """

    piece: ContextPiece | None


class Start(Control, frozen=True):
    """Command to fork a fresh REPL. Its connection travels beside it: a socket after `Welcome`.

    Attributes:
        seed: Seed of its random numbers, if `Configure` had none. Each REPL of a worker has the same.
    """

    seed: int | None = None


class Resume(Control, frozen=True):
    """Command to have a checkpoint go on as the REPL, and to end later ones. Its connection travels beside it, as for
    `Start`.

    The answer is `Handed`: not taken if there is no such checkpoint.

    Attributes:
        number: Number of the checkpoint.
    """

    number: int


class Checkpoint(Control, frozen=True):
    """Command to prepare a checkpoint, which the REPL makes before its next block; see `Execute.checkpoint`.

    Attributes:
        number: Number of the checkpoint, unique in its worker.
    """

    number: int


class ForkRepl(Control, frozen=True):
    """Command to prepare a fork of the REPL. Init's end of its control socket, its connection and its bell travel
    beside it. The answer is `Prepared`; `Started` or `Failed` follow on the fork's own control socket.

    Attributes:
        needs_hub: Whether the REPL becomes a hub with its next block, see `Execute.becomes_hub`. If not, then it has
            become one since its last block.
    """

    needs_hub: bool


class EndHub(Control, frozen=True):
    """Note that no further fork of the REPL is made before its next block, so that its hub may end."""


class Hand(Control, frozen=True):
    """Command to pass a memfd on to the REPL: a piece of a later context. It travels beside the command."""


class Begin(Control, frozen=True):
    """Note that a block starts. Init measures usage often from now on.

    Attributes:
        cpu_s: Maximum CPU time of the REPL's processes, in seconds, until the next block starts.
        is_late: Whether the block has run for a moment, so that output since the last block may be its own.
    """

    cpu_s: float
    is_late: bool = False


class Interrupt(Control, frozen=True):
    """Command to send SIGINT to the REPL, for the block of that number."""

    block: int


class Drain(Control, frozen=True):
    """Command to send all output written to descriptors 1 and 2 so far."""


class Stop(Control, frozen=True):
    """Command to send SIGKILL to the REPL and all its processes.

    Attributes:
        explain: Whether init first finds out what the REPL is doing, within a short time limit.
    """

    explain: bool = False


class OpenToRead(Control, frozen=True):
    """Command to open a regular file: of the scratch folder, or elsewhere one that code may read."""

    path: Path


class OpenToWrite(Control, frozen=True):
    """Command to open a file of the scratch folder for `size_bytes` of new content. Missing folders are made."""

    path: Path
    size_bytes: int


class ListFolder(Control, frozen=True):
    """Command to list a folder, ordered by name, starting after the name `after`."""

    path: list[bytes]
    after: bytes = b""


class RemoveFile(Control, frozen=True):
    """Command to remove a file or a link of the scratch folder. A link's target stays."""

    path: Path


class RunProgram(Control, frozen=True):
    """Command to start a program beside the REPL.

    A memfd with a `Program` travels beside it, and the program's descriptors 0, 1 and 2.

    Attributes:
        number: Number of the program, unique in its worker.
        cwd: Path of the program's current folder; empty for the scratch folder.
    """

    number: int
    cwd: list[bytes]


class EndProgram(Control, frozen=True):
    """Command to send SIGKILL to a program and all its processes. The program may have ended already."""

    number: int


class LastSeen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a REPL when it was killed, as far as init could see it from outside.

    Attributes:
        stack: Stack as `faulthandler` prints it, newest frame first. The REPL wrote it, so it may be false.
        memory_bytes: Memory of all its processes together, in bytes.
        cpu_s: CPU time of its block, of all its processes together, in seconds.
        processes: Number of its processes.
        threads: Number of threads of all its processes together.
    """

    stack: str = ""
    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0


# -- from init -------------------------------------------------------------------------------------------------------


class Loaded(Control, frozen=True):
    """Report: the context is in memory and its descriptor is closed. Init applied `layers` before."""

    layers: list[Layer]


class Forked(Control, frozen=True):
    """Report: a REPL was forked.

    If the end of init does not end the REPL (`Level.has_pid_namespace`), then the REPL's pidfd travels beside it.
    """


class Started(Control, frozen=True):
    """Report: the REPL has applied its own layers. The REPL itself sends it, just before it closes this socket."""

    layers: list[Layer]


class Failed(Control, frozen=True):
    """Report: `step` failed. Init ends.

    Attributes:
        step: Failed step.
        reason: Description of the failure.
        layer: Failed isolation layer, or None.
        code: Error number of the kernel, or 0.
    """

    step: InitStep
    reason: str
    layer: Layer | None = None
    code: int = 0


class Written(Control, frozen=True):
    """Bytes written to descriptor 1 or 2 of the REPL."""

    stream: Stream
    data: bytes


class Handed(Control, frozen=True):
    """Answer to `Hand`: the memfd waits in the REPL's socket; or it was not taken, since too many wait there."""

    taken: bool


class Interrupted(Control, frozen=True):
    """Report: the signal is queued. The REPL gets it before any message sent from now on."""


class Drained(Control, frozen=True):
    """Report: all output in the pipes at the time of `Drain` has been sent."""


class Stopped(Control, frozen=True):
    """Report: all processes of the REPL have ended, but for its checkpoints.

    Attributes:
        post_mortem: State of the REPL before its end, if it was asked for.
        checkpoints: Numbers of the checkpoints.
    """

    post_mortem: LastSeen | None = None
    checkpoints: list[int] = []


class Prepared(Control, frozen=True):
    """Answer to `Checkpoint` and `ForkRepl`. `problem` is why there can be none now, as one clause; else None."""

    problem: str | None = None


class Checkpointed(Control, frozen=True):
    """Report: the REPL has made a checkpoint, in place of the oldest one if there are too many.

    Attributes:
        number: Its number.
        cost_s: Seconds that it costs: those of the forks, and at most those of copying pages that are written later.
    """

    number: int
    cost_s: Annotated[float, msgspec.Meta(ge=0)]


class Opened(Control, frozen=True):
    """Report: a file was opened. Its descriptor travels beside it.

    Attributes:
        fd: Number of the received descriptor. Only the receiver sets it.
    """

    fd: int = -1


class ListedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a folder, from `lstat`. A name may be any bytes."""

    name: bytes
    kind: EntryKind
    size_bytes: int


class Listed(Control, frozen=True):
    """Entries of a folder. `is_all` is true for the last message of a listing."""

    entries: list[ListedEntry]
    is_all: bool


class Removed(Control, frozen=True):
    """Report: a file was removed."""


class Refused(Control, frozen=True):
    """Refusal of a request for a file or folder. `reason` completes a sentence after its path."""

    reason: str
    kind: FileKind = "file"


class Burned(Control, frozen=True):
    """Report of the CPU time of the REPL's processes since the last such report."""

    cpu_s: float


class Exceeded(Control, frozen=True):
    """Report: the REPL exceeded a limit, and init has ended all its processes.

    Attributes:
        limit: Field of `Limits`.
        used: Measured usage, in the unit of the field.
        allowed: Value of the limit.
        post_mortem: State of the REPL before its end.
    """

    limit: WatchedLimit
    used: float
    allowed: float
    post_mortem: LastSeen


class Died(Control, frozen=True):
    """Report: the REPL ended by itself, by `signal` or with `exit_code`."""

    exit_code: int | None = None
    signal: int | None = None


class ProgramEnded(Control, frozen=True):
    """Report: all processes of a program have ended. Its first one ended by `signal`, or with `exit_code`.

    Attributes:
        number: Number of the program.
        exit_code: Exit code of its first process, or None.
        signal: Signal at the end of its first process, or None.
        limit: Exceeded limit, if init ended the program for it; or None.
        with_repl: Whether init ended it because it ended the REPL.
        not_started: Reason why it could not be started, as the rest of a sentence; or None.
        no_folder: Refusal of its current folder, or None.
    """

    number: int
    exit_code: int | None = None
    signal: int | None = None
    limit: WatchedLimit | None = None
    with_repl: bool = False
    not_started: str | None = None
    no_folder: Refused | None = None


FileRequest = OpenToRead | OpenToWrite | ListFolder | RemoveFile
FileAnswer = Opened | Listed | Removed | Refused
_ToRepl = Start | Resume | Checkpoint | ForkRepl | EndHub | Hand | Begin | Interrupt | Drain | Stop
ToInit = Load | _ToRepl | RunProgram | EndProgram | FileRequest
_ReplReport = Forked | Started | Prepared | Checkpointed | Written | Interrupted | Drained | Stopped | Burned | Died
FromInit = Loaded | Failed | Handed | ProgramEnded | Exceeded | _ReplReport | FileAnswer


PreparationStep = Literal["imports", "context", "setup"]
"""Step of a fork server's preparation for its workers."""

# -- from the orchestrator to the fork server --------------------------------------------------------------------------


class Packages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Installation for the imports of workers, if it differs from the fork server's own.

    Attributes:
        search: Value of `sys.path`.
        own: Module → its file or folder, for the imports of a worker's own code. They are found last, so the
            installation's own modules come first.
        executable: Value of `sys.executable`.
    """

    search: list[str]
    own: dict[str, str]
    executable: str


class Configure(Control, frozen=True):
    """First message: the level, the visible files, and the contents of every worker.

    The sealed memfds of the context travel beside it, if there is a context.

    Attributes:
        level: Name of the isolation level.
        new_root: Empty private folder of the host; the workers' root is built in it.
        readable: Folders and files of the Python installation, readable for workers.
        hidden: Folders below `readable`, empty for workers.
        preload: Modules imported before the first fork, so that every REPL has them already.
        setup: Code that runs before the first fork. Every REPL finds its variables.
        context: Pieces of the context of every REPL.
        seed: Seed of `random` and of numpy's global generator in every REPL; None for a different one in each.
        packages: Installation for the imports of workers; None leaves `sys.path` as it is.
    """

    level: LevelName
    new_root: str
    readable: list[str]
    hidden: list[str]
    preload: list[str] = msgspec.field(default_factory=list)
    setup: str = ""
    context: Annotated[list[ContextPiece], msgspec.Meta(max_length=MAX_PIECES)] = msgspec.field(default_factory=list)
    seed: int | None = None
    packages: Packages | None = None


class Spawn(Control, frozen=True):
    """Command to fork a worker. Beside it travels init's end of the worker's control socket.

    Attributes:
        allow_exec: Whether code may start other programs.
        scratch: Path of the scratch folder on the host, for a level without a root of the worker's own.
        bounds: Bounds of the REPL.
    """

    allow_exec: bool
    scratch: str
    bounds: ReplBounds


# -- from the fork server --------------------------------------------------------------------------------------------


class ZygoteReady(Control, frozen=True):
    """Report: the fork server is isolated and prepared, and can fork.

    Attributes:
        layers: Layers of all its workers.
        memory_bytes: Memory of the fork server in bytes.
    """

    layers: list[Layer]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)]


class ZygoteFailed(Control, frozen=True):
    """Report: a layer failed. The fork server ends.

    Attributes:
        reason: Description of the failure.
        layer: Failed layer.
        code: Error number of the kernel, or 0.
    """

    reason: str
    layer: Layer
    code: int = 0


class NotPrepared(Control, frozen=True):
    """Report: the layers hold, but `step` of the preparation failed. The fork server ends."""

    step: PreparationStep
    reason: str


class Spawned(Control, frozen=True):
    """Report: a worker was forked. The pidfd of its init travels beside it."""


class SpawnFailed(Control, frozen=True):
    """Report: a worker could not be forked."""

    reason: str


ToZygote = Configure | Spawn
FromZygote = ZygoteReady | ZygoteFailed | NotPrepared | Spawned | SpawnFailed


# -- programs --------------------------------------------------------------------------------------------------------

MAX_PROGRAM_BYTES = 1 << 21
"""Maximum bytes of one encoded `Program`; the orchestrator refuses more. The kernel's own bound for arguments and
variables is a quarter of the stack limit: 2 MiB with the usual 8 MiB, 8 bytes a text included (execve(2))."""
MAX_ARGUMENT_BYTES = (1 << 17) - 1
"""Maximum bytes of one argument or variable; more is refused. The kernel's MAX_ARG_STRLEN is 32 pages (131,072 bytes),
the final 0 byte included (execve(2))."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of one program.

    Attributes:
        argv: Arguments, the name of the program first. None contains a 0 byte.
        env: Variables added to init's own. None contains a 0 byte.
    """

    argv: list[bytes]
    env: dict[bytes, bytes]


def unpacker(accepted: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes a packet. It raises `MessageInvalid` if the packet is no `accepted` message."""
    decoder = msgspec.msgpack.Decoder(accepted)

    def unpack(packet: bytes) -> Any:
        try:
            return decoder.decode(packet)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise MessageInvalid(str(error) or type(error).__name__) from None

    return unpack


_encoder = msgspec.msgpack.Encoder()
unpack_to_init: Callable[[bytes], ToInit] = unpacker(ToInit)
unpack_from_init: Callable[[bytes], FromInit] = unpacker(FromInit)
unpack_to_zygote: Callable[[bytes], ToZygote] = unpacker(ToZygote)
unpack_from_zygote: Callable[[bytes], FromZygote] = unpacker(FromZygote)
unpack_program: Callable[[bytes], Program] = unpacker(Program)


def pack(message: Control | Program) -> bytes:
    """Return the message as one packet, or a program as the content of a memfd."""
    return _encoder.encode(message)
