"""Prose of replies while they arrive."""

import pytest

from rlm_broker.serve.responses.events import LiveProse

REPLIES = {
    "plain": ("First words.\nSecond line.", "First words.\nSecond line."),
    "code": ("I look.\n```repl\nprint(1)\n```\nThen on.", "I look.\nThen on."),
    "tilde code": ("I look.\n~~~python\nprint('```')\n~~~\n", "I look."),
    "code in a list": ("- ```py\nprint(1)\n```\nDone.", "Done."),
    "code after words": ("Step 1: ```repl\nprint(1)\n```\nDone.", "Step 1: \nDone."),
    "unclosed code": ("I look.\n```repl\nprint(1)", "I look."),
    "shown text": ("So:\n```text\nFINAL(no)\n```\nYes.", "So:\n```text\nFINAL(no)\n```\nYes."),
    "answer": ("It is clear.\nFINAL(the\nanswer)", "It is clear."),
    "answer of a variable": ("Now.\n  FINAL_VAR(x)\nBye.", "Now."),
    "answer within a line": ("I write FINAL(x) later.", "I write FINAL(x) later."),
    "ticks in words": ("Use `a` and ``b``, `c", "Use `a` and ``b``, `c"),
    "long answer": (f"It is clear.\nFINAL({'a' * 400})", "It is clear."),
    "code after many words": (f"{'word ' * 60}```repl\nprint(1)\n```\nDone.", f"{'word ' * 60}\nDone."),
    "finally": ("FINALLY it works", "FINALLY it works"),
    "windows": ("One.\r\n```repl\r\nx\r\n```\r\nTwo.", "One.\nTwo."),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
def test_prose_is_the_same_however_it_arrives(size: int) -> None:
    for name, (reply, prose) in REPLIES.items():
        live = LiveProse()
        said = "".join(live.feed(reply[at : at + size]) for at in range(0, len(reply), size)) + live.end()
        assert said.strip("\n") == prose, name


def test_prose_is_shown_before_its_line_ends() -> None:
    """Words arrive at the client when they are certain, and not when their line ends."""
    live = LiveProse()
    assert live.feed("I look at ") == "I look at "
    assert live.feed("the logs") == "the logs"


def test_prose_of_a_long_fence_line_is_shown() -> None:
    """A line that only looks like a fence is not held back without a bound."""
    live = LiveProse()
    assert live.feed("```" + "x" * 500)
