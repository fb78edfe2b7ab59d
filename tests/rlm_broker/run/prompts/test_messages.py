"""User messages of a run: true, short, and with the user's text as text only."""

import pytest

from rlm_broker.context.stored_context import ContextBeginning
from rlm_broker.errors import ContextRefused
from rlm_broker.results import ContextInfo
from rlm_broker.run.prompts.instructions import Profile
from rlm_broker.run.prompts.messages import (
    BEGINNING_CHARS,
    NOT_LOOKED_AT,
    PARTS_SHOWN,
    REMINDER_CHARS,
    Messages,
    without_repl,
)
from tests.support.tables import table

HOSTILE = "{limits} {0} %s %(x)s $y {{"
TEXT = ContextInfo("str", 1234567)
START = ContextBeginning("Once upon a time" * 200, False)


def test_opening_describes_the_context() -> None:
    told = Messages("Who?").opening(TEXT, START)
    assert "a str with 1,234,567 characters" in told
    assert repr(START.text[:BEGINNING_CHARS]) in told
    assert NOT_LOOKED_AT in told
    assert told.endswith(Messages("Who?").reminder())


def test_short_context_is_shown_whole() -> None:
    told = Messages("Who?").opening(ContextInfo("str", 5), ContextBeginning("Alice", True))
    assert "All of it:\nAlice" in told
    assert NOT_LOOKED_AT not in told


def test_folder_parts_are_listed_up_to_a_number() -> None:
    parts = tuple((f"file{number}", number) for number in range(40))
    told = Messages("?").opening(ContextInfo("dict", 10, parts, 500, {"binary": 3}), START)
    assert f"file{PARTS_SHOWN - 1}: {PARTS_SHOWN - 1}" in told
    assert f"file{PARTS_SHOWN}:" not in told
    assert f"and {500 - PARTS_SHOWN} more" in told
    assert "Left out: 3 (binary)" in told


def test_text_of_the_user_is_no_template() -> None:
    assert HOSTILE in Messages(HOSTILE).opening(TEXT, START)
    assert HOSTILE in Messages(HOSTILE).last_request()
    assert HOSTILE in Messages("?").unseen(HOSTILE)


def test_task_in_the_context_is_mentioned() -> None:
    assert "The task is in the context itself" in Messages(None).reminder()
    told = Messages("Begin ... end", is_context=True).opening(TEXT, START)
    assert "Your task stands in `context`." in told
    assert "Question: Begin ... end" in told
    assert "all of it is in `context_1`" in Messages("why? " * 1_000, is_context=True, context="context_1").reminder()


@pytest.mark.parametrize(("is_context", "where"), [(False, "the first message"), (True, "`context`")])
def test_long_task_is_whole_only_in_the_opening(is_context: bool, where: str) -> None:
    question = "why? " * 10_000
    says = Messages(question, is_context=is_context)
    assert question in says.opening(TEXT, START)
    for told in (says.reminder(3), says.last_request()):
        assert len(told) < REMINDER_CHARS + 300
        assert question[:REMINDER_CHARS] in told
        assert f"all of it is in {where}" in told


@table("profile way", [("both", "FINAL("), ("final", "FINAL("), ("compact", "FINAL("), ("answer", "answer['ready']")])
def test_the_profile_is_kept_to_in_every_message(profile: Profile, way: str) -> None:
    says = Messages("Who?", profile)
    messages = [says.opening(TEXT, START), says.reminder(2), says.last_request(), says.unseen("x"), says.not_looked()]
    assert all(way in message for message in messages[:2])
    if profile == "answer":
        assert not any("FINAL" in message for message in messages)
    else:
        assert not any("answer['ready']" in message for message in messages)


def test_turns_that_are_left_are_told() -> None:
    assert "Turns left: 4." in Messages("Who?").reminder(4)


def test_oversized_context_is_refused_without_a_repl() -> None:
    with pytest.raises(
        ContextRefused, match=r"without a REPL \(max_depth = 0\) a context must be text or plain values"
    ):
        without_repl({"a": {1}}, "q")


def test_opening_tells_omissions_replacements_and_origin() -> None:
    info = ContextInfo("dict", 10, (), 0, {"binary": 2}, 3, 1, "Invoice")
    lines = Messages("q").opening(info, START).splitlines()
    assert lines[0] == "`context` is a dict made of an object of class Invoice, with 10 characters in all."
    assert lines[1:3] == ["Left out: 2 (binary)", "Replaced by U+FFFD: 3 (bytes that cannot be decoded)"]
