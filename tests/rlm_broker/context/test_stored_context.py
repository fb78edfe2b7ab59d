"""Excerpts of a context for a prompt."""

from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.store import store
from rlm_broker.context.stored_context import BEGINNING_CHARS, ContextBeginning, beginning, digest_of, whole_text
from rlm_broker.errors import ContextRefused
from tests.support.contexts import written


def test_text_excerpt_is_its_first_characters_of_any_width() -> None:
    for character in ("a", "é", "中", "𝄞"):
        with store(character * 30_000) as stored:
            assert beginning(stored) == ContextBeginning(character * BEGINNING_CHARS, False)
            assert beginning(stored, 5) == ContextBeginning(character * 5, False)
        with store(character * 5) as stored:
            assert beginning(stored, 5) == ContextBeginning(character * 5, True)
            assert beginning(stored, 4) == ContextBeginning(character * 4, False)
            assert whole_text(stored, stored.size_bytes) == character * 5


def test_value_excerpt_is_the_start_of_its_json() -> None:
    values: list[Any] = [{"a": 1}, [1, "é中"], None, 5, True, {}]
    for value, text in zip(values, ('{"a":1}', '[1,"é中"]', "null", "5", "true", "{}"), strict=True):
        with store(value) as stored:
            assert beginning(stored, 100) == ContextBeginning(text, True)
            assert beginning(stored, 2) == ContextBeginning(text[:2], len(text) <= 2)
            assert whole_text(stored, 1_000) == text
    with store(["中" * 50] * 1_000 + [1]) as stored:
        assert beginning(stored, 7).text == '["中中中中中'
    with store("a\ud800b") as stored:
        assert beginning(stored).text.encode()


def test_excerpt_of_several_texts_shows_the_first(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "first")
    written(tmp_path / "b.txt", "second")
    with store(tmp_path) as stored:
        assert beginning(stored) == ContextBeginning("first", False)
        assert whole_text(stored, 1_000) == '{"a.txt": "first", "b.txt": "second"}'
    with store(["x" * 2_000, "y" * 2_000]) as stored:
        assert beginning(stored) == ContextBeginning("x" * 2_000, False)
    with store("one") as one, store({"a": one, "b": 2}) as stored:
        assert beginning(stored) == ContextBeginning("one", False)
        assert whole_text(stored, 1_000) == '{"a": "one", "b": 2}'


def test_too_long_excerpt_is_refused_in_words() -> None:
    with store(["x" * 100]) as stored, pytest.raises(ContextRefused, match="a context of 104 bytes is too long"):
        whole_text(stored, 103)


def test_the_digest_is_the_same_everywhere() -> None:
    """Nodes of a cluster compare digests, so no release changes one unseen."""
    with store("text") as context:
        assert digest_of(context).hex() == "2dd9e1303991bb46ed054409961b01207718808cd75b663db670fbc33cc9e247"


def test_form_and_names_count() -> None:
    """A text, a list of it and dicts of it by two names have different digests; another descriptor has the same."""
    with store("x" * 9_000) as text, text.another() as same:
        assert digest_of(text) == digest_of(same)
        with store({"a": text}) as a, store({"b": text}) as b, store(["x" * 9_000]) as listed:
            assert len({digest_of(each) for each in (text, a, b, listed)}) == 4
