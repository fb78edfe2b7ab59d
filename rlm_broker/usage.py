"""Usage of models: calls, tokens and cost, of one call and of many together."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

from rlm_broker.values.words import spent

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of calls to one model. `a + b` adds two; the sum's cost is known only if both costs are.

    Its `str` is for people: a cost that is not known is called unknown, and zeros are left out.

    Example:
        ```python
        print(Usage(total_calls=1, total_cost=0.5) + Usage(total_calls=2, total_cost=0.25))  # 3 calls, $0.7500
        ```

    Attributes:
        total_calls: Number of calls. A call with several attempts counts once.
        total_input_tokens, total_output_tokens: Tokens as the provider counted them; 0 if it did not.
    """

    total_calls: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float | None = None
    """US dollars, or None if a price is not known."""
    stored_calls: int = 0
    """Calls among `total_calls` answered from a cache or a recording: no request was sent, and none was paid."""
    cached_input_tokens: int = 0
    """Tokens among `total_input_tokens` from the provider's own cache; 0 if it does not say."""

    def __add__(self, other: "Usage") -> "Usage":
        return total_of((self, other))

    def __str__(self) -> str:
        return spent(self)

    @property
    def total_tokens(self) -> int:
        """Tokens, input and output."""
        return self.total_input_tokens + self.total_output_tokens

    @property
    def is_possible(self) -> bool:
        """Whether each number is finite and not negative."""
        return all(0 <= each < math.inf for each in astuple(self) if each is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the shape of other RLM runtimes: `total_cost` only if known, the last two only if above 0.

        Example:
            ```python
            Usage(total_calls=1).to_dict()["total_calls"]  # 1
            ```
        """
        cost: dict[str, Any] = {} if self.total_cost is None else {"total_cost": self.total_cost}
        stored = {"stored_calls": self.stored_calls} if self.stored_calls else {}
        cached = {"cached_input_tokens": self.cached_input_tokens} if self.cached_input_tokens else {}
        return {
            "total_calls": self.total_calls,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            **cost,
            **stored,
            **cached,
        }


class Tally:
    """Sum of any number of usages. It is mutable, because a new `Usage` for each call costs more than the addition."""

    __slots__ = ("_cached", "_calls", "_cost", "_input_tokens", "_output_tokens", "_stored_calls")

    def __init__(self) -> None:
        self._calls = self._input_tokens = self._output_tokens = self._stored_calls = self._cached = 0
        self._cost: float | None = None

    def add(self, usage: Usage) -> None:
        """Add a usage. The sum's cost is known only if the costs of all calls are."""
        if self._calls == 0:
            self._cost = usage.total_cost
        elif self._cost is not None and usage.total_calls:
            self._cost = None if usage.total_cost is None else self._cost + usage.total_cost
        self._calls += usage.total_calls
        self._input_tokens += usage.total_input_tokens
        self._output_tokens += usage.total_output_tokens
        self._stored_calls += usage.stored_calls
        self._cached += usage.cached_input_tokens

    @property
    def usage(self) -> Usage:
        """Sum so far."""
        counted = (self._calls, self._input_tokens, self._output_tokens)
        return Usage(*counted, self._cost, self._stored_calls, self._cached)


def total_of(usages: Iterable[Usage]) -> Usage:
    """Return the sum of usages."""
    tally = Tally()
    for usage in usages:
        tally.add(usage)
    return tally.usage


def totals_by(usages: Iterable[tuple[K, Tally]]) -> dict[K, Usage]:
    """Return the sum of the tallies of each key."""
    totals = defaultdict[K, Tally](Tally)
    for key, tally in usages:
        totals[key].add(tally.usage)
    return {key: total.usage for key, total in totals.items()}


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """Usage by the name of the serving model.

    Example:
        ```python
        usage = rlm.completion("a", "How many?").usage_summary
        print(usage.total_calls, usage.total_cost, usage.model_usage_summaries.keys())
        ```
    """

    model_usage_summaries: Mapping[str, Usage] = field(default_factory=dict)

    @property
    def total(self) -> Usage:
        """Usage of all models together."""
        return total_of(self.model_usage_summaries.values())

    @property
    def total_calls(self) -> int:
        """Calls of all models."""
        return self.total.total_calls

    @property
    def total_input_tokens(self) -> int:
        """Input tokens of all models."""
        return self.total.total_input_tokens

    @property
    def total_output_tokens(self) -> int:
        """Output tokens of all models."""
        return self.total.total_output_tokens

    @property
    def total_cost(self) -> float | None:
        """US dollars of all models, or None if a price is not known."""
        return self.total.total_cost

    def to_dict(self) -> dict[str, Any]:
        """Return the shape of other RLM runtimes: `{"model_usage_summaries": {model: {...}}, "total_cost"?}`."""
        summary: dict[str, Any] = {
            "model_usage_summaries": {model: usage.to_dict() for model, usage in self.model_usage_summaries.items()}
        }
        if (cost := self.total.total_cost) is not None:
            summary["total_cost"] = cost
        return summary
