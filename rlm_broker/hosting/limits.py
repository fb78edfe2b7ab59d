"""Limits of one run, out of those of the server, of its owner and of its request."""

from typing import Any

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import RunLimits


def tightened(
    base: RunLimits, owners: RunLimits | None, asked: RunLimits | None, left_usd: float | None
) -> RunLimits | None:
    """Return the limits that hold for one run, where they differ from those of the server.

    Args:
        base: Limits of the server. Those of the owner replace them.
        owners: Limits of the owner, or None.
        asked: Limits of the request, which may be smaller and not larger, or None.
        left_usd: US dollars that the owner may still spend today, or None.

    Raises:
        ConfigurationError: The request asks for more than the owner may have.
    """
    held = {} if owners is None else owners.model_dump(exclude_unset=True)
    wanted = {} if asked is None else asked.model_dump(exclude_unset=True)
    for name, value in wanted.items():
        bound = held.get(name, getattr(base, name))
        if bound is not None and _is_above(value, bound):
            raise ConfigurationError(f"the limit {name} = {value} is above its bound, {_shown(bound)}: ask for less")
    together = {**held, **wanted}
    if left_usd is not None:
        budget = together.get("max_budget_usd", base.max_budget_usd)
        together["max_budget_usd"] = left_usd if budget is None else min(budget, left_usd)
    return RunLimits(**together) if together else None


def _is_above(value: Any, bound: Any) -> bool:
    """Whether a limit is above its bound. Limits by depth are compared depth by depth; None is above all."""
    if value is None:
        return True
    values = value if isinstance(value, tuple) else (value,)
    bounds = bound if isinstance(bound, tuple) else (bound,)
    most = max(len(values), len(bounds))
    pairs = ((values[min(n, len(values) - 1)], bounds[min(n, len(bounds) - 1)]) for n in range(most))
    return any(one > other for one, other in pairs)


def _shown(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
