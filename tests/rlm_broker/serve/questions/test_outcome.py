"""Events of a run as text for people."""

from typing import Any

import pytest

from rlm_broker.events.event import BlockEnded, CallStarted, CallText, Event, EventsMissed, Replied, RunStarted
from rlm_broker.results import Block, Completion
from rlm_broker.serve.questions.request import AnswerForm
from rlm_broker.serve.questions.runs import Telling, outcome_of
from rlm_broker.usage import UsageSummary


def told(*events: Event) -> str:
    telling = Telling()
    return "".join(telling.text(event) for event in events)


def call(number: int, **more: Any) -> CallStarted:
    return CallStarted("1", 0, number, None, "p", **more)


def test_reply_is_told_once() -> None:
    """A reply is told as it comes in pieces, or else when it is whole."""
    pieces: list[Event] = [
        call(1),
        CallText("1", 0, 1, "I lo"),
        CallText("1", 0, 1, "ok"),
        Replied("1", 0, 1, "I look"),
    ]
    assert told(*pieces) == "I look\n\n"
    assert told(call(1), Replied("1", 0, 1, "I look")) == "I look\n\n"
    assert told(*pieces, call(2), Replied("1", 0, 2, "again")) == "I look\n\nagain\n\n"


def test_calls_of_code_are_not_told() -> None:
    """Pieces of a call that code makes, or a child run, are not part of the run's own turns."""
    started = [call(1), call(2, block=1), CallStarted("1.1", 1, 3, None, "p")]
    assert told(*started, CallText("1", 0, 2, "x"), CallText("1.1", 1, 3, "y"), Replied("1.1", 1, 1, "z")) == ""
    assert told(RunStarted("1.1", 1, "Sum\nup", "m", {})) == "\n> run 1.1: Sum up\n"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (Block("x", "ok"), ""),
        (Block("x", "ok", "1\n"), "```text\n1\n```\n\n"),
        (Block("x", "error", "1\n", "warned\n", "ValueError: x"), "```text\n1\nwarned\nValueError: x\n```\n\n"),
        (
            Block("x", "error", "", "Traceback:\nValueError: x\n", "ValueError: x"),
            "```text\nTraceback:\nValueError: x\n```\n\n",
        ),
        (Block("x", "ok", "```\n"), "````text\n```\n````\n\n"),
    ],
)
def test_output_of_a_block_is_fenced(block: Block, text: str) -> None:
    assert told(BlockEnded("1", 0, 1, block)) == text


def test_missed_events_are_told() -> None:
    assert "7 events are left out" in told(EventsMissed("1", 0, 7))


def test_limit_without_an_answer_is_named() -> None:
    """A chat window shows no empty bubble, also if the last request for the best answer brought none."""
    ended = Completion(None, "m", 0, 1, 0.1, UsageSummary(), limit="max_iterations")
    for form in (AnswerForm(), AnswerForm({"type": "object"})):
        assert outcome_of(ended, form).text == "the limit max_iterations was reached before there was an answer"
