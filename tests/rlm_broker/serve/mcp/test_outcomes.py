"""Outcomes of blocks and runs as a client gets them: bounded, valid text, and with what is not text."""

import dataclasses

from mcp_types import CallToolResult, ImageContent, TextContent

from rlm_broker.errors import ModelFailed
from rlm_broker.results import Block, Completion, FileEntry
from rlm_broker.serve.mcp.outcomes import (
    MOST_CHARS,
    answer_outcome,
    block_outcome,
    entries_outcome,
    failure_outcome,
    file_outcome,
)
from rlm_broker.values.display import Display


def text(told: CallToolResult) -> str:
    first = told.content[0]
    assert isinstance(first, TextContent)
    return first.text


def test_all_parts_of_a_block_share_the_bound() -> None:
    """Long output, long errors and long displays together stay within the bound, and the cut is told."""
    shown = tuple(Display({"text/plain": "d" * 30_000}) for _ in range(32))
    block = Block("x", "interrupted", "o" * 99_000, "e" * 99_000, "i" * 9_000, displays=shown, displays_omitted=3)
    told = text(block_outcome(block, "repl_1"))
    assert len(told) <= MOST_CHARS
    assert told.count("characters cut") == 2  # of what was printed, and of the error
    assert "[3 further displays were not kept]" in told
    assert told.endswith("[repl: repl_1]")


def test_displays_are_told_in_their_best_form() -> None:
    """A picture is sent as one, a table as text, and what has neither form is named."""
    picture = Display({"image/png": b"p", "text/plain": "<Figure>"})
    table = Display({"text/html": "<table>", "text/markdown": "| a |", "text/plain": "a"})
    drawing = Display({"image/svg+xml": "<svg>"})
    told = block_outcome(Block("x", "ok", displays=(picture, table, drawing)), "repl_1")
    assert told.content[1:] == [ImageContent(data="cA==", mime_type="image/png")]
    assert "| a |" in text(told)
    assert "image/svg+xml" in text(told)
    assert not [word for word in ("<table>", "<Figure>") if word in text(told)]


def test_killed_block_says_what_is_gone() -> None:
    killed = Block("x", "killed", error="its process ended by itself", limit="memory_bytes")
    told = block_outcome(killed, None)
    assert (told.structured_content["repl"], told.structured_content["limit"]) == (None, "memory_bytes")
    assert text(told).splitlines() == [
        "killed: its process ended by itself",
        "[the REPL is gone, with its variables: leave out repl to begin a new one]",
    ]
    told = block_outcome(dataclasses.replace(killed, blocks_undone=2), "repl_1")
    assert told.structured_content["blocks_undone"] == 2
    assert "[variables are lost: those of the last 2 blocks run]" in text(told)
    told = block_outcome(dataclasses.replace(killed, blocks_undone=1), "repl_1")
    assert "[variables are lost: those of this block alone]" in text(told)


def test_lone_surrogates_are_escaped() -> None:
    """Text of code may have characters that no UTF-8 has; messages of the protocol may not."""
    told = block_outcome(Block("x", "error", "\udc80", "\udfff", "\ud800"), "repl_1")
    listed = entries_outcome(".", [FileEntry("\udcff", "file", 1)])
    for each in (told, listed):
        each.model_dump_json().encode()
    assert "\\udc80" in text(told)


def test_answers_and_failures_are_told() -> None:
    """A long answer is cut in the text alone."""
    completion = Completion("a" * 50_000, "m", 0, 1, 1.0, ModelFailed("x").usage_summary)
    told = answer_outcome("run", completion)
    assert told.structured_content["answer"] == completion.response
    assert len(text(told)) <= MOST_CHARS
    limited = answer_outcome("run", dataclasses.replace(completion, response="b", limit="max_iterations"))
    assert text(limited) == "b\n[max_iterations was reached: that is the best answer so far]"
    assert answer_outcome("run", dataclasses.replace(completion, response=None)).is_error
    limited = answer_outcome("run", dataclasses.replace(completion, response=None, limit="max_iterations"))
    assert text(limited) == "The run has ended: max_iterations was reached before there was an answer."
    failed = ModelFailed("the provider is away")
    failed.partial_answer = "p" * 50_000
    told = failure_outcome("run", failed)
    assert told.is_error
    assert len(text(told)) <= MOST_CHARS
    assert text(told).startswith("The run has ended without an answer: the provider is away\nBest answer so far:\nppp")


def test_file_is_text_or_base64() -> None:
    assert text(file_outcome("a", "grün".encode())) == "grün"
    raw = {name: value for name, value in file_outcome("a", b"\xff").structured_content.items() if value is not None}
    assert raw == {"action": "read", "path": "a", "base64": "/w==", "bytes": 1}
