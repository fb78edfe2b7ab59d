"""What a fork server has loaded for all of its workers."""

from dataclasses import dataclass, field
from typing import Any

from sandbox_worker.loading.context import Undecoded


@dataclass
class Preloaded:
    """What a worker finds in its memory when it is forked.

    Attributes:
        seed: What the generators of `random` and numpy begin with in each REPL; None is another seed for each.
        contexts: Name → value.
        variables: Of the set-up code, by name.
        undecoded: Contexts that the REPL decodes.
    """

    seed: int | None = None
    contexts: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    undecoded: list[Undecoded] = field(default_factory=list)
