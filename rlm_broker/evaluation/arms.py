"""The arms of an evaluation: the same model, plainly asked or with runs of a maximum depth."""

from dataclasses import dataclass
from typing import Final

from rlm_broker.errors import ConfigurationError

PLAIN: Final = "plain"
ARM_NAMES: Final = (PLAIN, *(f"rlm{depth}" for depth in range(1, 10)))
"""Names of all arms; the place of a name is its `max_depth`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask all questions.

    Attributes:
        name: Name on the command line and in files.
        max_depth: Levels of runs that have a REPL. With 0 the model gets the context in its prompt.
    """

    name: str
    max_depth: int


def arms_of(text: str) -> tuple[Arm, ...]:
    """Return the arms that a text names, in its order.

    Examples:
        >>> [arm.max_depth for arm in arms_of("plain,rlm2")]
        [0, 2]

    Raises:
        ConfigurationError: There is no such arm, or none is named.
    """
    arms: dict[str, Arm] = {}
    for name in filter(None, (each.strip() for each in text.split(","))):
        if name not in ARM_NAMES:
            raise ConfigurationError(f"there is no arm {name[:40]!r}: name plain, or rlm1 to rlm9 for a max_depth")
        arms[name] = Arm(name, ARM_NAMES.index(name))
    if not arms:
        raise ConfigurationError("there is no arm: name some of plain, rlm1, rlm2")
    return tuple(arms.values())
