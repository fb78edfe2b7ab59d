"""The walls, by one name."""

from collections.abc import Sequence

from sandbox_worker.isolation import zygote_layers
from sandbox_worker.isolation.walls import LayerFailed, WorkerBounds, ZygoteWalls
from sandbox_worker.isolation.worker_layers import lock_down_init, lock_down_repl
from sandbox_worker.isolation.zygote_layers import fork_worker

__all__ = [
    "LayerFailed",
    "WorkerBounds",
    "ZygoteWalls",
    "enter_zygote",
    "fork_worker",
    "lock_down_init",
    "lock_down_repl",
]


def enter_zygote(
    level: str, new_root: str, readable: Sequence[str], hidden: Sequence[str], worker_uid: int
) -> ZygoteWalls:
    """See `zygote_layers`."""
    del worker_uid
    return zygote_layers.enter_zygote(level, new_root, readable, hidden)
