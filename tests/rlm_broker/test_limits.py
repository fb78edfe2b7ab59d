import pytest
from pydantic import ValidationError

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits

NO_BOUND = {
    "child_timeout_s",
    "compaction_threshold",
    "cpu_s",
    "iteration_timeout_s",
    "max_blocks",
    "max_budget_usd",
    "max_children_per_batch",
    "max_children_total",
    "max_completion_tokens",
    "max_consecutive_errors",
    "max_llm_calls",
    "max_output_lines",
    "max_result_chars",
    "max_tokens",
    "run_timeout_s",
}


@pytest.mark.parametrize("name", Limits.model_fields)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "many"])
def test_a_limit_that_is_no_amount_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"limit {name} = {value}: "):
        Limits.model_validate({name: value})


@pytest.mark.parametrize("name", Limits.model_fields)
def test_none_is_no_bound_only_where_that_can_be_meant(name: str) -> None:
    if name in NO_BOUND:
        assert getattr(Limits.model_validate({name: None}), name) is None
    else:
        with pytest.raises(ConfigurationError):
            Limits.model_validate({name: None})


def test_a_misspelt_limit_is_refused_and_limits_never_change() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no limit 'max_itertions'; did you mean max_iterations\?"):
        Limits(max_itertions=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"'max_budget'; did you mean max_budget_usd\?"):
        Limits(max_budget=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="limit max_depth = True: give a number"):
        Limits(max_depth=True)
    with pytest.raises(ValidationError):
        Limits().max_depth = 5


def test_every_limit_says_what_it_bounds() -> None:
    assert all(field.description for field in Limits.model_fields.values())


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ({}, [30, 15, 10, 7]),
        ({"max_iterations": 2}, [2, 2, 2, 2]),
        ({"max_iterations": 8}, [8, 4, 3, 3]),
        ({"max_iterations": (20, 5)}, [20, 5, 5, 5]),
    ],
)
def test_deeper_runs_get_fewer_turns_and_never_more_than_the_root(given: dict[str, object], turns: list[int]) -> None:
    limits = Limits.model_validate(given)
    assert [limits.iterations(depth) for depth in range(4)] == turns


@pytest.mark.parametrize(
    ("given", "blocks"),
    [({}, 150), ({"max_iterations": 4}, 20), ({"max_iterations": (4, 2)}, 20), ({"max_blocks": 7}, 7)],
)
def test_blocks_are_five_for_each_turn_unless_said_otherwise(given: dict[str, object], blocks: int) -> None:
    assert Limits.model_validate(given).max_blocks == blocks
    assert Limits.model_validate({**given, "max_blocks": None}).max_blocks is None


def test_a_repl_is_told_each_of_its_bounds_as_the_limit_of_the_same_name() -> None:
    limits = Limits(memory_bytes=1 << 30, max_processes=2, max_open_files=30, scratch_bytes=1 << 20, cpu_s=0.5)
    told = limits.repl_bounds()
    assert {name: getattr(told, name) for name in told.__struct_fields__} == {
        name: value for name, value in limits.model_dump().items() if name in told.__struct_fields__
    }
