import json
from typing import Any

import pytest

from rlm_broker.evaluation.report import ALL_TASKS, Ended, Outcome, report
from rlm_broker.usage import Usage


def outcome(arm: str, id: str, score: float, ended: Ended = "answered", task: str = "needle", **more: Any) -> Outcome:
    """An outcome with one call, that cost a cent for each level of depth."""
    calls = 0 if ended == "does_not_fit" else 1
    cost = {"plain": 0.01, "rlm1": 0.02}.get(arm)
    usage = Usage(calls, 100 * calls, 10 * calls, cost if calls else None)
    given = {"length": "8k", "answer": "x", "error": None, "expected": "x", "usage": usage, "seconds": 2.0, **more}
    return Outcome(arm=arm, id=id, task=task, score=score, ended=ended, **given)


def test_cell_has_the_means_of_its_items() -> None:
    outcomes = [outcome("plain", "a", 1), outcome("plain", "b", 0, "failed"), outcome("plain", "c", 0, "does_not_fit")]
    (cell,) = report({}, ["plain"], outcomes, 3).cells
    assert (cell.items, cell.failed, cell.limited, cell.does_not_fit) == (3, 1, 0, 1)
    assert cell.score.mean == pytest.approx(1 / 3)
    assert cell.cost_usd == pytest.approx(0.02 / 3)
    assert [cell.calls, cell.input_tokens, cell.seconds] == pytest.approx([2 / 3, 200 / 3, 2.0])


def test_items_that_do_not_fit_cost_nothing() -> None:
    (cell,) = report({}, ["plain"], [outcome("plain", "a", 0, "does_not_fit")], 1).cells
    assert cell.cost_usd == 0


def test_unknown_price_is_no_price_of_zero() -> None:
    found = report({}, ["rlm2", "plain"], [outcome("rlm2", "a", 0), outcome("plain", "a", 0)], 2)
    assert [cell.cost_usd for cell in found.cells] == [None, 0.01]
    assert [contrast.cost_ratio for contrast in found.contrasts] == [None]


def test_arms_are_compared_on_the_same_items() -> None:
    """An item that has ended in one arm alone counts in its cell, and in no contrast."""
    outcomes = [outcome("plain", str(number), 0) for number in range(8)]
    outcomes += [outcome("rlm1", str(number), 1) for number in range(7)]
    found = report({}, ["plain", "rlm1"], outcomes, 16)
    (contrast,) = found.contrasts
    assert (contrast.arm, contrast.than, contrast.task, contrast.difference.items) == ("rlm1", "plain", ALL_TASKS, 7)
    assert contrast.difference.p_value == pytest.approx(2 / 128)
    assert contrast.cost_ratio == pytest.approx(2)
    assert found.unfinished == 1


def test_contrasts_are_of_all_tasks_and_of_each() -> None:
    outcomes = [
        outcome(arm, f"{task}-{number}", float(arm == "rlm1" and task == "pairs"), task=task)
        for arm in ("plain", "rlm1", "rlm2")
        for task in ("needle", "pairs")
        for number in range(3)
    ]
    found = report({}, ["plain", "rlm1", "rlm2"], outcomes, 18)
    assert [(each.arm, each.than, each.task) for each in found.contrasts] == [
        (arm, than, task)
        for arm, than in (("rlm1", "plain"), ("rlm2", "plain"), ("rlm2", "rlm1"))
        for task in (ALL_TASKS, "needle", "pairs")
    ]
    assert [each.difference.mean for each in found.contrasts[:3]] == [0.5, 0, 1]


def test_report_is_plain_json() -> None:
    found = report({"model": "x"}, ["plain", "rlm1"], [outcome("plain", "a", 1), outcome("rlm1", "a", 1)], 2)
    shown = json.loads(json.dumps(found.to_dict()))
    assert shown["about"] == {"model": "x"}
    assert shown["cells"][0]["score"].keys() == {"mean", "low", "high"}
    assert shown["contrasts"][0]["difference"] == {"mean": 0, "items": 1, "p_value": 1, "is_beyond_noise": False}
    assert shown["outcomes"][0]["usage"]["total_input_tokens"] == 100


def test_report_without_outcomes_has_no_cells() -> None:
    found = report({}, ["plain", "rlm1"], [], 4)
    assert (found.cells, found.contrasts, found.unfinished) == ((), (), 4)
