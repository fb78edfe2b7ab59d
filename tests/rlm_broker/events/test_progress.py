from typing import Any

from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    Event,
    IterationStarted,
    Replied,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.events.progress import NAME_CHARS, RunProgress
from rlm_broker.results import Block
from rlm_broker.usage import Usage, UsageSummary

ROOT: tuple[str, int] = ("1", 0)
CHILD: tuple[str, int] = ("1.1", 1)
BEGUN = (
    RunStarted(*ROOT, "why?", "big", {"model": "big", "sub_model": "small"}, time=1.0),
    IterationStarted(*ROOT, 1, time=2.0),
)
ENDED = RunEnded(*ROOT, "4", None, 1, 1.0, UsageSummary({}), time=99.0)


def progress(*events: Event) -> RunProgress:
    made = RunProgress()
    for event in (*BEGUN, *events):
        made(event)
    return made


def started(run: tuple[str, int], call: int, model: str | None = None, **more: Any) -> CallStarted:
    return CallStarted(*run, call, model, "prompt", **more)


def ended(run: tuple[str, int], call: int, cost: float | None = 0.5, **more: Any) -> CallEnded:
    return CallEnded(*run, call, "big", Usage(1, 10, 5, cost), 1.0, "reply", **more)


BATCH: Any = {"block": 1, "batch": 1, "of": 8}


CODE = BlockStarted(*ROOT, 1, 1, "")
TOOL = ToolStarted(*ROOT, 1, 1, "look", "{}")
DOING: list[tuple[tuple[Event, ...], str]] = [
    ((), "starts a REPL"),
    ((started(ROOT, 1),), "calls big"),
    ((started(ROOT, 1), CallRetried(*ROOT, 1, 2, 8.0, "429")), "waits to call big"),
    ((started(ROOT, 1), ended(ROOT, 1)), "reads the reply"),
    ((BlockStarted(*ROOT, 1, 3, "code"),), "runs block 3"),
    ((BlockStarted(*CHILD, 1, 3, "code"),), "runs block 3 of run 1.1"),
    ((CODE, started(ROOT, 2, block=1)), "calls small"),
    ((started(ROOT, 2, "named", block=1),), "calls named"),
    (
        (started(ROOT, 2, **BATCH), started(ROOT, 3, **BATCH), ended(ROOT, 2, batch=1, of=8, done=1)),
        "calls small (1 of 8)",
    ),
    ((started(ROOT, 2), started(CHILD, 3)), "calls big (2 calls)"),
    ((CODE, TOOL), "calls the tool look"),
    ((CODE, TOOL, ToolEnded(*ROOT, 1, "look", 1.0, "")), "runs block 1"),
    ((CODE, BlockEnded(*ROOT, 1, Block("", "ok"))), "reads the output"),
    ((ENDED,), ""),
]


def test_progress_says_what_a_run_does() -> None:
    assert [(events, progress(*events).doing) for events, _ in DOING] == DOING


def test_time_begins_where_the_doing_changes() -> None:
    """A further call of the same model is not another thing to do."""
    made = progress(started(ROOT, 1, time=5.0), started(ROOT, 2, time=6.0), ended(ROOT, 1, time=7.0))
    assert (made.doing, made.since) == ("calls big", 5.0)
    made(ended(ROOT, 2, time=8.0))
    made(Replied(*ROOT, 1, "text", time=9.0))
    assert (made.doing, made.since) == ("reads the reply", 8.0)


def test_usage_is_that_of_the_whole_tree() -> None:
    made = progress(started(ROOT, 1), ended(ROOT, 1), started(CHILD, 2), ended(CHILD, 2))
    assert (made.tokens, made.cost_usd) == (30, 1.0)
    assert progress().cost_usd == 0.0
    assert progress(ended(ROOT, 1, cost=None)).cost_usd is None


def test_cancelled_child_leaves_nothing_under_way() -> None:
    """A cancelled call gets no event of its end, only its run does."""
    begun = RunStarted(*CHILD, "part", "small", {}), BlockStarted(*CHILD, 1, 1, ""), started(CHILD, 5, **BATCH)
    made = progress(*begun, ToolStarted(*CHILD, 1, 1, "look", "{}"))
    assert made.runs == 2
    made(RunEnded(*CHILD, None, "cancelled", 1, 1.0, UsageSummary({}), kind="cancelled"))
    assert (made.runs, made.doing) == (1, "starts a REPL")


def test_names_of_model_code_are_cut() -> None:
    assert progress(started(ROOT, 1, "m" * 10_000, block=1)).doing == f"calls {'m' * NAME_CHARS}"
    assert progress(ToolStarted(*ROOT, 1, 1, "t" * 10_000, "{}")).doing == f"calls the tool {'t' * NAME_CHARS}"
