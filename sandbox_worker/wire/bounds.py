"""The bounds of one REPL: the one definition that both sides use."""

from typing import Annotated, Literal, NamedTuple

import msgspec

from sandbox_worker.wire.headtail import OutputBounds
from sandbox_worker.wire.messages import PositiveInt


class ReplBounds(OutputBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one REPL may use, with everything it starts. Each field is a field of `Limits`, which describes it.

    No bound of a folder is 0, which a tmpfs takes for no bound. A new bound is declared here and there;
    `Limits.repl_bounds` carries it over by its name. Those of output stand beside the code that keeps to them.

    Attributes:
        cpu_s: CPU time of one block in seconds, or None. Past it the REPL is killed.
        max_frame_bytes: Payload of one message. Here it keeps an honest REPL from being ended by it.
        later_context_bytes: Address space of contexts that the REPL is given while it lives; 0 is none.
    """

    memory_bytes: PositiveInt
    max_processes: PositiveInt
    max_open_files: PositiveInt
    scratch_bytes: PositiveInt
    max_scratch_files: PositiveInt
    cpu_s: float | None
    max_frame_bytes: PositiveInt
    later_context_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Watched(NamedTuple):
    """How init watches a bound; past it the REPL is killed.

    Attributes:
        usage: Field of what init sees in use, which is compared with the bound.
        divisor, unit: What both are told in: numbers are divided by the one and followed by the other.
    """

    usage: str
    divisor: int
    unit: str


WatchedLimit = Literal[
    "memory_bytes", "max_processes", "cpu_s", "block_timeout_s", "scratch_bytes", "max_scratch_files"
]
"""Fields of `Limits` for which init ends a REPL."""
SCRATCH_LIMITS: frozenset[WatchedLimit] = frozenset({"scratch_bytes", "max_scratch_files"})
"""Those of what stays when a REPL has ended."""
WATCHED: dict[WatchedLimit, Watched] = {
    "memory_bytes": Watched("memory_bytes", 1 << 20, "MiB"),
    "max_processes": Watched("threads", 1, "threads and processes"),
    "cpu_s": Watched("cpu_s", 1, "s CPU time"),
    "scratch_bytes": Watched("scratch_bytes", 1 << 20, "MiB of the scratch folder"),
    "max_scratch_files": Watched("scratch_files", 1, "files in the scratch folder"),
}
"""Field of `ReplBounds` -> how it is watched."""
