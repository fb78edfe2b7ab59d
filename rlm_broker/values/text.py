"""Text in its forms: cut to a bound, without characters that steer a terminal, as a line, and as JSON."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NOTE = re.compile(r"\n\.\.\. \[([\d,]{1,20}) characters cut\] \.\.\.\n")
SHOWN_CHARS = 200
"""Characters of an answer in the `repr` of a run's outcome. A longer answer is cut, and its length is given."""


def printable(text: str, keep: str = "") -> str:
    """Return text in which characters that are not printable are escapes, except for the ones in `keep`.

    So text of models and of code can steer no terminal.

    Example:
        ```python
        print(printable("red \\x07"))
        ```
    """
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def encodable(text: str) -> str:
    """Return text in which lone surrogates, for which UTF-8 has no bytes, are visible escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shorten(text: str, most: int, *, end: int | None = None, gap: str = "\n") -> str:
    """Return a text of at most `most` characters, and a note of how many were cut. A shorter text is returned as it is.

    What was cut before counts again: the number of a former note in the cut part is added to the new one's.

    Example:
        ```python
        shorten("a" * 8 + "b" * 92, 8)  # 'aaaaaa\\n... [92 characters cut] ...\\nbb'
        ```

    Args:
        text: The text.
        most: Characters to keep.
        end: Characters of them at the text's end; None is a quarter.
        gap: Text before the note, and behind it if an end is kept.
    """
    if len(text) <= most:
        return text
    end = most // 4 if end is None else end
    cut = text[most - end : len(text) - end]
    before = [int(found[1].replace(",", "")) - len(found[0]) for found in _NOTE.finditer(cut)]
    head = f"{text[: most - end]}{gap}{cut_note(len(cut) + sum(before))}"
    return f"{head} ...{gap}{text[len(text) - end :]}" if end else head


def cut_note(chars: int) -> str:
    """Return the note that stands in the place of so many characters."""
    return f"... [{chars:,} characters cut]"


def clip(text: str, most: int) -> str:
    """Return a name or a sentence of at most `most` characters; three dots say that its end was cut."""
    return text if len(text) <= most else f"{text[:most]}..."


def label(text: str, most: int) -> str:
    """Return the beginning of a text as one line of at most `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return f"{line[:most]}..." if len(line) > most or len(text) > 4 * most else line


def summary_fields(run: Any) -> dict[str, Any]:
    """Return what the `repr` of a run's outcome has beside its answer: turns, cost and level."""
    cost = run.usage_summary.total.total_cost
    level = None if run.isolation is None else run.isolation.level
    cost = None if cost is None else round(cost, 6)
    return {"iterations": len(run.trajectory), "usage_summary.total_cost": cost, "isolation.level": level}


def described(**fields: Any) -> str:
    """Return fields as the `repr` of an object lists them. Texts of more than `SHOWN_CHARS` are cut."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def as_json(value: Any) -> str:
    """Return plain values as JSON text. Lone surrogates become escapes, because UTF-8 cannot encode them."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def jsonable(value: Any) -> Any:
    """Return `value` as values that JSON has.

    It has the outcomes of this package, for example a `Block` or a `Completion`. pydantic converts other classes; what
    it cannot convert becomes its `repr`. NaN and the infinities become None.

    Example:
        ```python
        import json

        with RLM("offline") as rlm:
            json.dumps(jsonable(rlm.completion("a\\nb", "How many lines?")))
        ```
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _key(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if as_values := getattr(value, "_jsonable_", None):  # of a class that knows its values better
            return as_values()
        return {each.name: jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
    from pydantic_core import to_jsonable_python  # 0.1 s, not needed by most results

    try:
        made = to_jsonable_python(value, bytes_mode="base64", fallback=_by_msgspec)
    except Exception:  # noqa: BLE001 - a serializer of the user's own class may raise any exception
        return repr(value)
    return repr(value) if made is value else jsonable(made)


def _key(key: Any) -> str:
    shown = jsonable(key)
    return shown if isinstance(shown, str) else json.dumps(shown)


def _by_msgspec(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else repr(value)


def _shown(value: Any) -> str:
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:SHOWN_CHARS]!r}... [{len(value):,} characters]"
    return repr(value)
