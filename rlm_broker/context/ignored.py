"""The entries of a folder that .gitignore files exclude."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlm_broker.context.found import FileUnfit, FoundFile, printable
from rlm_broker.context.globs import Glob, git_glob, matches
from rlm_broker.context.opening import open_regular

_MAX_GITIGNORE_BYTES: Final = 1 << 20
"""Bytes of a .gitignore that are read; the rest is ignored."""
_WITHOUT_SPACES_AT_ITS_END: Final = re.compile(r"(?:[^ \\]|\\.?| +(?=[^ ]))*")
"""A line of a .gitignore as git takes it. A space behind a backslash stays."""


class Ignored:
    """Rules of the .gitignore files of a folder, of all folders below it, and of the repository around it.

    Args:
        root: Real path of the folder. If the repository excludes this folder itself, the repository's rules do not
            count, since the user has named the folder.
    """

    def __init__(self, root: Path) -> None:
        self._rules: dict[tuple[str, ...], _Rules] = {}
        self._above: tuple[str, ...] = ()
        self._top = next((folder for folder in (root, *root.parents) if os.path.lexists(folder / ".git")), root)
        above = root.relative_to(self._top).parts
        if any(self.is_excluded(above[:end], is_folder=True) for end in range(1, len(above) + 1)):
            self._top, self._rules = root, {}
        else:
            self._above = above

    def is_excluded(self, parts: tuple[str, ...], is_folder: bool) -> bool:
        """Whether the entry at `parts` below the folder is excluded. The caller has asked about its parents, which are
        not."""
        parts = (*self._above, *parts)
        for depth, rules in self._rules_in_force(parts[:-1]):
            below = parts[depth:]
            for rule in rules:
                if (is_folder or not rule.only_folders) and matches(below, rule.glob):
                    return rule.excludes
        return False

    def _rules_in_force(self, folder: tuple[str, ...]) -> "_Rules":
        if folder not in self._rules:
            around = self._rules_in_force(folder[:-1]) if folder else ()
            own = _read_gitignore(self._top.joinpath(*folder, ".gitignore"))
            self._rules[folder] = ((len(folder), own), *around) if own else around
        return self._rules[folder]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line of a .gitignore. As in git, the last line that is about an entry decides, in the file nearest to it.

    A line about a folder is not about the entries below it, so that `!*/` after `*` brings folders back.
    """

    excludes: bool
    only_folders: bool
    glob: Glob


_Rules = tuple[tuple[int, list[_Rule]], ...]
"""Depth of each .gitignore in force, and its lines from the last to the first; the nearest file comes first."""


def _read_gitignore(path: Path) -> list[_Rule]:
    try:
        fd, _ = open_regular(FoundFile(".gitignore", printable(path), str(path)))
    except FileUnfit:
        return []
    with open(fd, "rb") as file:
        text = file.read(_MAX_GITIGNORE_BYTES).decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    rules = (_rule_in(line.removesuffix("\r")) for line in reversed(text.split("\n")))
    return [rule for rule in rules if rule is not None]


def _rule_in(line: str) -> _Rule | None:
    """Return the rule of a line, or None for a comment, and for what matches no path."""
    if line.startswith("#") or (kept := _WITHOUT_SPACES_AT_ITS_END.match(line)) is None:
        return None
    pattern = kept[0].removeprefix("!")
    glob = git_glob(pattern.removesuffix("/"))
    return None if glob is None else _Rule(pattern == kept[0], pattern.endswith("/"), glob)
