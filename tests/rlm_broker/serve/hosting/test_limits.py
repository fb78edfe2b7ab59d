"""Limits of one run, from those of the server, the key, the request and the money that is left."""

from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits, RunLimits
from rlm_broker.serve.hosting.runs import tightened


@pytest.mark.parametrize(
    ("base", "owners", "asked", "left_usd", "held"),
    [
        ({}, None, None, None, None),
        ({}, {"max_llm_calls": 5}, None, None, {"max_llm_calls": 5}),
        ({}, {"max_llm_calls": 5}, {"max_llm_calls": 3}, None, {"max_llm_calls": 3}),
        ({}, None, {"max_budget_usd": 2}, 1.0, {"max_budget_usd": 1.0}),
        ({"max_budget_usd": 2}, None, None, 100.0, {"max_budget_usd": 2}),
        ({"max_budget_usd": 2}, {"max_budget_usd": 5}, {"max_budget_usd": 3}, None, {"max_budget_usd": 3}),
        ({"max_iterations": (9, 5)}, None, {"max_iterations": 5}, None, {"max_iterations": 5}),
    ],
)
def test_smaller_limit_holds(base: Any, owners: Any, asked: Any, left_usd: Any, held: Any) -> None:
    made = tightened(Limits(**base), owners and RunLimits(**owners), asked and RunLimits(**asked), left_usd)
    assert (made and made.model_dump(exclude_unset=True)) == held


@pytest.mark.parametrize(
    ("base", "owners", "asked"),
    [
        ({"max_budget_usd": 2}, None, {"max_budget_usd": 3}),
        ({"max_budget_usd": 2}, None, {"max_budget_usd": None}),
        ({"max_budget_usd": 9}, {"max_budget_usd": 2}, {"max_budget_usd": 3}),
        ({"max_iterations": (9, 5)}, None, {"max_iterations": 6}),
        ({}, None, {"run_timeout_s": 4_000}),
    ],
)
def test_wider_limit_is_refused(base: Any, owners: Any, asked: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"above its bound, .*: ask for less"):
        tightened(Limits(**base), owners and RunLimits(**owners), RunLimits(**asked), None)
