"""Limits of a run: the smaller one of each, and never more than the server or the owner allows."""

import pytest

from rlm_broker import ConfigurationError, RunLimits
from rlm_broker.hosting.limits import tightened


@pytest.mark.parametrize(
    ("owners", "asked", "left_usd", "together"),
    [
        (None, None, None, None),
        (RunLimits(max_depth=2), None, None, RunLimits(max_depth=2)),
        (RunLimits(max_depth=2), RunLimits(max_depth=1), None, RunLimits(max_depth=1)),
        (None, RunLimits(max_tokens=5), 2.5, RunLimits(max_tokens=5, max_budget_usd=2.5)),
        (None, RunLimits(max_budget_usd=1.0), 2.5, RunLimits(max_budget_usd=1.0)),
        (RunLimits(max_budget_usd=4.0), None, 2.5, RunLimits(max_budget_usd=2.5)),
    ],
)
def test_smaller_limit_holds(
    owners: RunLimits | None, asked: RunLimits | None, left_usd: float | None, together: RunLimits | None
) -> None:
    found = tightened(RunLimits(), owners, asked, left_usd)
    assert found == together
    assert found is None or found.model_fields_set == together.model_fields_set  # type: ignore[union-attr]


@pytest.mark.parametrize("asked", [RunLimits(max_tokens=6), RunLimits(max_tokens=None)])
def test_limit_beyond_that_of_the_key_is_refused(asked: RunLimits) -> None:
    with pytest.raises(ConfigurationError, match=r"the limit max_tokens = .* is above the 5 of this server"):
        tightened(RunLimits(), RunLimits(max_tokens=5), asked, None)
