"""Globs: git's meaning of a line of a .gitignore, and the steps that a match may take."""

import re
import re._parser as parser  # type: ignore[import-not-found, unused-ignore]
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.files import Ignored, git_glob, matches, may_hold, shell_glob

REPEATS = (parser.MAX_REPEAT, parser.MIN_REPEAT)
LINES = (
    *("a", "/a", "a/", "/a/", "a//", "//a", "/", "a/b", "/a/b", "a/b/", "*", "/*", "*/", "*.c", "a*", "?", "??", "a?c"),
    *("**", "**/", "/**", "***", "**/b", "a/**", "a/**/", "a/**/b", "**/a/**", "a/***/b"),
    *("*/b", "*/**/b", "a**", "**b"),
    *("[ab]", "[!a]", "[^a]", "[a-c]", "[c-a]", "[]]", "[]-a]", "[!]a-]", "[a-]", "[-a]", "[\\]]", "[\\a-c]", "[a/b]"),
    *("[[:alpha:]]", "[![:alpha:]]", "[[:digit:][:punct:]]", "[[:foo:]]", "[[:alpha:]-b]", "[[:x]", "[a-c-e]", "[b"),
    *("\\*", "\\a", "\\\\", "\\#", "\\!", "#", "!", "!a", "a\\", "a\\/b", "a ", "a  ", "a\\ ", "a\\\\ ", " a", "a b"),
    *("*a*b*c", "*[!b]*c", "**/*c", "(a|b)", "a.c", "+", "{a,b}", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 3),
)
FOLDERS = ("a", "a/b", "b", "b/a", "ab", "a/x")
FILES = (
    *("c", "a/c", "a/b/a", "a/b/c", "a/x/b", "b/a/b", "b/c", "ab/b", "a.c", "abc", "aXbYc"),
    *("]", "-", "!", "#", "*", "\\"),
    *("a ", " a", "a b", "e", "1", "[b", "z", "+", "(a|b)", "{a,b}", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 3),
)


@pytest.mark.skipif(shutil.which("git") is None, reason="git says what is right")
def test_lines_of_a_gitignore_mean_what_they_mean_to_git(tmp_path: Path) -> None:
    """Each line is the .gitignore of a folder, after `*` and `!*/` if it is taken back there."""
    asked = []
    for number, line in enumerate((*LINES, *(f"*\n!*/\n!{line}" for line in LINES))):
        folder = tmp_path / str(number)
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).touch()
        (folder / ".gitignore").write_text(f"{line}\n")
        asked += [(number, line, name) for name in (*FOLDERS, *FILES)]
    git = ["git", "-C", str(tmp_path), "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    paths = "\0".join(f"{number}/{name}" for number, _, name in asked)
    told = subprocess.run(
        [*git, "check-ignore", "-z", "--stdin"], input=paths.encode(), check=True, capture_output=True
    )
    excluded = set(told.stdout.decode().split("\0"))
    ignored = Ignored(tmp_path)
    for number, line, name in asked:
        parts = (str(number), *name.split("/"))
        found = any(
            ignored.is_excluded(parts[:end], end < len(parts) or name in FOLDERS) for end in range(1, len(parts) + 1)
        )
        assert found == (f"{number}/{name}" in excluded), (line, name)


@pytest.mark.parametrize("unit", ["*a", "a*", "*?a", "*[ac]", "*a?*"])
def test_a_part_is_matched_without_going_back(unit: str) -> None:
    """Only one repetition of an expression may try another length. With n of them, a match may take len(name)**n steps.

    Eight of `*a` took minutes with a name of 200 letters.
    """
    for glob in (git_glob(unit * 80), shell_glob([unit * 80])):
        assert glob is not None
        expression = glob[-1]
        assert expression is not None
        assert len(list(going_back(parser.parse(expression.pattern)))) <= 1
        assert matches(["a" * 200], glob)
        assert not matches(["b" + "a" * 78 + "b"], glob)


def going_back(parsed: Any) -> Iterator[Any]:
    """Yield the repetitions of an expression that no atomic group encloses."""
    for op, value in parsed:
        if op in REPEATS:
            yield value
        if op is not parser.ATOMIC_GROUP:
            for each in value if isinstance(value, tuple | list) else [value]:
                if isinstance(each, parser.SubPattern):
                    yield from going_back(each)


class Counting:
    """An expression that counts the names that it is compared with."""

    compared = 0

    def __init__(self, expression: "re.Pattern[str]") -> None:
        self._expression = expression

    def fullmatch(self, name: str) -> object:
        Counting.compared += 1
        return self._expression.fullmatch(name)


@pytest.mark.parametrize("unit", ["**", "**/*", "**/a", "*/**/**"])
def test_each_part_of_a_glob_is_compared_once_with_each_part_of_a_path(unit: str) -> None:
    parts = ["a"] * 20
    for times in (1, 9):
        for last, is_right in (("a", True), ("[!b]", True), ("b", False)):
            texts = [*unit.split("/") * times, "**", last]
            glob: Any = [part if part is None else Counting(part) for part in shell_glob(texts)]
            Counting.compared = 0
            assert matches(parts, glob) == is_right
            assert may_hold(parts, glob)
            assert Counting.compared <= (len(parts) + 2) * len(texts)
            assert matches([*parts, "b", "a"], shell_glob([*texts[:-1], "b", "**", "a"]))


def test_path_with_fewer_parts_than_a_glob_is_compared_with_none_of_them() -> None:
    glob: Any = [None if part is None else Counting(part) for part in shell_glob(["**", "a"] * 20)]
    Counting.compared = 0
    assert not matches(["a"] * 19, glob)
    assert Counting.compared == 0
