"""The self-test of mapped strings: it notices every difference of the interpreter's strings, and survives its crash."""

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from sandbox_worker.loading import context, self_test, strings
from sandbox_worker.loading.self_test import mapping_works


@pytest.fixture(autouse=True)
def _children_crash_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork

    def quiet() -> int:
        child = fork()
        if not child:
            faulthandler.disable()  # pytest's would print an error for the crashes that these tests cause
        return child

    monkeypatch.setattr(os, "fork", quiet)


@pytest.fixture(autouse=True)
def _models_are_read_anew() -> Iterator[None]:
    strings._model.cache_clear()
    yield
    strings._model.cache_clear()


def test_this_interpreter_can_map_texts() -> None:
    assert mapping_works()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_LENGTH", strings._HASH),
        ("_HASH", strings._LENGTH),
        ("_TYPE", strings._LENGTH),
        ("_HEAD_BYTES", 32),
        ("_NO_HASH", 0),
        # 3.14 makes a string immortal again if its state says that it is statically allocated.
        *([("_NEVER_FREED", 0)] if sys.version_info < (3, 14) else []),
    ],
)
def test_interpreter_with_other_header_does_not_map(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(strings, name, value)
    assert not mapping_works()


def test_headers_not_fully_understood_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that differ in more fields than were understood are no model."""
    read = strings._read
    assert strings.models_are_known()
    strings._model.cache_clear()

    def unlike(kind: int, length: int) -> strings._Model:
        model = read(kind, length)
        model.words[4] += length
        return model

    monkeypatch.setattr(strings, "_read", unlike)
    assert not strings.models_are_known()
    assert not mapping_works()


def test_header_with_missing_field_fails_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    read = strings._read
    for field in ("lengths_at", "pointers_at"):
        strings._model.cache_clear()

        def less(kind: int, length: int, field: str = field) -> strings._Model:
            model = read(kind, length)
            fields = {"lengths_at": model.lengths_at, "pointers_at": model.pointers_at}
            fields[field] = fields[field][:-1]
            return strings._Model(model.words, **fields)

        monkeypatch.setattr(strings, "_read", less)
        assert not mapping_works()


def test_self_test_crash_leaves_its_parent_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_survive_mapping", lambda _texts: os.kill(os.getpid(), signal.SIGKILL))
    assert not mapping_works()
    monkeypatch.setattr(self_test, "_survive_mapping", lambda _texts: 1 / 0)
    assert not mapping_works()
    monkeypatch.setattr(self_test, "_survive_mapping", lambda texts: texts == {})
    assert not mapping_works()


def test_self_test_notices_each_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    load = context.load
    known = dict(self_test._known_texts())
    assert {self_test._kind_of(text) for text in known.values()} == {0, 1, 2, 4}
    for wrong in ("x", "", "1000 times"):
        for name in known:

            def differs(*arguments: object, name: str = name, wrong: str = wrong, **named: object) -> object:
                return {**load(*arguments, **named), name: wrong}  # type: ignore[arg-type]

            monkeypatch.setattr(self_test, "load", differs)
            assert (known[name] == wrong) == self_test._survive_mapping(known)
