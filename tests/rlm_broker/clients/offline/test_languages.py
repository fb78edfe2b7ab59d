"""Stems, synonyms and languages."""

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
