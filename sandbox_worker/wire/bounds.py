"""The bounds of one REPL: the one definition that both sides use."""

from typing import Annotated, NamedTuple

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
"""A bound: where 0 would mean that there is none."""


class ReplBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one REPL may use, with everything it starts. Each field is a field of `Limits`, which describes it.

    A new bound is declared here and there; `Limits.repl_bounds` carries it over by its name.

    Attributes:
        cpu_s: CPU time of one block in seconds, or None. Past it the REPL is killed.
        max_frame_bytes, max_output_bytes: Here they keep an honest REPL from being ended by them.
    """

    memory_bytes: Positive
    max_processes: Positive
    max_open_files: Positive
    scratch_bytes: Positive
    max_scratch_files: Positive
    cpu_s: float | None
    max_frame_bytes: Positive
    max_output_bytes: Positive


class Watched(NamedTuple):
    """How init watches a bound; past it the REPL is killed.

    Attributes:
        usage: Field of what init sees in use, which is compared with the bound.
        divisor, unit: What both are told in: numbers are divided by the one and followed by the other.
    """

    usage: str
    divisor: int
    unit: str


WATCHED = {
    "memory_bytes": Watched("memory_bytes", 1 << 20, "MiB"),
    "max_processes": Watched("threads", 1, "threads and processes"),
    "cpu_s": Watched("cpu_s", 1, "s CPU time"),
    "scratch_bytes": Watched("scratch_bytes", 1 << 20, "MiB of the scratch folder"),
    "max_scratch_files": Watched("scratch_files", 1, "files in the scratch folder"),
}
"""Field of `ReplBounds` -> how it is watched."""
