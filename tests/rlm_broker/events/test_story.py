"""Passages that are made of events."""

from rlm_broker.events.event import BlockEnded, BlockStarted, CallEnded, CallStarted, Replied, RunEnded
from rlm_broker.events.story import MOST_CHARS, MOST_LINES, Passage, PassageText, Story
from rlm_broker.results import Block
from rlm_broker.usage import Usage, UsageSummary


def ended(call: int, done: int, error: str | None = None) -> CallEnded:
    return CallEnded("1", 1, call, "m", Usage(1, 3, 5), 0.1, "reply", error, batch=1, done=done, of=100)


def called(story: Story, call: int, error: str | None = None) -> Passage | None:
    story.passage(CallStarted("1", 1, call, None, f"prompt {call}", block=1, batch=1, of=100))
    return story.passage(ended(call, call, error))


def test_of_a_long_batch_a_few_calls_all_failures_and_each_tenth_are_told() -> None:
    story = Story()
    told = {call: called(story, call, "no" if call == 50 else None) for call in range(1, 101)}
    assert [call for call, passage in told.items() if passage and passage.pieces] == [1, 2, 3, 4, 50]
    assert [call for call, passage in told.items() if passage] == [1, 2, 3, 4, *range(10, 101, 10)]
    texts = (("label", "asked"), ("text", "prompt 4"), ("label", "replied"), ("text", "reply"))
    pieces = tuple(PassageText(kind, text) for kind, text in texts)  # type: ignore[arg-type]
    assert told[4] == Passage("call", "1", 1, "call 4: m, 0.10 s, 3 tokens in and 5 out", pieces)
    assert told[50] is not None
    assert (told[50].title, told[50].is_trouble) == ("call 50 failed: no", True)
    whole = Story("all")
    assert all(called(whole, call) for call in range(1, 101))


def test_a_turn_is_told_with_its_call_and_without_the_code_that_is_run() -> None:
    story = Story()
    assert story.passage(CallStarted("1", 0, 1, None, "the first message")) is None
    assert story.passage(CallEnded("1", 0, 1, "m", Usage(1, 3, 5), 2.0, "...")) is None
    passage = story.passage(Replied("1", 0, 1, "First.\n```repl\nprint(1)\n```\nThen.", ("tool call: no",)))
    pieces = (PassageText("text", "First.\n\nThen."), PassageText("error", "not run: tool call: no"))
    assert passage == Passage("reply", "1", 0, "turn 1: reply of m, 2.00 s, 3 tokens in and 5 out", pieces)


def test_of_a_reply_that_is_too_long_to_parse_its_beginning_is_shown() -> None:
    passage = Story().passage(Replied("1", 0, 1, f"First.\n```repl\n{'x = 1' * 20_000}\n```\nThen."))
    assert passage == Passage("reply", "1", 0, "turn 1: reply", (PassageText("text", "First."),))


def test_what_a_cancelled_run_leaves_is_forgotten() -> None:
    story = Story()
    story.passage(CallStarted("1", 1, 1, None, "prompt", block=1, tree="a"))
    story.passage(CallStarted("1", 1, 1, None, "of another tree", block=1, tree="b"))
    story.passage(RunEnded("1", 0, None, "cancelled", 1, 0.1, UsageSummary(), tree="a"))
    passage = story.passage(CallEnded("1", 1, 1, "m", Usage(), 0.1, "reply", tree="b"))
    assert passage is not None
    assert PassageText("text", "of another tree") in passage.pieces
    assert not story._calls


def test_killed_block_is_told_with_what_is_left_of_the_variables() -> None:
    for undone, left in (
        (None, "all variables are lost"),
        (1, "variables are as before it"),
        (3, "variables are as they were 3 blocks ago"),
    ):
        passage = Story("titles").passage(
            BlockEnded("1", 0, 2, Block("x", "killed", error="why", blocks_undone=undone))
        )
        assert passage is not None
        assert passage.title == f"block 2: killed after 0.00 s: why; {left}"


def test_stderr_is_an_error_only_where_the_block_failed() -> None:
    for block, kind in (
        (Block("x", "ok", stdout="out\n", stderr="err\n"), "text"),
        (Block("x", "error", stdout="out\n", stderr="err\n", error="err"), "error"),
    ):
        passage = Story().passage(BlockEnded("1", 0, 1, block))
        assert passage is not None
        assert [(piece.kind, piece.text) for piece in passage.pieces] == [("text", "out"), (kind, "err")]


def test_long_texts_lose_their_middle() -> None:
    def shown(code: str) -> list[str]:
        passage = Story().passage(BlockStarted("1", 0, 1, 1, code))
        assert passage is not None
        return passage.pieces[0].text.split("\n")

    lines = shown("\n".join(map(str, range(1_000))))
    assert len(lines) == MOST_LINES + 1
    assert lines[MOST_LINES // 2] == "... [960 lines cut] ..."
    assert (lines[0], lines[-1]) == ("0", "999")
    lines = shown("x" * 10_000 + "y")
    assert lines[1] == f"... [{10_001 - MOST_CHARS:,} characters cut] ..."
    assert lines[2].endswith("y")
    assert shown("short") == ["short"]


def test_titles_of_a_long_batch_are_ten() -> None:
    story = Story("titles")
    passages = [
        story.passage(CallEnded("1", 1, done, "m", Usage(), 0.1, "", batch=3, done=done, of=1000))
        for done in range(1, 1001)
    ]
    lines = [passage.line for passage in passages if passage]
    assert lines == [f"[depth 1] batch 3: {done:,} of 1,000 calls" for done in range(100, 1001, 100)]
