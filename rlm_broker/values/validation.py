"""Sentences on wrong values and unknown names, for models and for users."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rlm_broker.values.text import clip

if TYPE_CHECKING:
    import pydantic

MOST = 10
"""Mistakes named in one sentence; further ones are left out, because a long list may be wrong in each of its places."""

MOST_MESSAGE_CHARS = 2_000
"""Characters of a message of pydantic: it may have a value of the client's in it."""

MANY = 1_000
"""Mistakes to describe; of more, only the number is given: pydantic describes all at once, at 4 microseconds each."""


MOST_PLACE_CHARS = 200
"""Characters of the place of a mistake; a longer place is cut, because a client may have chosen its names."""

MOST_LISTED = 45
"""Known names that a sentence lists, at most."""
MOST_NAME_CHARS = 100
"""Characters of an unknown name in a sentence. A longer name is cut, and compared with no other: a client may have sent
megabytes, which `difflib` compares letter by letter."""

_SAID: Final[Mapping[str, str]] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be text",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must be of the form {pattern}",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""Kind of pydantic's mistake -> what a setting or a field of a request must be. Answers of models get its own words."""


class Unfit(ValueError):
    """A value does not fit its schema or its type; the message names each wrong place."""


def complaints(error: "pydantic.ValidationError", whole: str, what: str = "field") -> str:
    """Return each place and what is wrong with it, as one line. `whole` stands for the value itself, for example "it",
    and `what` for a named part of it, for example "argument"."""
    if is_many(error):
        return f"{whole}: {_told_many(error)}"
    found = error.errors(include_url=False)[:MOST]
    told = []
    for item in found:
        place = _place(item["loc"])
        told.append(
            _in_words(item["type"], item.get("ctx", {}), place, what)
            or f"{place or whole}: {item['msg'][:MOST_MESSAGE_CHARS]}"
        )
    return "; ".join(told)


def first_complaint(
    error: "pydantic.ValidationError", whole: str, what: str = "field", within: str = "", known: Iterable[str] = ()
) -> tuple[str, str]:
    """Return the place of the first mistake, and a sentence on it. The place is empty for the value itself. Values are
    not reported, because they may be secrets.

    Args:
        whole: Words standing for the value itself, for example "the body".
        what: Word for a named part of the value, for example "setting".
        within: Place of the value in a larger one, for example "serve".
        known: Names of the parts, to compare with an unknown one.
    """
    if is_many(error):
        return within, f"{within or whole}: {_told_many(error)}"
    item = error.errors(include_url=False, include_input=False)[0]
    place = _place((*([within] if within else []), *item["loc"]))
    said = _in_words(item["type"], item.get("ctx", {}), place, what)
    if said is None:
        name = shown(place) if place else whole
        message = _SAID.get(item["type"], "").format_map(item.get("ctx", {})) or item["msg"]
        message = message[:1].lower() + message[1:MOST_MESSAGE_CHARS]
        said = f"{name} {message}" if message.startswith("must ") else f"{name}: {message}"
    elif item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
        said += did_you_mean(str(item["loc"][0]), known)
    return place, said


def is_many(error: "pydantic.ValidationError") -> bool:
    """Whether an error has so many mistakes that they are not reported one by one."""
    return error.error_count() > MANY


def _told_many(error: "pydantic.ValidationError") -> str:
    return f"{error.error_count():,} values are not of the type that is wanted"


def _place(parts: Iterable[int | str]) -> str:
    return ".".join(str(part)[:MOST_PLACE_CHARS] for part in parts)[:MOST_PLACE_CHARS]


def _in_words(kind: str, bounds: Mapping[str, Any], place: str, what: str) -> str | None:
    """Return a sentence on a mistake that pydantic tells in words of its own; None for all others."""
    match kind:
        case "extra_forbidden":
            return f"there is no {what} {place!r}"
        case "missing":
            return f"{shown(place)} is missing"
        case "too_short" if place:
            least = bounds["min_length"]
            return f"{shown(place)} must have at least {least} item{'' if least == 1 else 's'}"
        case "model_type" | "model_attributes_type" | "dict_type" if place:
            return f"{shown(place)} must be an object"
    return None


def shown(name: str) -> str:
    """Return a name unchanged, or quoted with escapes if it has characters that could steer a terminal."""
    return name if name.isprintable() else repr(name)


def quoted(name: str) -> str:
    """Return a name in quotes and with escapes, cut after `MOST_NAME_CHARS`."""
    return repr(clip(name, MOST_NAME_CHARS))


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """Return a sentence about an unknown name, with the known name most like it, or all known names."""
    return f"there is no {what} {quoted(name)}{suggestion(name, known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the known name most like it, or all known names.

    More names than `MOST_LISTED` are left out.
    """
    close = did_you_mean(name, known := list(known))
    return close or (f"; there are: {', '.join(known)}" if len(known) <= MOST_LISTED else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the known name most like it, or an empty text."""
    if len(name) > MOST_NAME_CHARS:
        return ""
    import difflib

    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
