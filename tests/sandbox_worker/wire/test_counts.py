"""Counts of the values in JSON, without decoding it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker.wire import counts
from sandbox_worker.wire.counts import has_longer_number_than, has_more_objects_than, has_more_values_than
from tests.support.tables import table

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a,[{"\\'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(',"{'), inner, max_size=4),
    max_leaves=30,
)


def values_of(plain: Any) -> int:
    """Yield all values in plain data, containers included."""
    if isinstance(plain, dict):
        return 1 + sum(map(values_of, plain.values()))
    return 1 + sum(map(values_of, plain)) if isinstance(plain, list) else 1


@given(PLAIN)
def test_count_is_never_below_the_true_number_of_values(plain: Any) -> None:
    true = values_of(plain)
    payload = json.dumps(plain).encode()
    assert not has_more_values_than(2 * true, payload)
    assert has_more_values_than(true - 1, payload)


@table(
    "payload, values",
    [(b"[" + b"[]," * 1000 + b"1]", 1000), (b"[" + b'"",' * 1000 + b"1]", 1000), (b"{" + b'"":1,' * 1000 + b"}", 1000)],
)
def test_many_values_are_found(payload: bytes, values: int) -> None:
    assert has_more_values_than(values // 2, payload)
    assert not has_more_values_than(4 * values, payload)


@table("text", ["a, b, [c], {d}" * 1000, '\\", ' * 1000, '"' * 1000])
def test_text_full_of_commas_is_one_value(text: str) -> None:
    assert not has_more_values_than(4, json.dumps([text]).encode())


def test_objects_are_counted_outside_of_texts() -> None:
    payload = json.dumps(["{{{", {}, {"{": [{}]}]).encode()
    assert has_more_objects_than(2, payload)
    assert not has_more_objects_than(3, payload)


@table(
    "payload, is_longer",
    [
        (b"[1234, 5678.9012e1234]", False),
        (b'{"12345": "1234567890"}', False),
        (b'{"12345": [1, -98765]}', True),
        (b'["12345", 0.00000]', True),
        (b'["12345', False),
    ],
)
def test_long_numbers_are_found_outside_of_texts(payload: bytes, is_longer: bool) -> None:
    assert has_longer_number_than(4, payload) is is_longer


@given(PLAIN, st.integers(1, 9))
def test_slices_do_not_change_the_count(plain: Any, size: int) -> None:
    """A slice may end within a string, an escape or a character."""
    payload = json.dumps(plain, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "SLICE_BYTES", size)
        sliced = [has_more_values_than(most, payload) for most in range(20)]
    assert sliced == [has_more_values_than(most, payload) for most in range(20)]
