"""Lengths of contexts as users write them: 8k, 64k, 1m, in tokens or characters."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from rlm_broker.errors import ConfigurationError

Unit = Literal["tokens", "chars"]
LEAST_CHARS: Final = 3_000
"""Least characters of a context, so that all facts have room and some filler is among them."""
MOST_CHARS: Final = 100_000_000
"""Most characters of a context: it is made in memory."""
_FACTORS: Final = {"": 1, "k": 1_000, "m": 1_000_000}
_LENGTH: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([km]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Length:
    """One length of contexts.

    Attributes:
        name: Text as the user wrote it, in lower case.
        amount: Tokens or characters.
        unit: Which of both.
    """

    name: str
    amount: int
    unit: Unit

    def chars(self, chars_per_token: float) -> int:
        """Return the characters of a context of this length.

        Raises:
            ConfigurationError: It is too short or too long for a task.
        """
        chars = self.amount if self.unit == "chars" else int(self.amount * chars_per_token)
        if not LEAST_CHARS <= chars <= MOST_CHARS:
            raise ConfigurationError(
                f"length {self.name} is {chars:,} characters, and a context has from {LEAST_CHARS:,} to {MOST_CHARS:,}"
            )
        return chars


def lengths_of(text: str, unit: Unit) -> tuple[Length, ...]:
    """Return the lengths that a text names, without repetitions, in rising order.

    Examples:
        >>> [length.amount for length in lengths_of("64k, 8k", "tokens")]
        [8000, 64000]

    Raises:
        ConfigurationError: A length cannot be read, or there is none.
    """
    found: dict[int, Length] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _LENGTH.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"length {part[:40]!r} cannot be read: write a number with k or m, such as 8k,1m")
        amount = round(float(match[1]) * _FACTORS[match[2].lower()])
        found.setdefault(amount, Length(part.lower(), amount, unit))
    if not found:
        raise ConfigurationError("there is no length: write one or more, such as 8k,64k,1m")
    return tuple(found[amount] for amount in sorted(found))
