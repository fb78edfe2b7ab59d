"""Children as handles, at a channel whose replies the test gives."""

import pickle
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from sandbox_worker.repl.channel import CannotAsk, Channel
from sandbox_worker.repl.child_contexts import PREFIX
from sandbox_worker.repl.handles import Child, Handles, first
from sandbox_worker.repl.queries import Queries
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import Query, Reply, Slot
from sandbox_worker.wire.prompts import MAX_INLINE_BYTES
from tests.support.tables import table

NUMBER = {"type": "integer"}


class Orchestrator:
    """Substitute for a channel. Each wait answers the queries that it waits for, in their order."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.started: list[Query] = []
        self.asked: list[Query] = []
        self.replies: dict[str, Reply] = {}

    def start(self, query: Query) -> str:
        self.started.append(replace(query, id=f"1:{len(self.started)}"))
        return self.started[-1].id

    def ask(self, query: Query) -> Reply:
        self.asked.append(query)
        if query.want == "cancel":
            self.replies |= {id: Reply(id, [Slot(error="cancelled")]) for id in query.texts if id not in self.replies}
            return Reply("1:0", [Slot()] * len(query.prompts))
        for id in query.texts[: query.count]:
            if self.answers:
                self.replies[id] = Reply(id, [Slot(self.answers.pop(0))])
        return Reply("1:0", [Slot("done" if id in self.replies else "") for id in query.texts])

    def reply(self, id: str) -> Reply | None:
        return self.replies.get(id)

    def forget(self, id: str) -> None:
        self.replies.pop(id, None)


def handles(*answers: str) -> tuple[Handles, Orchestrator]:
    channel = Orchestrator(*answers)
    at = cast("Channel", channel)
    return Handles(at, Queries(at, lambda: None)), channel


def test_child_is_started_without_a_wait_and_answers_once() -> None:
    starting, channel = handles("7")
    child = starting.rlm_start("count", "fast", context=[1, 2])
    (query,) = channel.started
    assert (query.want, query.background, query.prompts, query.model) == ("rlm", True, ["count"], "fast")
    assert (query.contexts[0] and query.contexts[0].value, query.child, query.repl) == ("[1,2]", None, None)
    assert not child.done
    assert repr(child) == "<child of rlm_start, not known to be done; result() waits for its answer>"
    assert child.result() == child.result() == "7"
    assert child.done
    assert [(each.want, each.count) for each in channel.asked] == [("wait", 0), ("wait", 1)]
    assert channel.replies == {}


def test_result_in_time_leaves_the_child_running() -> None:
    starting, channel = handles()
    child = starting.rlm_start("count")
    with pytest.raises(TimeoutError, match=r"has not answered within 0\.01 s, and goes on"):
        child.result(timeout_s=0.01)
    channel.answers.append("late")
    assert child.result(timeout_s=60) == "late"


def test_cancelled_child_has_an_error_and_is_not_asked_again() -> None:
    starting, channel = handles()
    child = starting.rlm_start("count", output_type=NUMBER)
    child.cancel()
    child.cancel()
    assert child.result() == "Error: cancelled"
    assert [query.want for query in channel.asked] == ["cancel", "wait"]


def test_first_waits_for_as_many_and_may_cancel_the_rest() -> None:
    starting, channel = handles("a", "b")
    children = [starting.rlm_start(task) for task in "xyz"]
    assert first(0, children) == []
    assert first(2, [*children, children[0]]) == children[:2]
    assert first(1, children, cancel_rest=True) == children[:1]
    assert [child.result() for child in children] == ["a", "b", "Error: cancelled"]
    assert [(query.want, query.count, len(query.prompts)) for query in channel.asked] == [
        ("wait", 2, 3),
        ("cancel", 0, 1),
        ("wait", 0, 1),
    ]


def test_kept_child_has_a_query_for_its_repl_that_ends_with_it() -> None:
    starting, channel = handles("one", "two")
    child = starting.rlm_start("first task", "fast", keep=True)
    again = child.ask("second task", context="part")
    assert [child.result(), again.result()] == ["one", "two"]
    keep, *tasks = channel.started
    assert (keep.want, keep.background) == ("keep", True)
    assert [(task.child, task.repl, task.model) for task in tasks] == [(keep.id, True, "fast")] * 2
    again.cancel()
    assert channel.asked[-1].want == "wait"
    child.cancel()
    assert channel.asked[-1] == Query(id="", want="cancel", prompts=[each.id for each in channel.started])
    with pytest.raises(ValueError, match="started with keep=True"):
        starting.rlm_start("x").ask("y")


def test_wrong_answer_of_a_type_is_asked_for_once_more() -> None:
    starting, channel = handles("many", "7", "many", "more")
    child = starting.rlm_start("count", context="text", output_type=NUMBER)
    assert child.result() == 7
    one, other = channel.started
    assert one.contexts == other.contexts
    assert "You answered: many" in str(other.prompts[0])
    assert str(starting.rlm_start("count", output_type=NUMBER).result()).startswith("Error: the answer is not of the")


def test_file_of_a_context_stays_until_the_answer_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    starting, channel = handles("7")
    child = starting.rlm_start("count", context="x" * (MAX_INLINE_BYTES + 1))
    starting.rlm_start("dropped", context="y" * (MAX_INLINE_BYTES + 1))
    assert len([*tmp_path.glob(f"{PREFIX}*")]) == 2
    child.result()
    assert len([*tmp_path.glob(f"{PREFIX}*")]) == 1
    channel.replies["1:1"] = Reply("1:1", [Slot("nobody asks")])
    starting.rlm_start("small")
    assert [*tmp_path.glob(f"{PREFIX}*")] == []


def test_child_that_cannot_be_started_is_done_with_the_reason() -> None:
    starting, channel = handles()

    def refuse(_query: Query) -> str:
        raise FrameTooLarge(9, 5)

    channel.start = refuse  # type: ignore[method-assign,assignment]
    assert starting.rlm_start("x").result().startswith("Error: the query is too large: 9 bytes, 5 at most")


def test_answer_without_memory_for_it_is_an_error() -> None:
    starting, channel = handles()
    child = starting.rlm_start("x")
    channel.replies["1:0"] = Reply("1:0", [])
    assert child.result() == "Error: there is not enough memory for the answer"


@table(
    "call, error, said",
    [
        (lambda starting, _: starting.rlm_start(5), TypeError, r"rlm_start\(\) needs text: task is a int"),
        (
            lambda starting, child: starting.rlm_start(cast("Any", child)),
            TypeError,
            "task is a Child; use its result()",
        ),
        (lambda starting, _: starting.rlm_start("x", model=5), TypeError, "argument 'model' must be str"),
        (lambda starting, _: starting.rlm_start("x", keep=1), TypeError, "'keep' must be True or False"),
        (lambda starting, _: starting.rlm_start("x", keep=True, repl=False), TypeError, "True needs a REPL"),
        (lambda starting, _: starting.rlm_start("x", context={1}), TypeError, "argument 'context' is neither text nor"),
        (lambda starting, _: starting.rlm_start("x", output_type=5), TypeError, "must be a JSON schema"),
        (lambda _, child: child.result("5"), TypeError, "must be a number of seconds or None, not '5'"),
        (lambda _, child: child.result(float("nan")), TypeError, "must be a number of seconds"),
        (lambda _, child: child.ask("more"), ValueError, "started with keep=True"),
        (lambda _, child: first(cast("Any", [child]), cast("Any", 1)), TypeError, "first.. takes a number, and a list"),
        (lambda _, child: first(1, [child, cast("Any", "x")]), TypeError, "takes children of rlm_start, not a str"),
        (lambda _, child: first(2, [child]), ValueError, "'k' is 2, and there are 1 children"),
        (lambda _, child: pickle.dumps(child), CannotAsk, "another process cannot use"),
    ],
)
def test_wrong_use_of_children_is_named(call: Any, error: type[Exception], said: str) -> None:
    starting, channel = handles()
    child: Child = starting.rlm_start("x")
    with pytest.raises(error, match=said):
        call(starting, child)
    assert len(channel.started) == 1
    assert channel.asked == []
