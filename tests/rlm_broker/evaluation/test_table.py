import pytest

from rlm_broker.evaluation.report import report
from rlm_broker.evaluation.table import dollars, table
from tests.rlm_broker.evaluation.test_report import outcome

TABLE = """\
task    length  arm    score       95 %  items      cost  tokens  seconds
needle  8k      plain   0.33  0.06-0.79      3  $0.00667      73      2.0  1 does not fit
needle  8k      rlm1    0.83  0.31-0.98      3     $0.02     110      2.0  1 failed

plain: 3 items, 2 calls, 220 tokens, $0.02
rlm1: 3 items, 3 calls, 330 tokens, $0.06
unfinished: 1 item

rlm1 against plain, the same 3 items: +0.50 (p = 0.5), within noise; it costs 3 times as much"""


def test_table_has_cells_totals_and_contrasts() -> None:
    outcomes = [outcome("plain", "a", 1), outcome("plain", "b", 0), outcome("plain", "c", 0, "does_not_fit")]
    outcomes += [outcome("rlm1", "a", 1), outcome("rlm1", "b", 1), outcome("rlm1", "c", 0.5, "failed")]
    shown = table(report({}, ["plain", "rlm1"], outcomes, 7))
    assert shown == TABLE


def test_contrasts_of_tasks_follow_the_one_of_all() -> None:
    outcomes = [
        outcome(arm, f"{task}-{number}", float(arm == "rlm1"), task=task)
        for arm in ("plain", "rlm1")
        for task in ("needle", "pairs")
        for number in range(12)
    ]
    lines = table(report({}, ["plain", "rlm1"], outcomes, 48)).splitlines()
    assert lines[-3:] == [
        "rlm1 against plain, the same 24 items: +1.00 (p < 0.001), beyond noise; it costs 2 times as much",
        "  needle: +1.00 (p < 0.001), beyond noise",
        "  pairs: +1.00 (p < 0.001), beyond noise",
    ]


@pytest.mark.parametrize(
    ("cost", "text"),
    [(None, "?"), (0, "$0"), (12.345, "$12.35"), (0.0123, "$0.0123"), (0.00012, "$0.00012"), (4e-7, "$4e-07")],
)
def test_cost_has_few_digits(cost: float | None, text: str) -> None:
    assert dollars(cost) == text
