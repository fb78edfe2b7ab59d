import json
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.cli.eval import Done, Plan, plan
from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.report import report
from tests.rlm_broker.evaluation.test_report import outcome


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def _plan(**options: Any) -> Plan:
    """The plan of a command line with these options and no other."""
    generated = ("tasks", "lengths", "length_unit", "samples", "seed")
    settings = ("model", "sub_model", "base_url", "api_key", "isolation")
    others = ("data", "batch_budget_usd", "batch_tokens", "out", "picture")
    left_out = dict.fromkeys((*generated, *settings, *others))
    given = {"arms": "plain,rlm1,rlm2", "max_concurrent": 16, "quiet": True, "retry_failed": False, "assignments": ()}
    return plan(**{**left_out, **given, **options})


def test_estimate_counts_runs_and_tokens() -> None:
    planned = _plan(tasks="count,pairs", lengths="4k,8k", samples=2, arms="rlm1")
    assert planned.estimate() == "8 runs: 1 arm x 8 questions, with contexts of about 48,000 tokens together"
    told = {"runs": 8, "arms": ["rlm1"], "questions": 8, "context_tokens": 48_000}
    assert json.loads(planned.in_json()) == told
    assert planned.about["seed"] == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tasks": "needel"}, "did you mean needle?"),
    ({"lengths": "huge"}, "length 'huge' cannot be read"),
    ({"lengths": "1"}, "length 1 is"),
    ({"arms": "rlm"}, "there is no arm 'rlm'"),
    ({"data": "none.jsonl"}, "cannot read none.jsonl"),
    ({"data": "none.jsonl", "tasks": "needle"}, "leave out --tasks"),
    ({"data": "none.jsonl", "length_unit": "chars"}, "leave out --length-unit"),
    ({"batch_budget_usd": 0.0}, "--batch-budget-usd must be above 0"),
    ({"batch_budget_usd": float("nan")}, "--batch-budget-usd must be above 0"),
    ({"batch_tokens": -1}, "--batch-tokens must be above 0"),
    ({"retry_failed": True}, "--retry-failed needs"),
    ({"assignments": ("max_depth=2",)}, "each arm has its own"),
    ({"arms": "rlm1:max_iterations=many"}, "max_iterations = many"),
    ({"arms": "plain,rlm1:recursion=never"}, "recursion"),
    ({"picture": Path("/none/x.svg")}, "cannot write /none/x.svg: /none is not a folder"),
]


def test_wrong_options_are_refused() -> None:
    for options, why in WRONG:
        with pytest.raises(ConfigurationError) as refused:
            _plan(**options)
        assert why in str(refused.value)


def test_settings_of_an_arm_are_its_own() -> None:
    planned = _plan(arms="rlm1,rlm1:max_iterations=5:recursion=auto", assignments=("max_iterations=20",))
    by_arm = planned.settings
    assert [by_arm[arm.name].limits.max_iterations for arm in planned.arms] == [20, 5]
    assert [by_arm[arm.name]["recursion"] for arm in planned.arms] == ["always", "auto"]


def test_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot make the folder"):
        _plan(out="/dev/null/x").run()


def test_arm_of_failures_alone_is_named() -> None:
    failed = [outcome("rlm1", name, 0, "failed", error="no credit") for name in "ab"]
    plain = outcome("plain", "a", 0, "failed"), outcome("plain", "b", 1)
    done = Done(report({}, ["plain", "rlm1"], [*plain, *failed], 4), None)
    assert done.all_failed == "all 2 items of rlm1 failed, the first one because: no credit"
    assert Done(report({}, ["plain", "rlm1"], failed[:0], 4), None).all_failed is None
