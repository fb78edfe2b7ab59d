"""Limits: their defaults, their ranges, and the words that refuse a wrong value."""

import pickle
from typing import Any

import jsonschema
import numpy
import pydantic
import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits, ReplLimits, RunLimits, with_set
from sandbox_worker.wire.messages import MAX_PROMPTS

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


def test_a_limit_that_is_no_amount_is_refused() -> None:
    for name in Limits.fields:
        for value in (-1, float("nan"), float("inf"), "many"):
            with pytest.raises(ConfigurationError, match=f"limit {name} = {value}: "):
                Limits.from_dict({name: value})


def test_none_is_no_bound_where_meaningful() -> None:
    for name in Limits.fields:
        if name in NO_BOUND:
            assert getattr(Limits.from_dict({name: None}), name) is None
            continue
        with pytest.raises(ConfigurationError, match=f"limit {name}"):
            Limits.from_dict({name: None})


def test_a_misspelt_limit_is_refused_and_limits_never_change() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no limit 'max_itertions'; did you mean max_iterations\?"):
        Limits(max_itertions=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=r"Limits cannot be changed: Limits\.replace returns another"):
        Limits().max_depth = 5  # type: ignore[misc]


def test_amount_may_be_a_number_of_any_type_or_text() -> None:
    cases: list[tuple[str, object, object]] = [
        *[("memory_bytes", "64MB", 64 << 20), ("run_timeout_s", "1h30m", 5400.0), ("run_timeout_s", "2.5", 2.5)],
        *[("max_tokens", numpy.int64(5), 5), ("max_tokens", " 1_000 ", 1000), ("max_iterations", ["9", 3.0], (9, 3))],
        *[("cpu_s", "250ms", 0.25), ("cpu_s", numpy.float32(0.5), 0.5)],
    ]
    for name, given, made in cases:
        assert repr(Limits.from_dict({name: given}).given) == repr({name: made})


def test_invalid_amount_is_refused_as_written() -> None:
    size = "give bytes from 1048576 to 1125899906842624, or a size such as 64MB (K, M, G and T are powers of 1024)"
    seconds = "give a finite number of seconds above 0, or a time such as 90s, 1h30m or 250ms, or None"
    in_tuple = "at [1]: give a whole number of at least 1, or one for each depth"
    cases: list[tuple[str, object, str]] = [
        *(("memory_bytes", text, size) for text in ("64XB", "-64MB", "1KB")),
        *(("run_timeout_s", text, seconds) for text in ("10 minutes", "0ms")),
        *(("max_iterations", turns, in_tuple) for turns in ((20, 0), (20, True))),
        ("max_depth", True, "give a whole number of at least 0"),
        ("max_tokens", "10k", "give a whole number of at least 1, or None"),
        ("checkpoint", "often", "give auto, each or never"),
    ]
    for name, value, why in cases:
        with pytest.raises(ConfigurationError) as refused:
            Limits.from_dict({name: value})
        assert str(refused.value) == f"limit {name} = {value}: {why}"
    with pytest.raises(ConfigurationError, match=r"= a number of too many digits: at \[1\]: "):
        Limits(max_iterations=(10**5_000, 0))


def test_limits_say_what_they_bound() -> None:
    assert all(Limits.descriptions()[name] for name in Limits.fields)


def test_deeper_runs_have_fewer_turns() -> None:
    cases: list[tuple[dict[str, object], list[int]]] = [
        ({}, [30, 15, 10, 7]),
        ({"max_iterations": 2}, [2, 2, 2, 2]),
        ({"max_iterations": 8}, [8, 4, 3, 3]),
        ({"max_iterations": (20, 5)}, [20, 5, 5, 5]),
    ]
    for given, turns in cases:
        limits = Limits.from_dict(given)
        assert [limits.iterations(depth) for depth in range(4)] == turns


def test_blocks_are_five_for_each_turn_unless_said_otherwise() -> None:
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 150),
        ({"max_iterations": 4}, 20),
        ({"max_iterations": (4, 2)}, 20),
        ({"max_blocks": 7}, 7),
    ]
    for given, blocks in cases:
        assert Limits.from_dict(given).max_blocks == blocks
        assert Limits.from_dict({**given, "max_blocks": None}).max_blocks is None


def test_repl_limits_equal_the_limits_by_name() -> None:
    limits = Limits(memory_bytes=1 << 30, max_processes=2, max_open_files=30, scratch_bytes=1 << 20, cpu_s=0.5)
    told = limits.repl_bounds()
    assert {name: getattr(told, name) for name in told.__struct_fields__} == {
        name: value for name, value in limits.to_dict().items() if name in told.__struct_fields__
    }


def test_limits_that_are_not_set_change_none() -> None:
    cases: list[tuple[Any, RunLimits, int | None]] = [
        (Limits(max_blocks=7), RunLimits(run_timeout_s=5), 7),
        (Limits(max_blocks=7), Limits(max_iterations=50), 7),
        (Limits(max_iterations=2), RunLimits(max_depth=2), 10),
        (Limits(max_iterations=2), RunLimits(max_iterations=50), 250),
        (Limits(max_iterations=2), RunLimits(max_blocks=1), 1),
        (Limits(max_blocks=7), RunLimits(max_blocks=None), None),
        (ReplLimits(max_processes=9), RunLimits(max_iterations=3), 15),
    ]
    for base, limits, blocks in cases:
        changed = with_set(with_set(base, limits), ReplLimits(memory_bytes=1 << 28))
        assert (changed.max_blocks, changed.memory_bytes) == (blocks, 1 << 28)
        assert changed.max_processes == base.max_processes


KIB, MIB, GIB = 2**10, 2**20, 2**30
AS_DOCUMENTED: dict[str, tuple[float | None, float, float | None]] = {
    "max_depth": (1, 0, None),
    "max_iterations": (30, 1, None),
    "max_blocks": (150, 1, None),
    "max_llm_calls": (10_000, 1, None),
    "max_tokens": (None, 1, None),
    "max_budget_usd": (None, 1e-9, None),
    "max_consecutive_errors": (None, 1, None),
    "max_children_total": (100, 0, None),
    "max_children_per_batch": (None, 1, None),
    "max_batch_prompts": (4_096, 1, MAX_PROMPTS),
    "max_concurrent_calls": (16, 1, None),
    "max_concurrent_children": (4, 1, None),
    "max_completion_tokens": (None, 1, None),
    "max_result_chars": (None, 1, None),
    "compaction_threshold": (0.85, 1e-9, 1),
    "max_output_retries": (2, 0, None),
    "run_timeout_s": (3_600, 1e-9, None),
    "child_timeout_s": (600, 1e-9, None),
    "iteration_timeout_s": (None, 1e-9, None),
    "tool_timeout_s": (60, 1e-9, None),
    "call_timeout_s": (120, 1e-9, None),
    "max_observation_chars": (20_000, 1, None),
    "memory_bytes": (2 * GIB, MIB, 2**50),
    "cpu_s": (None, 1e-9, None),
    "max_processes": (64, 1, 2**22),
    "scratch_bytes": (256 * MIB, 4 * KIB, 2**50),
    "max_scratch_files": (8_192, 1, 2**31),
    "max_open_files": (256, 16, 2**20),
    "max_programs": (16, 1, None),
    "later_context_bytes": (0, 0, 2**50),
    "max_repl_restarts": (5, 0, None),
    "max_replay_s": (30, 0, None),
    "block_timeout_s": (60, 1e-9, None),
    "block_wall_timeout_s": (3_600, 1e-9, None),
    "interrupt_grace_s": (1, 1e-9, None),
    "start_timeout_s": (30, 1e-9, None),
    "max_output_bytes": (MIB, 100, 2**50),
    "max_output_lines": (None, 1, 2**50),
    "max_frame_bytes": (64 * MIB, 4 * KIB, 2**32 - 1),
    "max_queries_in_flight": (256, 1, None),
}
"""Limit -> its default, and the least and the greatest value that it can have."""


def test_each_limit_has_its_default_and_its_bounds() -> None:
    assert {name: getattr(Limits(), name) for name in Limits.fields} == {
        "checkpoint": "auto",
        "keep_checkpoints": 1,
        **{name: default for name, (default, _, _) in AS_DOCUMENTED.items()},
    }
    for name, (_, least, most) in AS_DOCUMENTED.items():
        for allowed in (least, 2**60 if most is None else most):
            assert getattr(Limits.from_dict({name: allowed}), name) == allowed
        below = 0 if least == 1e-9 else least - 1
        for refused in (below, *([] if most is None else [most + 1])):
            with pytest.raises(ConfigurationError, match=f"^limit {name} = {refused}: "):
                Limits.from_dict({name: refused})


def test_turns_of_each_depth_are_at_least_one() -> None:
    assert Limits(max_iterations=(7,)).max_blocks == 35
    with pytest.raises(ConfigurationError, match=r"^limit max_iterations = \(\): "):
        Limits(max_iterations=())


def test_set_limits_override_the_base() -> None:
    both = with_set(RunLimits(max_depth=2, max_tokens=5), ReplLimits(max_programs=3))
    assert (both.max_depth, both.max_tokens, both.max_programs) == (2, 5, 3)
    changed = with_set(both, RunLimits(max_depth=1))
    assert (changed.max_depth, changed.max_tokens, changed.max_programs) == (1, 5, 3)


def test_changed_limits_are_checked_and_derived_again() -> None:
    base = Limits.from_dict({"memory_bytes": "64MB", "max_iterations": 4})
    changed = base.replace(max_iterations=2, max_tokens="7")
    assert changed.given == {"memory_bytes": 64 << 20, "max_iterations": 2, "max_tokens": 7}
    assert (changed.max_blocks, base.max_blocks, base.max_tokens) == (10, 20, None)
    with pytest.raises(ConfigurationError, match="limit max_depth = -1: give a whole number of at least 0"):
        base.replace(max_depth=-1)
    assert pickle.loads(pickle.dumps(changed)) == changed == Limits(**changed.given)
    assert (changed != base, hash(changed)) == (True, hash(Limits(**changed.given)))


def test_a_pydantic_model_may_have_limits() -> None:
    class Settings(pydantic.BaseModel):
        limits: RunLimits | None = None

    made = Settings.model_validate({"limits": {"run_timeout_s": "1m"}})
    assert made.limits == RunLimits(run_timeout_s=60)
    assert made.model_dump()["limits"]["run_timeout_s"] == 60
    schema = Settings.model_json_schema()
    jsonschema.validate({"limits": {"max_iterations": [20, 5]}}, schema)
    with pytest.raises(jsonschema.ValidationError, match="less than the minimum"):
        jsonschema.validate({"limits": {"max_iterations": 0}}, schema)
    with pytest.raises(ConfigurationError, match="there is no limit 'run_timeout'; did you mean run_timeout_s"):
        Settings.model_validate({"limits": {"run_timeout": 1}})
