"""Bounds of one REPL, and how init watches them: the one definition that both sides use."""

from typing import Annotated, Literal, NamedTuple

import msgspec

from sandbox_worker.wire.headtail import OutputBounds
from sandbox_worker.wire.messages import PositiveInt


class ReplBounds(OutputBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one REPL together with all that it starts. Each field is a field of `Limits`, which describes it.

    A new bound is declared here and in `Limits`; `Limits.repl_bounds` copies it by its name. The bounds of output
    are inherited from `OutputBounds`, which stands beside the code that enforces them. The bounds of the scratch
    folder are at least 1, because tmpfs takes 0 for "no bound".

    Attributes:
        cpu_s: CPU time of one block in seconds, or None for no bound. Beyond it, init kills the REPL.
        max_frame_bytes: Largest payload of one message in bytes. The orchestrator ends a REPL that sends a larger one;
            with this field the REPL's own code refuses first, so that an honest REPL survives.
        later_context_bytes: Address space in bytes for contexts that the REPL is given while it lives. 0 permits none.
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
    """The way init watches one bound. Beyond the bound, init kills the REPL.

    Attributes:
        usage: Field of init's measured usage that is compared with the bound.
        divisor: Number by which bound and usage are divided in messages to users.
        unit: Unit that follows the divided numbers.
    """

    usage: str
    divisor: int
    unit: str


WatchedLimit = Literal[
    "memory_bytes", "max_processes", "cpu_s", "block_timeout_s", "scratch_bytes", "max_scratch_files"
]
"""Fields of `Limits` for which init kills a REPL."""
SCRATCH_LIMITS: frozenset[WatchedLimit] = frozenset({"scratch_bytes", "max_scratch_files"})
"""Limits of the scratch folder. Its content outlives a REPL, so a new REPL of the same worker would exceed them again;
the worker is replaced."""
WATCHED: dict[WatchedLimit, Watched] = {
    "memory_bytes": Watched("memory_bytes", 1 << 20, "MiB"),
    "max_processes": Watched("threads", 1, "threads and processes"),
    "cpu_s": Watched("cpu_s", 1, "s CPU time"),
    "scratch_bytes": Watched("scratch_bytes", 1 << 20, "MiB of the scratch folder"),
    "max_scratch_files": Watched("scratch_files", 1, "files in the scratch folder"),
}
"""Field of `ReplBounds` → the way init watches it. "block_timeout_s" is missing here: `Begin` gives its CPU time anew
for each block."""
