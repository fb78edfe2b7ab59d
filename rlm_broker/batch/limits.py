"""The limits of a whole batch."""

from dataclasses import dataclass, fields

from rlm_broker.errors import ConfigurationError, require_kind


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a whole batch, over all processes that have worked on it. None means no limit.

    A limit that is reached ends the batch with `LimitReached`. Calls that are under way then have 20 seconds to end,
    and their answers are kept in the journal. Items that are not finished can be gone on with, under a higher limit.

    Attributes:
        max_budget_usd: Maximum cost in US dollars. The price of each model must be known.
        max_tokens: Maximum tokens, input and output.
        timeout_s: Seconds that processes have worked on it, all together.

    Raises:
        ConfigurationError: A limit is not a number above 0.
    """

    max_budget_usd: float | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = (int,) if each.name == "max_tokens" else (int, float)
            require_kind(f"the limit {each.name} of a batch", value, *kinds, type(None))
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"the limit {each.name} of a batch must be above 0, not {value!r}")
