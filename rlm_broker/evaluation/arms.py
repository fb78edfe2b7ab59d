"""The arms of an evaluation: the same model, plainly asked or with runs of a maximum depth, and with other settings."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.values.validation import did_you_mean

PLAIN: Final = "plain"
KINDS: Final = (PLAIN, *(f"rlm{depth}" for depth in range(1, 10)))
"""Kinds of arms; the place of a kind is its `max_depth`."""
SETTINGS: Final = frozenset(
    {"model", "sub_model", "recursion", "prompt_profile", "model_policy", *Limits.model_fields} - {"max_depth"}
)
"""Settings that an arm may have of its own."""
MOST_NAME_CHARS: Final = 120
"""Maximum characters of an arm's name, which is the name of a file as well."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to ask all questions.

    Attributes:
        name: Name on the command line.
        max_depth: Levels of runs that have a REPL. With 0 the model gets the context in its prompt.
        settings: Names and values of settings of this arm alone.
    """

    name: str
    max_depth: int
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        """Name of the file of its results."""
        return f"{quote(self.name, safe=':=')}.jsonl"


def arms_of(text: str) -> tuple[Arm, ...]:
    """Return the arms that a text names, in its order.

    Examples:
        >>> [arm.max_depth for arm in arms_of("plain,rlm2")]
        [0, 2]
        >>> arms_of("rlm1:max_iterations=5:recursion=auto")[0].settings
        (('max_iterations', '5'), ('recursion', 'auto'))

    Raises:
        ConfigurationError: There is no such arm or setting, or none is named.
    """
    arms: dict[str, Arm] = {}
    for name in filter(None, (each.strip() for each in text.split(","))):
        kind, *given = name.split(":")
        if kind not in KINDS:
            raise ConfigurationError(f"there is no arm {kind[:40]!r}: name plain, or rlm1 to rlm9 for a max_depth")
        if len(name) > MOST_NAME_CHARS:
            raise ConfigurationError(f"the arm {name[:40]!r}... has more than {MOST_NAME_CHARS} characters")
        arms[name] = Arm(name, KINDS.index(kind), tuple(_setting(name, each) for each in given))
    if not arms:
        raise ConfigurationError("there is no arm: name some of plain, rlm1, rlm2")
    return tuple(arms.values())


def _setting(arm: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not value:
        raise ConfigurationError(f"the arm {arm!r} has {text!r}: give NAME=VALUE, for example rlm1:recursion=auto")
    if name not in SETTINGS:
        why = did_you_mean(name, SETTINGS)
        raise ConfigurationError(f"the arm {arm!r} names {name!r}, which is no setting of an arm{why}")
    return name, value
