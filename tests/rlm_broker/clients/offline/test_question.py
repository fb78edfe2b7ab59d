"""Terms of questions: names, numbers, quotations and small words."""

import pytest

from rlm_broker.clients.offline.question import MAX_TERMS, quoted, terms


@pytest.mark.parametrize(
    ("question", "texts"),
    [
        ("how many \"a b\" and 'c' and `d`?", ["a b", "c", "d"]),
        ("lines with “x”, «y» and \u2018z\u2019", ["x", "y", "z"]),
        ("the cat's dish and the dogs' dish", []),
        ("it isn't 'don't panic' here", ["don't panic"]),
        ("how many ```x``` or \"\" or ' '", ["x"]),
        ('"a" and "a"', ["a"]),
    ],
)
def test_quotations_are_found_and_apostrophes_are_none(question: str, texts: list[str]) -> None:
    assert quoted(question) == texts


@pytest.mark.parametrize(
    ("question", "required"),
    [
        ("Who is Ingrid Sollberg?", ["Ingrid", "Sollberg"]),
        ("Backups are kept where? Somewhere in Fes.", ["Fes"]),
        ("What is in rack F-17 at 10.0.0.5 since 2019?", ["F-17", "10.0.0.5", "2019"]),
        ("what does 'disk full' mean?", ["disk full"]),
        ("WHO KEEPS THE KEYS?", []),
        ("Where was I?", []),
        ("What is Anna's badge?", ["Anna"]),
    ],
)
def test_names_numbers_and_quotations_are_required(question: str, required: list[str]) -> None:
    assert [term.text for term in terms(question) if term.is_required] == required


def test_small_words_are_no_terms() -> None:
    assert terms("What is it, and where would they have been?") == []
    assert [term.text for term in terms("What is the badge of the custodian?")] == ["badge", "custodian"]


@pytest.mark.parametrize(
    ("term", "text", "occurs"),
    [
        ("in Fes", "At Fes.", True),
        ("in Fes", "professor, festival", False),
        ("is 3.5", "3.5, or", True),
        ("is 3.5", "13.5 3.51 1.3.5 3.5.1", False),
        ("is 'A b'", "xa bx", True),
        ("鍵", "金庫の鍵は", True),
    ],
)
def test_term_matches_whole_words_unless_quoted(term: str, text: str, occurs: bool) -> None:
    assert terms(term)[-1].occurs_in(text) is occurs


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("policies", ["policy", "policies"]),
        ("installed", ["install", "installing", "installation"]),
        ("renovation", ["renovations", "renovation"]),
        ("keys", ["key", "keys"]),
        ("painted", ["paint", "painting"]),
    ],
)
def test_needle_of_a_word_is_in_its_forms(word: str, forms: list[str]) -> None:
    """The needle of a word occurs in its other forms too."""
    (term,) = terms(word)
    assert all(term.needles[0] in form for form in [word, *forms])


def test_long_question_is_read_at_both_ends() -> None:
    """A question as long as a document is read at both ends and has few terms."""
    middle = " ".join(f"word{i}x" for i in range(50_000))
    found = terms(f"alpha {middle} omega 'quoted text'")
    assert len(found) == MAX_TERMS
    assert {"quoted text", "alpha"} <= {term.text for term in found}
    assert terms("'" * 20_000 + " x'y" * 20_000) is not None


@pytest.mark.parametrize(
    ("question", "word", "needle"),
    [
        ("How long does the guarantee last?", "guarantee", "warrant"),
        ("Who started the firm?", "firm", "compan"),
        ("Wer verwaltet die Schlüssel?", "verwaltet", "verwalt"),
    ],
)
def test_synonyms_and_forms_of_other_languages_are_looked_for(question: str, word: str, needle: str) -> None:
    (term,) = (term for term in terms(question) if term.text == word)
    assert any(each.startswith(needle) for each in term.needles)
