import pytest

from rlm_broker.errors import LimitReached
from rlm_broker.ledger import Ledger
from rlm_broker.limits import Limits
from rlm_broker.types import Usage


def test_calls_are_numbered_and_end_at_their_limit() -> None:
    ledger = Ledger(Limits(max_llm_calls=2))
    assert [ledger.charge_call(), ledger.charge_call()] == [1, 2]
    with pytest.raises(LimitReached, match="max_llm_calls: 2 of 2 used") as reached:
        ledger.charge_call()
    assert (reached.value.limit, reached.value.spent, reached.value.allowed) == ("max_llm_calls", 2, 2)
    assert ledger.calls == 2


def test_children_end_at_their_limit_and_none_is_no_limit() -> None:
    ledger = Ledger(Limits(max_children_total=1, max_llm_calls=None))
    ledger.charge_child()
    with pytest.raises(LimitReached, match="max_children_total"):
        ledger.charge_child()
    assert [ledger.charge_call() for _ in range(50)][-1] == 50


def test_usage_is_summed_by_the_model_that_served_over_all_depths() -> None:
    ledger = Ledger(Limits())
    ledger.record("a", 0, Usage(1, 10, 5, 0.5))
    ledger.record("a", 1, Usage(1, 1, 2, 0.25))
    ledger.record("b", 1, Usage(1, 7, 7))
    assert ledger.summary().model_usage_summaries == {"a": Usage(2, 11, 7, 0.75), "b": Usage(1, 7, 7, None)}


def test_a_cost_that_is_not_known_makes_the_sum_unknown_and_never_zero() -> None:
    ledger = Ledger(Limits())
    ledger.record("a", 0, Usage(1, 1, 1, 0.5))
    ledger.record("b", 0, Usage(1, 1, 1, None))
    assert ledger.summary().total.total_cost is None
    assert "total_cost" not in ledger.summary().to_dict()
