"""Outcomes of blocks and runs as a client gets them: bounded, valid text, and with what is not text."""

import dataclasses

from rlm_broker.errors import ModelFailed
from rlm_broker.results import Block, Completion, FileEntry
from rlm_broker.serve.mcp.forms import Answer, Ran
from rlm_broker.serve.mcp.outcomes import (
    MOST_CHARS,
    answer_outcome,
    block_outcome,
    entries_outcome,
    failure_outcome,
    file_outcome,
)
from rlm_broker.values.display import Display

KILLED = Block("x", "killed", error="its process ended by itself", limit="memory_bytes")


def test_all_parts_of_a_block_share_the_bound() -> None:
    """Long output, long errors and long displays together stay within the bound, and each cut is told."""
    shown = tuple(Display({"text/plain": "d" * 30_000}) for _ in range(32))
    block = Block("x", "interrupted", "o" * 99_000, "e" * 99_000, "i" * 9_000, displays=shown, displays_omitted=3)
    told = block_outcome(block, "repl_1")
    assert len(told.text) <= MOST_CHARS
    assert told.text.count("characters cut") == 35
    assert "[3 further displays were not kept]" in told.text
    assert told.text.endswith("[repl: repl_1]")


def test_displays_are_told_in_their_best_form() -> None:
    """A picture is sent as one, a table as text, and what has neither form is named."""
    picture = Display({"image/png": b"p", "text/plain": "<Figure>"})
    table = Display({"text/html": "<table>", "text/markdown": "| a |", "text/plain": "a"})
    drawing = Display({"image/svg+xml": "<svg>"})
    told = block_outcome(Block("x", "ok", displays=(picture, table, drawing)), "repl_1")
    assert [(each.mime, each.data) for each in told.pictures] == [("image/png", "cA==")]
    assert "| a |" in told.text
    assert "<table>" not in told.text
    assert "image/svg+xml" in told.text
    assert "<Figure>" not in told.text


def test_killed_block_says_what_is_gone() -> None:
    told = block_outcome(KILLED, None)
    assert isinstance(told.result, Ran)
    assert (told.result.repl, told.result.limit) == (None, "memory_bytes")
    assert told.text.splitlines() == [
        "killed: its process ended by itself",
        "[the REPL is gone, with its variables: leave out repl to begin a new one]",
    ]


def test_lone_surrogates_are_escaped() -> None:
    """Text of code may have characters that no UTF-8 has; messages of the protocol may not."""
    told = block_outcome(Block("x", "error", "\udc80", "\udfff", "\ud800"), "repl_1")
    listed = entries_outcome(".", [FileEntry("\udcff", "file", 1)])
    for text in (told.text, told.result.model_dump_json(), listed.text, listed.result.model_dump_json()):
        text.encode()
    assert "\\udc80" in told.text


def test_long_answer_is_cut_in_text_alone() -> None:
    completion = Completion("a" * 50_000, "m", 0, 1, 1.0, ModelFailed("x").usage_summary)
    told = answer_outcome("run", completion)
    assert isinstance(told.result, Answer)
    assert told.result.answer == completion.response
    assert len(told.text) <= MOST_CHARS
    limited = answer_outcome("run", dataclasses.replace(completion, response="b", limit="max_iterations"))
    assert limited.text == "b\n[max_iterations was reached: that is the best answer so far]"
    none = answer_outcome("run", dataclasses.replace(completion, response=None))
    assert none.is_error


def test_failure_brings_its_partial_answer() -> None:
    failed = ModelFailed("the provider is away")
    failed.partial_answer = "p" * 50_000
    told = failure_outcome("run", failed)
    assert told.is_error
    assert len(told.text) <= MOST_CHARS
    assert told.text.startswith("The run has ended without an answer: the provider is away\nBest answer so far:\nppp")


def test_file_is_text_or_base64() -> None:
    text, raw = file_outcome("a", "grün".encode()), file_outcome("a", b"\xff")
    assert text.text == "grün"
    assert raw.result.model_dump(exclude_none=True) == {"action": "read", "path": "a", "base64": "/w==", "bytes": 1}
