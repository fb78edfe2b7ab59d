"""Regular expressions mean the same to each supported CPython.

CPython before 3.11.5 has two faults in a repetition of a possessive group that fails: the group's captures are lost,
and the position stays where a lookahead or a repetition within it has left it. Tests on a later CPython do not see it.
"""

import importlib
import re
import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.places import PROJECT

ONE_CHAR = (parser.LITERAL, parser.NOT_LITERAL, parser.IN, parser.ANY)
POSSESSIVE_GROUP = re.compile(r"\)(?:[*+?]|\{+\d*,?\d*\}+)\+")


def modules() -> list[str]:
    """Return the modules whose source may have a possessive group."""
    paths = [path for package in ("rlm_broker", "sandbox_worker") for path in (PROJECT / package).rglob("*.py")]
    found = [path for path in paths if POSSESSIVE_GROUP.search(path.read_text())]
    return sorted(".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in found)


def patterns(module: str) -> Iterator[tuple[str, str | bytes, int]]:
    """Yield name, text and flags of the module's patterns; for rules of redaction, the mark is the name."""
    for name, value in vars(importlib.import_module(module)).items():
        if isinstance(value, re.Pattern):
            yield f"{module}.{name}", value.pattern, value.flags
    for rule in getattr(importlib.import_module(module), "RULES", ()):
        yield f"{module} {rule.mark}", rule.pattern, 0


def groups(parsed: Any) -> Iterator[Any]:
    """Yield the contents of all possessive groups, at any depth."""
    for op, value in parsed:
        inner = [each for each in (value if isinstance(value, tuple | list) else [value]) if _is_sequence(each)]
        inner += value[1] if op is parser.BRANCH else []
        if op is parser.POSSESSIVE_REPEAT and not _is_one_char(value[2]):
            yield value[2]
        for each in inner:
            yield from groups(each)


def goes_back(sequence: Any) -> bool:
    """Whether a failure within the sequence leaves the position where the sequence began, also before 3.11.5.

    Plain characters do. Behind a repetition or an alternative, only what cannot fail does.
    """
    moved = False
    for place, (op, value) in enumerate(sequence):
        if op in ONE_CHAR:
            fits = not moved
        elif op is parser.POSSESSIVE_REPEAT:
            fits = value[0] == 0 or (place == 0 and (_is_one_char(value[2]) or goes_back(value[2])))
            moved = moved or place > 0 or not _is_one_char(value[2])
        else:
            fits = op is parser.BRANCH and place == 0 and all(map(goes_back, value[1]))
            moved = True
        if not fits:
            return False
    return True


def _is_sequence(value: Any) -> bool:
    return isinstance(value, parser.SubPattern)


def _is_one_char(sequence: Any) -> bool:
    return len(sequence) == 1 and sequence[0][0] in ONE_CHAR


@pytest.mark.parametrize("module", modules())
def test_possessive_groups_mean_the_same_before_3_11_5(module: str) -> None:
    found = [
        name
        for name, text, flags in patterns(module)
        for group in groups(parser.parse(text, flags & ~re.UNICODE if isinstance(text, bytes) else flags))
        if not goes_back(group)
    ]
    assert found == [], "write (?>(?:...)*), or an order in which only the first character can fail"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("(?:ab?c)++", "aca"), (r"(?:[^-]|-(?!----))*+", "a-----"), (r"(?:\.[a-z]++)++", ".a."), ("(?:(a)|b)*+", "ab")],
)
def test_faults_of_3_11_2_are_recognized(pattern: str, text: str) -> None:
    """Patterns that CPython 3.11.2 matches otherwise are recognized, and atomic forms of them are not."""
    assert not all(map(goes_back, groups(parser.parse(pattern))))
    atomic = re.compile(f"(?>{pattern[:-1]})")
    assert not list(groups(parser.parse(atomic.pattern)))
    assert atomic.match(text)
