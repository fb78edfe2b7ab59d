"""The entries of a folder that .gitignore files exclude."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec, Pattern

from rlm_broker.context.found import FileUnfit, FoundFile, printable
from rlm_broker.context.opening import open_regular

_MAX_GITIGNORE_BYTES: Final = 1 << 20
"""Bytes of a .gitignore that are read; the rest is ignored."""


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
            path = "/".join(parts[depth:])
            for rule in rules:
                if rule.means(path, is_folder):
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

    pathspec only translates the line, since it differs from git in two ways. Asked about a whole file, it lets some
    lines win over later ones. And it takes a line about a folder to be about all entries below it, so that `!*/` after
    `*` would not bring folders back.
    """

    excludes: bool
    only_folders: bool
    pattern: Pattern

    def means(self, path: str, is_folder: bool) -> bool:
        """Whether the line is about the entry at `path` itself, not only about a folder above it."""
        if self.only_folders and not is_folder:
            return False
        result = self.pattern.match_file(path)
        # The pattern's one named group has matched if a "/" follows: then the line is about a folder above the entry.
        return result is not None and not any(result.match.groupdict().values())


_Rules = tuple[tuple[int, list[_Rule]], ...]
"""Depth of each .gitignore in force, and its lines from the last to the first; the nearest file comes first."""


def _read_gitignore(path: Path) -> list[_Rule]:
    try:
        fd, _ = open_regular(FoundFile(".gitignore", printable(path), str(path)))
    except FileUnfit:
        return []
    with open(fd, "rb") as file:
        text = file.read(_MAX_GITIGNORE_BYTES).decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    return [rule for line in reversed(text.split("\n")) for rule in _rules_in(line.rstrip("\r"))]


def _rules_in(line: str) -> list[_Rule]:
    bare = line.rstrip(" ").rstrip("/")
    only_folders = line.rstrip(" ") != bare
    try:
        patterns = GitIgnoreSpec.from_lines([bare if only_folders else line]).patterns
    except ValueError:  # not a valid pattern: git ignores the line, too
        return []
    return [_Rule(pattern.include, only_folders, pattern) for pattern in patterns if pattern.include is not None]
