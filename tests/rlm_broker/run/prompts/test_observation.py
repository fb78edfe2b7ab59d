"""The observation of a turn: one bound for all blocks, repeated lines folded, output as text only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.results import Block, Variable
from rlm_broker.run.prompts.observation import folded, most_shown, observation, shared
from rlm_broker.values.parsing.notes import NotRun

HOSTILE = "{limits} {0} %s %(x)s $y {{"


def test_text_of_documents_is_no_template() -> None:
    block = Block(HOSTILE, "ok", stdout=HOSTILE, stderr=HOSTILE)
    assert observation([block], [NotRun(HOSTILE, HOSTILE)], 1_000, HOSTILE).count(HOSTILE) == 5


def test_long_output_keeps_head_and_tail() -> None:
    told = observation([Block("c", "ok", stdout="H" * 500 + "x" * 9000 + "T" * 500)], [], 1_000, "?")
    assert "H" * 500 in told
    assert "T" * 250 in told
    assert "[9,000 characters cut]" in told


def test_blocks_of_a_turn_share_one_bound() -> None:
    blocks = [Block("c", "ok", stdout="a" * 50_000, stderr="b" * 50_000) for _ in range(5)]
    blocks.append(Block("c", "ok", stdout="the small result"))
    told = observation(blocks, [], 2_000, "?")
    assert "the small result" in told
    assert 1_600 < told.count("a") + told.count("b") < 2_400


def test_block_ends_explain_what_happens_to_variables() -> None:
    def told(**fields: object) -> str:
        return observation([Block(code="c", **fields)], [], 100, "go on")  # type: ignore[arg-type]

    assert "called sys.exit (3)" in told(status="exited", error="3")
    assert "raised an exception (ValueError: x)" in told(status="error", error="ValueError: x")
    assert "Your variables are still there" in told(status="interrupted", error="KeyboardInterrupt")
    assert "all your variables are lost" in told(status="killed", error="it was slow")
    assert "as they were before this block" in told(status="killed", error="it was slow", blocks_undone=1)
    assert "the 2 before it did to them is lost" in told(status="killed", error="it was slow", blocks_undone=3)
    assert "(no output)" in told(status="ok")


def test_empty_turn_is_told_to_lack_code_and_answer() -> None:
    assert "no code to run and no answer" in observation([], [], 100, "?")


def test_repeated_lines_become_one_with_their_number() -> None:
    assert folded("a\n" + "same\n" * 1_000 + "b") == "a\nsame  [1,000 equal lines]\nb"
    assert folded("same\nsame\nother") == "same\nsame\nother"
    assert folded("\n" * 50) == "\n" * 50


def test_variables_are_told_with_type_and_size() -> None:
    made = (Variable("parts", "list", 1_200), Variable("df", "DataFrame", (10, 3)), Variable("f", "function", None))
    told = observation([Block("c", "ok", variables=made)], [], 100, "?")
    assert "Variables made or changed: parts (list, 1,200), df (DataFrame, 10 x 3), f (function)" in told


@given(st.lists(st.integers(0, 1_000)), st.integers(0, 5_000))
def test_an_amount_is_divided_without_waste(lengths: list[int], most: int) -> None:
    shares = shared(lengths, most)
    assert all(0 <= share <= wanted for share, wanted in zip(shares, lengths, strict=True))
    assert sum(shares) <= most
    if sum(lengths) <= most:
        assert shares == lengths
    elif lengths:
        assert sum(shares) > most - len(lengths)


@pytest.mark.parametrize("status", ["ok", "error"])
def test_skipped_code_is_told_with_its_reason(status: str) -> None:
    told = observation([Block("c", status)], [NotRun("block 2", "Block 1 was killed.")], 100, "?")  # type: ignore[arg-type]
    assert "Not run: block 2. Block 1 was killed." in told


def test_observation_takes_a_quarter_of_a_small_window() -> None:
    assert most_shown(20_000, None) == most_shown(20_000, 128_000) == 20_000
    assert most_shown(20_000, 8_000) == 6_000
    assert most_shown(20_000, 10) == 1_000
