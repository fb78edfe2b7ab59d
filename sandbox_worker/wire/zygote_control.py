"""What the orchestrator says to the zygote, and what it answers: packets as those of `control`."""

from typing import Annotated, Literal

import msgspec

from sandbox_worker.loading.form import MAX_PIECES, ContextPiece
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import Control, unpack
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.level import LevelName

PreparationStep = Literal["imports", "context", "setup"]
"""What a fork server gets ready for its workers."""


# -- the orchestrator says to the zygote -------------------------------------------------------------------------------


class Packages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What workers import from, where it is not what the fork server was started with.

    Attributes:
        search: `sys.path`.
        own: Module → its file or its folder, which is found after all else: what a worker's own code needs.
        executable: `sys.executable`.
    """

    search: list[str]
    own: dict[str, str]
    executable: str


class Configure(Control, frozen=True):
    """First message: which level, what is visible in it, and what every worker is to find.

    Beside it travel the sealed memfds of a context, if there is one.

    Attributes:
        new_root: An empty private folder of the host where the worker's root is built.
        readable: Folders and files of the Python installation.
        hidden: Folders below them that no worker shall see.
        preload: Modules that every REPL finds imported already.
        setup: Code whose variables every REPL finds.
        context: The pieces of the context that every REPL finds.
        seed: What `random` and numpy's global generator begin with in every REPL.
        packages: None leaves `sys.path` as it is.
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
    """Fork a worker. Beside it travels one descriptor: init's end of the worker's control socket.

    Attributes:
        scratch: The scratch folder, for a level without a mount namespace of its own.
    """

    allow_exec: bool
    scratch: str
    bounds: ReplBounds


# -- the zygote says -------------------------------------------------------------------------------------------------


class ZygoteReady(Control, frozen=True):
    """It is locked in and can fork.

    Attributes:
        layers: The layers that all its workers share.
        memory_bytes: What it takes.
    """

    layers: list[Layer]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)]


class ZygoteFailed(Control, frozen=True):
    """It could not be locked in, and has ended.

    Attributes:
        code: The kernel's error number, or 0.
    """

    reason: str
    layer: Layer
    code: int = 0


class NotPrepared(Control, frozen=True):
    """Its layers are in place, but `step` of what it was to get ready failed, and it has ended."""

    step: PreparationStep
    reason: str


class Spawned(Control, frozen=True):
    """A worker was forked. Beside it travels the pidfd of its init."""


class SpawnFailed(Control, frozen=True):
    """No worker could be forked."""

    reason: str


ToZygote = Configure | Spawn
FromZygote = ZygoteReady | ZygoteFailed | NotPrepared | Spawned | SpawnFailed

_to_zygote: msgspec.msgpack.Decoder[ToZygote] = msgspec.msgpack.Decoder(ToZygote)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


def unpack_to_zygote(packet: bytes) -> ToZygote:
    """Raises: MessageInvalid."""
    return unpack(_to_zygote, packet)


def unpack_from_zygote(packet: bytes) -> FromZygote:
    """Raises: MessageInvalid."""
    return unpack(_from_zygote, packet)
