"""Limits of a whole batch."""

from typing import Any

import pytest

from rlm_broker.batch.budget import BatchLimits
from rlm_broker.errors import ConfigurationError


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_budget_usd": -1},
        {"max_budget_usd": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "1h"},
        {"max_tokens": True},
    ],
)
def test_wrong_limit_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=f"the limit {name} of a batch must be"):
        BatchLimits(**wrong)


def test_limits_may_be_left_out() -> None:
    assert BatchLimits() == BatchLimits(None, None, None)
    assert BatchLimits(max_budget_usd=2).max_budget_usd == 2
