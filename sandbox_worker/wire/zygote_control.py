"""Control messages between the orchestrator and the fork server (zygote): packets like those of `control`."""

from typing import Annotated, Literal

import msgspec

from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import Control, unpack
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.level import LevelName

PreparationStep = Literal["imports", "context", "setup"]
"""Step of a fork server's preparation for its workers."""


# -- from the orchestrator to the fork server --------------------------------------------------------------------------


class Packages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Installation from which workers import, if it differs from the one that the fork server was started with.

    Attributes:
        search: Value of `sys.path`.
        own: Module → its file or folder, for the modules that a worker's own code needs. They are found last, so the
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
        new_root: Empty private folder of the host, in which the workers' root is built.
        readable: Folders and files of the Python installation, which workers may read.
        hidden: Folders below `readable` that workers must not see.
        preload: Modules that are imported before the first fork, so that every REPL has them already.
        setup: Code that runs before the first fork. Every REPL finds its variables.
        context: Pieces of the context that every REPL finds.
        seed: Seed of `random` and of numpy's global generator in every REPL; None for a different one in each.
        packages: Installation from which workers import; None leaves `sys.path` as it is.
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
        scratch: Path of the scratch folder on the host, for a level whose workers have no root of their own.
        bounds: Bounds of the REPL.
    """

    allow_exec: bool
    scratch: str
    bounds: ReplBounds


# -- from the fork server --------------------------------------------------------------------------------------------


class ZygoteReady(Control, frozen=True):
    """Report that the fork server is isolated and prepared, and can fork.

    Attributes:
        layers: Layers that all its workers share.
        memory_bytes: Memory of the fork server in bytes.
    """

    layers: list[Layer]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)]


class ZygoteFailed(Control, frozen=True):
    """Report that a layer failed. The fork server ends.

    Attributes:
        reason: Description of the failure.
        layer: Layer that failed.
        code: Error number of the kernel, or 0.
    """

    reason: str
    layer: Layer
    code: int = 0


class NotPrepared(Control, frozen=True):
    """Report that the layers hold, but `step` of the preparation failed. The fork server ends."""

    step: PreparationStep
    reason: str


class Spawned(Control, frozen=True):
    """Report that a worker was forked. The pidfd of its init travels beside it."""


class SpawnFailed(Control, frozen=True):
    """Report that a worker could not be forked."""

    reason: str


ToZygote = Configure | Spawn
FromZygote = ZygoteReady | ZygoteFailed | NotPrepared | Spawned | SpawnFailed

_to_zygote: msgspec.msgpack.Decoder[ToZygote] = msgspec.msgpack.Decoder(ToZygote)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


def unpack_to_zygote(packet: bytes) -> ToZygote:
    """Return the message of a packet to the fork server.

    Raises:
        MessageInvalid: The packet is not such a message.
    """
    return unpack(_to_zygote, packet)


def unpack_from_zygote(packet: bytes) -> FromZygote:
    """Return the message of a packet from the fork server.

    Raises:
        MessageInvalid: The packet is not such a message.
    """
    return unpack(_from_zygote, packet)
