"""Events as rows for the page: short values, and the places of their texts in one stream of bytes."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from rlm_broker.events.trace import MOST_DEPTH
from rlm_broker.values.text import encodable, label

LABEL_CHARS = 140
"""Characters of a text's beginning in a row, as a label in lists."""
WORD_CHARS = 200
"""Characters of a short text, for example a model's name; a longer one is cut."""
MOST_NAMED_TEXTS = 1 << 20
"""Number of different texts to recognise when they come again."""
MOST_UNKNOWN = 20
"""Unknown kinds of events with a count each; further ones are ignored."""
MOST_NUMBER = 2**53
"""Magnitude of a number in a row. A larger one becomes null: the page could not hold it exactly."""
_RUN = re.compile(r"\d{1,9}(\.\d{1,9}){0,1000}")

Row = tuple[str, int | float | None, int | float | None, str, str, dict[str, Any]]
"""Kind, number, Unix time, tree and run of an event, and its fields. A text is its offset and its length in bytes."""


_Field = tuple[str, tuple[str, ...], bool]
"""Name of a field in a row, the path to it in an event, and whether its beginning may be the event's label."""


def _fields(
    texts: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
) -> tuple[tuple[_Field, ...], ...]:
    """Return the numbers, words and texts of one kind of event. A dot leads to a field within a field.

    Args:
        texts: Texts of any length.
        numbers: Numbers.
        words: Texts of at most `WORD_CHARS`.
        label: Texts for the event's label: the beginning of the first one with content.
    """

    def named(paths: tuple[str, ...]) -> tuple[_Field, ...]:
        return tuple((path.rpartition(".")[2], tuple(path.split(".")), path in label) for path in paths)

    return named(numbers), named(words), named(texts)


_USAGE = ("usage.total_input_tokens", "usage.total_output_tokens", "usage.total_cost", "usage.stored_calls")
_FIELDS = {
    "run_started": _fields(
        ("question", "metadata"), ("block", "depth", "after_turn"), ("model", "branch_of"), ("question",)
    ),
    "repl_ready": _fields(("isolation.layers",), ("duration_s",), ("isolation.level",)),
    "iteration_started": _fields(numbers=("number",)),
    "replied": _fields(("text", "not_run"), ("number",), (), ("text",)),
    "block_started": _fields(("code",), ("iteration", "block"), (), ("code",)),
    "block_printed": _fields(("text",), ("block",), ("stream",)),
    "block_ended": _fields(
        (
            *("outcome.stdout", "outcome.stderr", "outcome.error", "outcome.final_answer", "outcome.draft"),
            *("outcome.post_mortem.where", "outcome.post_mortem.stack", "displays"),
        ),
        (
            *("block", "outcome.execution_time", "outcome.exit_code", "outcome.displays_omitted"),
            "outcome.blocks_undone",
        ),
        ("outcome.status", "outcome.limit"),
        ("outcome.error", "outcome.final_answer"),
    ),
    "call_started": _fields(
        ("prompt", "system"), ("call", "block", "batch", "of", "depth"), ("requested_model",), ("prompt",)
    ),
    "call_text": _fields(("text",), ("call",)),
    "call_retried": _fields(("reason",), ("call", "attempt", "wait_s")),
    "call_ended": _fields(
        ("response", "error"),
        ("call", "duration_s", "depth", *_USAGE),
        ("model", "is_remembered"),
        ("error", "response"),
    ),
    "tool_started": _fields(("arguments",), ("call", "block"), ("tool",), ("arguments",)),
    "tool_ended": _fields(("result", "error"), ("call", "duration_s"), ("tool",), ("error", "result")),
    "run_ended": _fields(
        ("response", "error", "partial_answer"),
        ("iterations", "duration_s", "cost_usd"),
        ("kind", "limit"),
        ("response", "error", "partial_answer"),
    ),
    "events_missed": _fields(numbers=("count",)),
}


class Rows:
    """Makes rows of events, and gathers their texts, equal ones once.

    Attributes:
        unknown: Kinds of events without a row, since this release does not know them, with the number of each.
        end: Bytes of all texts so far.
    """

    def __init__(self) -> None:
        self.unknown: dict[str, int] = {}
        self.end = 0
        self._fresh: list[bytes] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def take(self, event: dict[str, Any]) -> Row | None:
        """Return the row of an event; None for an unknown kind.

        Args:
            event: A line of a trace, as plain values. It may be hostile.

        Raises:
            ValueError: It is not an event of a run.
        """
        name, run, depth = str(event.get("event"))[:WORD_CHARS], event.get("run"), event.get("depth")
        if not (isinstance(run, str) and _RUN.fullmatch(run) and isinstance(depth, int) and 0 <= depth <= MOST_DEPTH):
            raise ValueError(f"the event {name:.40} is of no run")
        if name not in _FIELDS:
            if name in self.unknown or len(self.unknown) < MOST_UNKNOWN:
                self.unknown[name] = self.unknown.get(name, 0) + 1
            return None
        tree = encodable(_text(event.get("tree"))[:WORD_CHARS])
        return name, _number(event.get("n")), _number(event.get("time")), tree, run, self._fields_of(name, event)

    def _fields_of(self, name: str, event: dict[str, Any]) -> dict[str, Any]:
        numbers, words, texts = _FIELDS[name]
        fields: dict[str, Any] = {}
        for key, path, _ in numbers:
            if (number := _number(_at(event, path))) is not None:
                fields[key] = number
        for key, path, _ in words:
            if word := _text(_at(event, path)):
                fields[key] = encodable(word[:WORD_CHARS])
        for key, path, is_label in texts:
            if text := _text(_at(event, path)):
                fields[key] = self._place(text)
                if is_label and "label" not in fields:
                    fields["label"] = _label(text)
        return fields

    def fresh(self) -> bytes:
        """Return the texts since the last call, as UTF-8 without gaps, and forget them."""
        fresh, self._fresh = b"".join(self._fresh), []
        return fresh

    def _place(self, text: str) -> tuple[int, int]:
        name = (hash(text), len(text))  # Python's hash of a text has a secret key, so no trace can make two equal
        place = self._places.get(name)
        if place is None:
            data = encodable(text).encode()
            place = (self.end, len(data))
            self._fresh.append(data)
            self.end += len(data)
            if len(self._places) < MOST_NAMED_TEXTS:
                self._places[name] = place
        return place


def encoded(rows: Iterable[Row]) -> bytes:
    """Return rows as a JSON list."""
    return msgspec.json.encode(list(rows))


def _at(event: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = event
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> int | float | None:
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return value if -MOST_NUMBER < value < MOST_NUMBER else None
    return None


def _text(value: Any) -> str:
    """Return a field as text: a conversation with its roles, other values as JSON; empty for none and for false."""
    if isinstance(value, str):
        return value
    if value is None or value is False or value in ([], {}):
        return ""
    if isinstance(value, list) and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value):
        return "\n\n".join(f"[{_text(each['role'])}]\n{_text(each['content'])}" for each in value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    return json.dumps(value, ensure_ascii=False, indent=1)


def _label(text: str) -> str:
    """Return the beginning of a text as one line."""
    return encodable(label(text, LABEL_CHARS))
