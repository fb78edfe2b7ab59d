import pytest
from pydantic import ValidationError

from rlm_broker.limits import Limits

NO_BOUND = {"max_llm_calls", "max_children_total", "max_completion_tokens", "run_timeout_s", "child_timeout_s", "cpu_s"}


@pytest.mark.parametrize("name", Limits.model_fields)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "many"])
def test_a_limit_that_is_no_amount_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate({name: value})


@pytest.mark.parametrize("name", Limits.model_fields)
def test_none_is_no_bound_only_where_that_can_be_meant(name: str) -> None:
    if name in NO_BOUND:
        assert getattr(Limits.model_validate({name: None}), name) is None
    else:
        with pytest.raises(ValidationError):
            Limits.model_validate({name: None})


def test_a_misspelt_limit_is_refused_and_limits_never_change() -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate({"max_itertions": 3})
    with pytest.raises(ValidationError):
        Limits().max_depth = 5


def test_every_limit_says_what_it_bounds() -> None:
    assert all(field.description for field in Limits.model_fields.values())
