"""Outcomes that are too large for one message: what stays, and what says that something is missing."""

import dataclasses

import pytest

from rlm_broker.cluster.agent import shortening
from rlm_broker.cluster.agent.shortening import encoded_outcome
from rlm_broker.cluster.outcomes import read_completion
from rlm_broker.errors import ValueTooLarge
from rlm_broker.results import Block, ChatMessage, ChildTrace, Completion, Iteration, PostMortem, Variable
from rlm_broker.usage import UsageSummary
from rlm_broker.values.display import Display


def outcome(turns: int, chars: int, display_bytes: int = 0, answer: str = "42") -> Completion:
    """A run of so many turns, each with an output, a message and a display of that size."""
    displays = (Display({"image/png": b"p" * display_bytes}),) if display_bytes else ()
    blocks = (Block("print()", "ok", "o" * chars, displays=displays, variables=(Variable("a", "int"),)),)
    trajectory = tuple(Iteration(number, "r", blocks) for number in range(1, turns + 1))
    messages = (ChatMessage("system", "S"), *(ChatMessage("user", "m" * chars) for _ in range(turns)))
    return Completion(answer, "gpt", 0, turns, 1.0, UsageSummary(), messages=messages, trajectory=trajectory)


def crossed(completion: Completion) -> Completion:
    return read_completion(encoded_outcome(completion))


def test_what_fits_stays_whole() -> None:
    whole = outcome(3, 100, 100)
    assert crossed(whole) == whole


def test_displays_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation and all outputs stay, and each block says how many displays it had."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 50_000)
    made = crossed(outcome(3, 5_000, 10_000))
    assert made.messages == outcome(3, 5_000).messages
    assert [(block.stdout, block.displays, block.displays_omitted) for turn in made.trajectory for block in turn.blocks]
    assert {block.displays_omitted for turn in made.trajectory for block in turn.blocks} == {1}


def test_long_texts_are_cut_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn stays, and the cut is marked."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 200_000)
    made = crossed(outcome(3, 100_000))
    assert len(made.trajectory) == 3
    end = "... [80,000 characters left out: the outcome was too large for one message]"
    assert made.trajectory[0].blocks[0].stdout == f"{'o' * 20_000}\n{end}"
    assert str(made.messages[-1].content).endswith(end)


def test_early_turns_go_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system prompt, the last turns and the answer stay; the number of turns is that of the run."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 500_000)
    made = crossed(outcome(500, 20_000))
    assert (made.response, made.iterations, made.trajectory[-1].number) == ("42", 500, 500)
    assert len(made.trajectory) == shortening.LAST_TURNS
    assert [message.content for message in made.messages[:2]] == ["S", "[401 messages left out]"]
    assert len(made.messages) == shortening.LAST_TURNS + 2


def test_many_small_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of very many turns has more values than a message may have."""
    monkeypatch.setattr(shortening, "MOST_VALUES", 10_000)
    assert len(crossed(outcome(5_000, 1)).trajectory) == shortening.LAST_TURNS


def test_an_answer_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that no message takes is an error, and not a shorter answer."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 100_000)
    assert crossed(outcome(1, 50_000, answer="a" * 50_000)).response == "a" * 50_000
    with pytest.raises(ValueTooLarge, match="the answer takes more than 100,000 bytes"):
        encoded_outcome(outcome(1, 1, answer="a" * 100_000))


def test_all_texts_of_a_block_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer appears in the block that submitted it, too, and is whole only once."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 400_000)
    long = "x" * 200_000
    died = PostMortem("line 1", long, 1, 1.0, 1, 1)
    block = Block("c", "killed", error=long, final_answer=long, draft=long, post_mortem=died)
    whole = dataclasses.replace(outcome(1, 1, answer=long), trajectory=(Iteration(1, "r", (block,)),))
    whole = dataclasses.replace(whole, child_traces=(ChildTrace(1, 0.5, "p", None, long),))
    made = crossed(whole)
    [cut] = made.trajectory[0].blocks
    assert cut.post_mortem is not None
    texts = [cut.error, cut.final_answer, cut.draft, cut.post_mortem.stack, made.child_traces[0].error]
    assert all("180,000 characters left out" in (text or "") for text in texts)
    assert made.response == long
