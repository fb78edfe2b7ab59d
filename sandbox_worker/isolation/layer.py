"""What the layers of zygote, init and REPL have in common: bounds, what was applied, how one fails."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sandbox_worker.isolation.namespaces import WorkerIds
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.level import Level

if TYPE_CHECKING:  # msgspec is not needed to apply these layers, so that any Python can
    from sandbox_worker.wire.bounds import ReplBounds


class LayerFailed(Exception):
    """A layer could not be applied, and nothing may run without it.

    Attributes:
        layer: Its name, by which the orchestrator finds what would give it.
        reason: The call that failed, and the kernel's reason.
        code: The kernel's error number, or 0 if the kernel did not refuse anything.
    """

    def __init__(self, layer: Layer, reason: str, code: int = 0) -> None:
        super().__init__(f"isolation layer {layer!r} failed: {reason}")
        self.layer = layer
        self.reason = reason
        self.code = code


class WorkerBounds(NamedTuple):
    """What one worker may do and use at most. All numbers are positive: to a tmpfs, 0 means without a bound.

    Attributes:
        allow_exec: Whether model code may start programs, which are as confined as it is itself. Only at "strict".
        repl: What the kernel enforces of these bounds: `max_processes` counts init too, and holds where the kernel can
            count by worker; `max_open_files` holds for each process; `scratch_bytes` holds for a single file, and as
            `max_scratch_files` does for the scratch folder as a whole where that is a file system of its own.
        address_space_bytes: That each process of the REPL may map on top of what it finds mapped.
        reserved_bytes: The part of that for our own code: the soft limit is lower by it, and model code could raise it.
    """

    allow_exec: bool
    repl: "ReplBounds"
    address_space_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class ZygoteLayers:
    """What `enter_zygote` did and found out, for the workers to be forked.

    Attributes:
        level: What was asked for, and holds.
        layers: Names of what was applied, in order; without "other uid" the zygote is still who it was.
        worker_ids: Users for the workers, where they can be others than the zygote's.
        readable: Files and folders of the host that a worker may read, where no root of its own hides the rest.
        proc_is_fresh: Whether a /proc of our own can be mounted; elsewhere workers have none.
        temporary_is_free: Whether workers see their scratch folder at /tmp, too.
        own_pid: Of the zygote, in its own pid namespace.
        own_pidfd: Of the zygote at "strict", else -1. It is the way back after a worker's pid namespace was made.
        landlock_abi: 0 at "process".
        last_capability: The highest one of this kernel; 0 at "process".
    """

    level: Level
    layers: tuple[Layer, ...] = ()
    worker_ids: WorkerIds | None = None
    readable: tuple[str, ...] = ()
    proc_is_fresh: bool = True
    temporary_is_free: bool = False
    own_pid: int = 0
    own_pidfd: int = -1
    landlock_abi: int = 0
    last_capability: int = 0


class layer:
    """Apply the layer `name` in this block: an OSError becomes `LayerFailed`, success adds the name to `applied`."""

    __slots__ = ("_applied", "_name")

    def __init__(self, name: Layer, applied: list[Layer]) -> None:
        self._name = name
        self._applied = applied

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            what = error.strerror or str(error)
            reason = f"{error.filename}: {what}" if error.filename else what
            raise LayerFailed(self._name, reason, error.errno or 0) from error
        if error is None:
            self._applied.append(self._name)
