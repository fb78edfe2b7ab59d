"""Stems, synonyms and languages."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlm_broker.clients.offline.languages import beginning, language_of, stem, synonyms, verb_forms


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who keeps the key of the vault?", "english"),
        ("Wer verwaltet den Schlüssel des Archivs?", "german"),
        ("Où se trouve la clé du grenier?", "french"),
        ("¿Dónde está la llave del sótano?", "spanish"),
        ("Dove si trova la chiave della cantina?", "italian"),
        ("Waar ligt de sleutel van het archief?", "dutch"),
        ("Bram", "english"),
    ],
)
def test_the_language_is_told_by_small_words(text: str, language: str) -> None:
    assert language_of(text) == language


def test_word_forms_share_stem_and_beginning() -> None:
    assert stem("verwaltet", "german") == stem("verwalten", "german")
    assert beginning("Schlüsseln", "german") == "schl"  # the stem is "schlussel", without the two dots
    assert beginning("llaves", "spanish") == "llav"
    assert stem("F-17") == "f-17"


def test_synonyms_and_forms_of_a_verb() -> None:
    assert "warranty" in synonyms("guarantees")
    assert synonyms("lighthouse") == ()
    assert verb_forms("froze") == verb_forms("freezing")
    assert verb_forms("boat") == {"boat"}


@pytest.fixture
def _busy_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_busy_threads")
def test_threads_stem_words_at_the_same_time() -> None:
    """Plain completions of the model offline run in threads, which share one stemmer for each language."""
    starts = ("run", "station", "access", "nation", "hope", "condition", "agree", "weather")
    words = [start + end for start in starts for end in ("", "s", "ing", "al", "ness", "fully", "ization")]
    stemmed = stem.__wrapped__  # without the cache, which would hide the stemmer
    wanted = [stemmed(word) for word in words]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: [stemmed(word) for word in words], range(60)))
    assert all(each == wanted for each in found)
