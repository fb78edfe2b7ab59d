"""What one run tree has spent. The only counters there are, and the only place that raises LimitReached for them."""

from collections.abc import Mapping

from rlm_broker.errors import LimitReached
from rlm_broker.limits import Limits
from rlm_broker.types import Usage, UsageSummary


class Ledger:
    """Shared by every run of a tree; lives on the event loop, so that check and count are one step.

    Attributes:
        calls: Language model calls so far, the open ones included.
        children: Child runs so far.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.calls = 0
        self.children = 0
        self._usage: dict[tuple[str, int], Usage] = {}

    def charge_call(self) -> int:
        """Count a call before it is made; return its number, from 1.

        Raises:
            LimitReached: `max_llm_calls` calls were made already.
        """
        allowed = self.limits.max_llm_calls
        if allowed is not None and self.calls >= allowed:
            raise LimitReached("max_llm_calls", self.calls, allowed)
        self.calls += 1
        return self.calls

    def charge_child(self) -> None:
        """Count a child run before it starts.

        Raises:
            LimitReached: `max_children_total` runs were started already.
        """
        allowed = self.limits.max_children_total
        if allowed is not None and self.children >= allowed:
            raise LimitReached("max_children_total", self.children, allowed)
        self.children += 1

    def record(self, model: str, depth: int, usage: Usage) -> None:
        """Add what one call used, under the model that served it."""
        self._usage[model, depth] = self._usage.get((model, depth), Usage()) + usage

    def summary(self) -> UsageSummary:
        """Usage of the whole tree by model."""
        totals: dict[str, Usage] = {}
        for (model, _), usage in self._usage.items():
            totals[model] = totals.get(model, Usage()) + usage
        return UsageSummary(totals)

    def by_depth(self) -> Mapping[int, Usage]:
        """Usage of the whole tree by depth: 0 is the root's own loop."""
        totals: dict[int, Usage] = {}
        for (_, depth), usage in sorted(self._usage.items(), key=lambda item: item[0][1]):
            totals[depth] = totals.get(depth, Usage()) + usage
        return totals
