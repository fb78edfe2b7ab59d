"""The bounds of one REPL: the one definition that both sides use."""

from typing import Annotated

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
