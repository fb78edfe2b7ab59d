"""Common types of the layers of fork server, init and REPL: bounds, the layers applied, the failure of one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sandbox_worker.isolation.namespaces import WorkerIds
from sandbox_worker.wire.level import Layer, Level

if TYPE_CHECKING:  # `doctor` applies these layers with any Python, also one without msgspec
    from sandbox_worker.wire.bounds import ReplBounds


class LayerFailed(Exception):
    """A layer could not be applied. No code may run without it.

    Attributes:
        layer: Its name, by which the orchestrator finds the remedy.
        reason: The failed call, and the kernel's reason.
        code: The kernel's error number; 0 if no call failed.
    """

    def __init__(self, layer: Layer, reason: str, code: int = 0) -> None:
        super().__init__(f"isolation layer {layer!r} failed: {reason}")
        self.layer = layer
        self.reason = reason
        self.code = code


class WorkerBounds(NamedTuple):
    """Bounds of one worker, enforced by the kernel. All numbers are positive: a tmpfs takes 0 as unbounded.

    Attributes:
        allow_exec: Whether model code may start programs, confined like itself. Only at "strict".
        repl: The REPL's bounds. `max_processes` includes init, and holds where the kernel can count by worker.
            `max_open_files` holds for each process. `scratch_bytes` holds for a single file; if the scratch folder is
            a file system of its own, `scratch_bytes` and `max_scratch_files` also hold for the whole folder.
        data_bytes: Private writable memory in bytes of each process of the REPL, in addition to what it finds.
        reserved_bytes: The part of these bytes for our own code. The soft limit is lower by it; model code could raise
            the soft limit.
    """

    allow_exec: bool
    repl: "ReplBounds"
    data_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class ZygoteLayers:
    """Layers applied by `enter_zygote`, and facts found by it, for the workers to be forked.

    Attributes:
        level: The level asked for. It holds.
        layers: Names of the applied layers, in order. Without "other uid" the fork server kept its user.
        worker_ids: Users for the workers; None if they have the fork server's.
        readable: Files and folders of the host that a worker may read, at levels without a root of its own.
        proc_is_fresh: Whether a /proc of the worker's own can be mounted. If not, workers at "strict" have none.
        temporary_is_free: Whether workers also see their scratch folder at /tmp.
        own_pid: The fork server's pid in its own pid namespace.
        own_pidfd: A pidfd of the fork server at "strict", else -1. With it the fork server returns to its pid namespace
            after it has made one for a worker.
        landlock_abi: Version of Landlock; 0 at "process".
        last_capability: The kernel's highest capability; 0 at "process".
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
    """Context manager around the application of the layer `name`.

    An OSError in its block becomes `LayerFailed`. Success adds the name to `applied`.
    """

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
