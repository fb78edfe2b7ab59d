"""Quotations from one prompt: candidates, confidence and places."""

import json
from typing import Any

import pytest

from rlm_broker.clients.offline.extract import complete

KEEPER = "The keeper of the lighthouse is Bram Oduya."


def sub_call(text: str, question: str, begin: int = 0, name: str = "") -> list[dict[str, Any]]:
    """Return the quotations from a chunk with the header of `repl_code.search`; empty for NOT FOUND."""
    reply = complete(f"[characters {begin} to {begin + len(text)}] {name}\n{text}", question)
    return [] if reply == "NOT FOUND" else json.loads(reply)


def test_chunk_header_gives_offsets_of_the_context() -> None:
    """A chunk with a header is answered with offsets of the context."""
    best = sub_call(f"It rains.\n{KEEPER} It snows.", "Who is the keeper of the lighthouse?", begin=5_000)[0]
    assert best["quote"] == KEEPER
    assert (best["offset"], best["line"], best["confidence"]) == (5_010, 2, "high")
    assert best["matched"] == ["keeper", "lighthouse"]


def test_a_prompt_without_a_header_is_answered_in_words() -> None:
    lines = complete(f"It rains.\n{KEEPER}", "Who is the keeper of the lighthouse?").splitlines()
    assert lines[0] == KEEPER
    assert lines[1] == "Found at line 2, character 10 of the prompt."
    assert lines[2].startswith("Confidence: high")


def test_header_below_the_first_line_is_text() -> None:
    text = f"It rains.\n[characters 900 to 999] x\n{KEEPER}"
    assert sub_call(text, "Who is the keeper of the lighthouse?")[0]["offset"] == text.index(KEEPER)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Who is Zelda Quill?", KEEPER),
        ("What cost 48213?", "It cost 482130 and 148213."),
        ("Who eats in Fes?", "The professor eats at the festival."),
        ("Who says 'of the house'?", KEEPER),
        ("What is it?", KEEPER),
        ("Who keeps bees?", ""),
        ("Who keeps bees?", " \r\n\t\n"),
    ],
)
def test_missing_fact_is_not_found(question: str, text: str) -> None:
    assert sub_call(text, question) == []
    assert complete(text, question).startswith("NOT FOUND\n")


def test_other_forms_of_a_word_are_found() -> None:
    """Another form of a word is found; another form of a name is found at low confidence."""
    text = "Policies are painted on boats by the Brasks."
    assert sub_call(text, "Who paints the policy on a boat?")[0]["quote"] == text
    assert sub_call("Bram Oduya painted the boats.", "Who paints the boat?")[0]["confidence"] == "high"
    assert sub_call(text, "Does the Brask paint boats?")[0]["confidence"] == "LOW CONFIDENCE"


def test_name_in_the_line_before_has_low_confidence() -> None:
    """A name in the line before is enough at low confidence, and a name far away is not enough."""
    near = "Bram Oduya lives here.\nHe is of the coast.\nThe badge of the keeper is green."
    assert sub_call(near, "Which badge has the keeper Oduya?")[0]["confidence"] == "LOW CONFIDENCE"
    far = "Bram Oduya lives here.\n" + "It rains.\n" * 5 + "The badge of the keeper is green."
    assert all("green" not in quote["quote"] for quote in sub_call(far, "Which badge has the keeper Oduya?"))


def test_the_name_of_the_file_counts_as_said() -> None:
    assert sub_call("timeout = 90", "What is the timeout of Web2?", name="conf/Web2.toml")[0]["quote"] == "timeout = 90"
    assert sub_call("timeout = 90", "What is the timeout of Web2?", name="conf/Web3.toml") == []


def test_sentences_end_at_full_stops_and_not_at_abbreviations() -> None:
    text = 'Go. Dr. J. Venn (see No. 7, e.g. there) owns "the boat." Then? Yes! 船は港にある。鍵は棚にある。End'
    assert sub_call(text, "Who owns boats?")[0]["quote"] == 'Dr. J. Venn (see No. 7, e.g. there) owns "the boat."'
    assert sub_call(text, "鍵は棚")[0]["quote"] == "鍵は棚にある。"


def test_sentence_over_two_lines_is_quoted_whole() -> None:
    text = "It rains.\nThe keeper of the old lighthouse on the northern\nisland owns a telescope.\nIt snows."
    quote = sub_call(text, "Does the lighthouse keeper on the island own a telescope?")[0]["quote"]
    assert quote == "The keeper of the old lighthouse on the northern\nisland owns a telescope."


def test_question_in_the_text_ranks_below_a_statement() -> None:
    text = (
        "Question: Who is the keeper of the lighthouse\nWho is the keeper of the lighthouse?\nNobody knows.\n" + KEEPER
    )
    assert sub_call(text, "Who is the keeper of the lighthouse?")[0]["quote"] == KEEPER


@pytest.mark.parametrize("text", ["\ud800 \x00 keeper", '"keeper" OR * NEAR(', "keeper\x00", "[characters 1 to"])
@pytest.mark.parametrize("question", ['keeper "OR" * ^ NEAR( {body}: -', "keeper \ud800\x00", "keeper `\x00` -- ;"])
def test_no_text_and_no_question_breaks_the_search(text: str, question: str) -> None:
    assert complete(text, question)


def test_quote_of_an_endless_line_is_bounded() -> None:
    """A quote of an endless line has at most some hundred characters."""
    best = sub_call("word " * 5_000 + "keeper of bees " + "word " * 5_000, "keeper of bees")[0]
    assert "keeper of bees" in best["quote"]
    assert len(best["quote"]) <= 1_200


def test_a_prompt_without_code_counts_nothing() -> None:
    answer = complete("2024 ERROR pay failed\n2024 ERROR mail failed", "How many errors are there?")
    assert "I cannot count that" in answer
    assert "Confidence: high" not in answer
