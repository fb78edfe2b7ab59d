"""Content of a fork server that all its workers inherit."""

from dataclasses import dataclass, field
from typing import Any

from sandbox_worker.loading.context import Undecoded


@dataclass
class Preloaded:
    """Objects that a worker has in memory when it is forked.

    Attributes:
        seed: Seed of `random` and of numpy's global generator in each REPL; None for a different one in each.
        contexts: Name of a context → its value.
        variables: Name → value, for the variables of the set-up code.
        undecoded: Parts of contexts that the REPL must still decode.
    """

    seed: int | None = None
    contexts: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    undecoded: list[Undecoded] = field(default_factory=list)
