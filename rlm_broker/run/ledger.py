"""The ledger of one run tree: calls, children, tokens and money, used and left.

Theory of operation. All runs of a tree share one ledger on one event loop, so a check and a count between two `await`s
are one step: no lock is needed. No other module counts these four, or raises `LimitReached` for them.

Calls and children are counted before they start, so their limits are exact. The cost of a call is known only
afterwards. So if tokens or money are bounded, each call sets aside its maximum cost (`hold`). It waits while the open
calls may take the whole rest. Its estimate of tokens is the prompt plus `max_completion_tokens`, or plus the largest
output so far if that is not set. Its estimate of money is the largest cost so far. Before the first reply the largest
are infinite, so the first call runs alone. Calls at the same time then overshoot a limit together by no more than one
would: its estimate was too low, or the rest was smaller. Two other ways were rejected: to refuse at the limit alone,
since a batch of hundreds of calls would pass it together; and to run calls one by one, since a batch would take as long
as the sum of its calls.

With a ledger above (a `Budget` of several trees), each count goes to both, and the smaller remainder holds.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct

from rlm_broker.broker.clients.base import estimate_tokens
from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.limits import Limits
from rlm_broker.usage import Tally, Usage, UsageSummary, totals_by

N = TypeVar("N", int, float)

CAUTIOUS_CHARS_PER_TOKEN = 3.0
"""Characters per token in estimates for `max_tokens`. Tokens have more on average: too high an estimate stops a run
early, while too low a one lets it spend more than the limit."""


class Hold(Struct, frozen=True, eq=False):
    """Means set aside for an open call. A value without an estimate is infinite.

    Attributes:
        tokens: Tokens of the prompt and its reply together.
        cost_usd: Money in US dollars.
        input_tokens: Estimate of the prompt's part of `tokens`.
        above: Hold of the same call in the ledger above.
    """

    tokens: float
    cost_usd: float
    input_tokens: float = 0
    above: "Hold | None" = None


class Spent(Struct):
    """Means that a run had used before it goes on: calls, children, and usage by model and depth."""

    calls: int = 0
    children: int = 0
    usage: dict[tuple[str, int], Usage] = {}


NOTHING = Hold(0, 0)
"""Hold of every call if neither tokens nor money are bounded: no means are set aside then."""


class Ledger:
    """Counts the means of a tree, for all of its runs. It lives on one event loop.

    Args:
        above: Ledger of several trees; every count here is made there, too.
        name: Name of this tree there, before those of its runs. So the usage of a run there has not what is used here.

    Attributes:
        calls: Language model calls so far, with the open ones.
        children: Child runs so far.
        has_bounded_means: Whether tokens or money have a limit, here or above. If so, each call must `hold`.
    """

    def __init__(self, limits: Limits, above: "Ledger | None" = None, name: str = "") -> None:
        self.limits = limits
        self._above = above
        self._name = name
        self._is_bounded = not (limits.max_tokens is None and limits.max_budget_usd is None)
        self.has_bounded_means: bool = self._is_bounded or (above is not None and above.has_bounded_means)
        self.calls = 0
        self.children = 0
        self._usage = defaultdict[tuple[str, str, int], Tally](Tally)
        self._open: set[Hold] = set()
        self._changed = asyncio.Event()
        self._tokens: float = 0
        self._cost_usd = 0.0
        self._largest_output: float = math.inf
        self._largest_cost: float = math.inf
        self._unpriced: str | None = None

    # -- before ------------------------------------------------------------------------------------------------------

    def charge_call(self) -> int:
        """Count a call before it is made; return its number, from 1.

        Raises:
            LimitReached: `max_llm_calls` calls were made already, or the tokens or the budget are spent.
        """
        if self.has_bounded_means:
            self.require_means()
        allowed = self.limits.max_llm_calls
        if allowed is not None and self.calls >= allowed:
            raise LimitReached("max_llm_calls", self.calls, allowed)
        if self._above is not None:
            self._above.charge_call()
        self.calls += 1
        return self.calls

    def require_means(self) -> None:
        """Refuse a further call if the tokens or the budget are spent.

        Raises:
            LimitReached: They are.
            ConfigurationError: `max_budget_usd` is set, and a called model has no known price.
        """
        if not self._is_bounded:
            return
        tokens, budget_usd = self.limits.max_tokens, self.limits.max_budget_usd
        if tokens is not None and self._tokens >= tokens:
            raise LimitReached("max_tokens", self._tokens, tokens)
        if budget_usd is not None and self._unpriced is not None:
            raise ConfigurationError(
                f"max_budget_usd cannot be kept: the price of model {self._unpriced!r} is not known; bound max_tokens "
                "or max_llm_calls instead"
            )
        if budget_usd is not None and self._cost_usd >= budget_usd:
            raise LimitReached("max_budget_usd", self._cost_usd, budget_usd)

    def charge_child(self) -> None:
        """Count a child run before it starts.

        Raises:
            LimitReached: `max_children_total` runs were started already.
        """
        allowed = self.limits.max_children_total
        if allowed is not None and self.children >= allowed:
            raise LimitReached("max_children_total", self.children, allowed)
        if self._above is not None:
            self._above.charge_child()
        self.children += 1

    async def hold(self, input_chars: int, max_completion_tokens: int | None) -> Hold:
        """Set aside the maximum cost of a call, before it is made. `settle` or `release` it afterwards.

        While open calls may take the whole rest, this waits for the end of one of them.

        Raises:
            LimitReached, ConfigurationError: As for `require_means`.
        """
        if not self.has_bounded_means:
            return NOTHING
        above = None if self._above is None else await self._above.hold(input_chars, max_completion_tokens)
        try:
            return await self._held(input_chars, max_completion_tokens, above)
        except BaseException:
            if self._above is not None and above is not None:
                self._above.release(above)
            raise

    async def _held(self, input_chars: int, max_completion_tokens: int | None, above: Hold | None) -> Hold:
        while True:
            self.require_means()
            output = self._largest_output if max_completion_tokens is None else max_completion_tokens
            sent = estimate_tokens(input_chars, CAUTIOUS_CHARS_PER_TOKEN)
            hold = Hold(sent + output, self._largest_cost, sent, above)
            if not self._open or self._fits(hold):
                self._open.add(hold)
                return hold
            await self._changed.wait()

    # -- after -------------------------------------------------------------------------------------------------------

    def settle(self, hold: Hold, run: str, model: str, depth: int, usage: Usage, output_chars: int) -> None:
        """Add the usage of a call, under its run, its depth and its model.

        If the client counted no tokens, `max_tokens` counts an estimate. The estimate is not part of any usage.
        """
        if self._above is not None:
            # `release` below gives back its hold, too
            self._above.settle(hold, f"{self._name}{run}", model, depth, usage, output_chars)
        self._usage[run, model, depth].add(usage)
        if not self.has_bounded_means:  # no means were set aside, and no call will ask what is left
            return
        output: float = usage.total_output_tokens
        tokens: float = usage.total_input_tokens + output
        if not tokens and not usage.stored_calls:  # a reply from the cache takes no tokens
            output = estimate_tokens(output_chars, CAUTIOUS_CHARS_PER_TOKEN)
            tokens = math.ceil(hold.input_tokens + output)
        self._tokens += tokens
        self._largest_output = _larger(self._largest_output, output)
        if usage.total_cost is None:
            self._unpriced = self._unpriced or model
        else:
            self._cost_usd += usage.total_cost
            self._largest_cost = _larger(self._largest_cost, usage.total_cost)
        self.release(hold)

    def release(self, hold: Hold) -> None:
        """Give back the hold of a call. Harmless when repeated."""
        if self._above is not None and hold.above is not None:
            self._above.release(hold.above)
        if hold in self._open:
            self._open.remove(hold)
            self._changed.set()
            self._changed = asyncio.Event()

    def add_earlier(self, model: str, usage: Usage) -> None:
        """Count means used before this ledger was made. They are no estimate of a single call."""
        self._tokens += usage.total_input_tokens + usage.total_output_tokens
        self._cost_usd += usage.total_cost or 0.0
        if usage.total_cost is None and usage.total_calls:
            self._unpriced = self._unpriced or model

    def go_on(self, spent: Spent, run: str) -> None:
        """Begin with what was spent before: it counts as usage of `run`, too."""
        self.calls += spent.calls
        self.children += spent.children
        for (model, depth), usage in spent.usage.items():
            self._usage[run, model, depth].add(usage)
            self.add_earlier(model, usage)

    # -- what there is -----------------------------------------------------------------------------------------------

    def summary(self, run: str | None = None) -> UsageSummary:
        """Return the usage by model, of `run` and all below it; None is the whole tree."""
        return UsageSummary(
            totals_by((model, used) for (of, model, _), used in self._usage.items() if _is_within(of, run))
        )

    def by_depth(self, run: str | None = None) -> Mapping[int, Usage]:
        """Return the usage by depth, of `run` and all below it; depth 0 is the root's own loop."""
        totals = totals_by((depth, used) for (of, _, depth), used in self._usage.items() if _is_within(of, run))
        return dict(sorted(totals.items()))

    def left(self) -> dict[str, float | None]:
        """Return the remaining means by the name of their limit; None is without a bound."""
        limits = self.limits
        own = {
            "max_llm_calls": _left(limits.max_llm_calls, self.calls),
            "max_children_total": _left(limits.max_children_total, self.children),
            "max_tokens": _left(limits.max_tokens, self._tokens),
            "max_budget_usd": _left(limits.max_budget_usd, self._cost_usd),
        }
        if self._above is None:
            return own
        return {name: smaller(left, own[name]) for name, left in self._above.left().items()}

    def is_scarce(self, share: float) -> bool:
        """Whether this share or less is left of calls, tokens or money. It is asked in each turn of each run."""
        limits, spent = self.limits, 1 - share
        return (
            (limits.max_llm_calls is not None and self.calls >= limits.max_llm_calls * spent)
            or (limits.max_tokens is not None and self._tokens >= limits.max_tokens * spent)
            or (limits.max_budget_usd is not None and self._cost_usd >= limits.max_budget_usd * spent)
        )

    def _fits(self, hold: Hold) -> bool:
        tokens = self._tokens + hold.tokens + sum(other.tokens for other in self._open)
        cost_usd = self._cost_usd + hold.cost_usd + sum(other.cost_usd for other in self._open)
        limits = self.limits
        fits_tokens = limits.max_tokens is None or tokens <= limits.max_tokens
        return fits_tokens and (limits.max_budget_usd is None or cost_usd <= limits.max_budget_usd)


def _larger(known: float, seen: float) -> float:
    return seen if known == math.inf or seen > known else known


def smaller(one: N | None, other: N | None) -> N | None:
    """Return the smaller of two limits; None sets no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _left(allowed: float | None, used: float) -> float | None:
    return None if allowed is None else max(0, allowed - used)


def _is_within(run: str, root: str | None) -> bool:
    return root is None or run == root or run.startswith(f"{root}.")
