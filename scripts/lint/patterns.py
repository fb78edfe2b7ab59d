"""Regular expressions mean the same to each supported CPython.

CPython before 3.11.5 has two faults in a repetition of a possessive group that fails: the group's captures are lost,
and the position stays where a lookahead or a repetition within it has left it. Tests on a later CPython do not see it.
"""

import importlib
import re
import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
from collections.abc import Iterator
from typing import Any

from scripts.lint.project import Finding, Project

ONE_CHAR = (parser.LITERAL, parser.NOT_LITERAL, parser.IN, parser.ANY)
POSSESSIVE_GROUP = re.compile(r"\)(?:[*+?]|\{+\d*,?\d*\}+)\+")


def rules(project: Project) -> Iterator[Finding]:
    """Yield patterns that CPython before 3.11.5 matches otherwise, of the modules that may have a possessive group."""
    for module, source in project.modules.items():
        if POSSESSIVE_GROUP.search(source.text):
            for name, text, flags in patterns(importlib.import_module(module)):
                parsed = parser.parse(text, flags & ~re.UNICODE if isinstance(text, bytes) else flags)
                if not all(map(goes_back, groups(parsed))):
                    yield Finding(source.path, 1, f"{name}: write (?>(?:...)*), or let only the first character fail")


def patterns(module: Any) -> Iterator[tuple[str, str | bytes, int]]:
    """Yield name, text and flags of the module's patterns; for rules of redaction, the mark is the name."""
    for name, value in vars(module).items():
        if isinstance(value, re.Pattern):
            yield f"{module.__name__}.{name}", value.pattern, value.flags
    for rule in getattr(module, "RULES", ()):
        yield f"{module.__name__} {rule.mark}", rule.pattern, 0


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
    """Return whether a failure within the sequence leaves the position where the sequence began, also before 3.11.5.

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
