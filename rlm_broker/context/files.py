"""The files of a path, a folder or a glob: the rules of .gitignore, of globs and of likely secrets.

Theory of operation of globs. A stranger's .gitignore may have any number of wildcards in a line, so no pattern may go
back and forth. A table over the parts finds what `**` stands for. Within a part, the first place behind a `*` at which
the text up to the next `*` fits is as good as each later one, so an atomic group keeps to it, as in the expressions of
`fnmatch`. Comparing a part with a name takes at most the product of their lengths.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rlm_broker.context.found_files import MAX_PATH_CHARS, FileUnfit, FoundFile, LeftOut, open_regular, printable
from rlm_broker.errors import ContextRefused

Glob = Sequence["re.Pattern[str] | None"]
"""One expression for each part. None stands for `**`, any number of parts, and never follows itself."""

_IN_SET: Final = r"(?: \\. | \[:[^\]]{0,9}:\] | (?!\[:[^\]]{0,9}:\])[^\\\]] )"
_GIT_TOKEN: Final = rf"""(?sx)
      \\?(?P<slash>/)
    | (?P<stars>\*+)
    | (?P<any>\?)
    | \[(?P<negated>[!^]?)(?P<set>(?:\] | {_IN_SET}){_IN_SET}*)\]
    | \\(?P<escaped>.)
    | (?P<plain>[^\\\[*?/]+)
    """
_GIT_SET: Final = re.compile(r"(?s)\[:(?P<name>[^\]]{0,9}):\]|\\?(?P<first>.)(?:-\\?(?P<last>.))?")
_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": " \\t-\\r",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def shell_glob(parts: Iterable[str]) -> Glob:
    """Return a glob in which `*`, `?` and `[...]` stay within one part, and a part `**` is any number of parts."""
    return _without_repeats([None if part == "**" else re.compile(translate(part)) for part in parts])


def git_glob(pattern: str) -> Glob | None:
    """Return the glob of a line of a .gitignore without `!` in front and `/` at the end; None if git matches no path
    with it.

    See "PATTERN FORMAT" of gitignore(5). Unlike git 2.39, `?` is one character and not one byte, and `ab**/c` does not
    match `ab/x/c`, as that page says.
    """
    parts: list[re.Pattern[str] | None] = [] if "/" in pattern else [None]
    try:
        for stars_alone, pieces in _git_parts(pattern.removeprefix("/")):
            parts.append(None if stars_alone and "/" in pattern else _expression(pieces))
    except ValueError:
        return None
    # `a/**` is about the entries below `a`, and not about `a` itself.
    return _without_repeats(parts if parts[-1] is not None else [*parts, _expression(["", ""])])


def matches(parts: Sequence[str], glob: Glob) -> bool:
    """Whether `glob` matches the path of `parts`, in at most `len(parts) * len(glob)` comparisons. `ends` has the
    numbers of parts that the first parts of the glob can match."""
    if len(glob) > 2 * len(parts) + 1 or (glob[-1] is not None and not glob[-1].fullmatch(parts[-1])):
        return False
    ends = {0}
    for wanted in glob:
        if wanted is None:
            ends = set(range(min(ends), len(parts) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(parts) and wanted.fullmatch(parts[end])}
        if not ends:
            return False
    return len(parts) in ends


def may_hold(folder: Sequence[str], glob: Glob) -> bool:
    """Whether an entry below `folder` can match. Without this check `*.txt` would walk the whole tree."""
    for part, wanted in zip(folder, glob, strict=False):
        if wanted is None:
            return True
        if not wanted.fullmatch(part):
            return False
    return len(folder) < len(glob)


def _without_repeats(parts: Sequence["re.Pattern[str] | None"]) -> Glob:
    return [*parts[:1], *(part for before, part in pairwise(parts) if part is not None or before is not None)]


def _expression(pieces: Sequence[str]) -> "re.Pattern[str]":
    """Return the expression of a part, with a `*` between each two of its pieces, expressions of fixed length."""
    first, *middle = pieces
    if not middle:
        return re.compile(first, re.DOTALL)
    last = middle.pop()
    return re.compile(f"{first}{''.join(f'(?>.*?{piece})' for piece in middle)}.*{last}", re.DOTALL)


def _git_parts(pattern: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield for each part whether it is of two or more `*` alone, and its pieces as for `_expression`. Raise ValueError
    for a bracket or backslash without its end, or a class of an unknown name."""
    tokens = re.compile(_GIT_TOKEN)  # `re` keeps it; most contexts have no .gitignore
    pieces, stars_alone, at = [""], False, 0
    while at < len(pattern):
        if (token := tokens.match(pattern, at)) is None:
            raise ValueError(pattern)
        if token["slash"]:
            yield stars_alone, pieces
            pieces = [""]
        elif token["stars"]:
            pieces.append("")
        elif token["any"]:
            pieces[-1] += "."
        elif token["set"]:
            pieces[-1] += _git_set(token["set"], bool(token["negated"]))
        else:
            pieces[-1] += re.escape(token["escaped"] or token["plain"])
        stars_alone = len(token["stars"] or "") > 1 and pieces == ["", ""]
        at = token.end()
    yield stars_alone, pieces


def _git_set(text: str, is_negated: bool) -> str:
    ranges = ""
    for found in _GIT_SET.finditer(text):
        name, first, last = found["name"], found["first"], found["last"]
        if name is not None:
            if name not in _CLASSES:
                raise ValueError(f"[:{name}:]")
            ranges += _CLASSES[name]
        else:  # to git, a range that ends before it begins is its first character
            ranges += re.escape(first) + (f"-{re.escape(last)}" if last is not None and last >= first else "")
    return f"[{'^' if is_negated else ''}{ranges}]"


# -- the rules of git ------------------------------------------------------------------------------------------------

_MAX_GITIGNORE_BYTES: Final = 1 << 20
"""Bytes read of a .gitignore; the rest is ignored."""
_WITHOUT_SPACES_AT_ITS_END: Final = re.compile(r"(?:[^ \\]|\\.?| +(?=[^ ]))*")
"""A line of a .gitignore as git takes it. A space behind a backslash stays."""


class Ignored:
    """Rules of the .gitignore files of a folder, of all folders below it, and of the repository around it.

    If the repository excludes this very folder, the repository's rules do not count, since the user has named the
    folder. `root` is its real path.
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


class _Rule(Struct, frozen=True):
    """A line of a .gitignore. As in git, the last line about an entry decides, in the file nearest to it. A line about
    a folder says nothing of the entries below it, so that `!*/` after `*` brings folders back."""

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


# -- what a path stands for ------------------------------------------------------------------------------------------

_WILDCARDS: Final = frozenset("*?[")
_EVERYTHING: Final = shell_glob(["**"])


def is_glob(path: Path) -> bool:
    """Whether `path` is a pattern: it has `*`, `?` or `[`, and no file has that very name."""
    return bool(_WILDCARDS & set(str(path))) and not os.path.lexists(path)


def _fixed_part(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the part of a path without wildcards, and the rest of it if it is a glob."""
    if not is_glob(path):
        return path, ()
    first = next(at for at, part in enumerate(path.parts) if _WILDCARDS & set(part))
    return Path(*path.parts[:first]), path.parts[first:]


def find_files(paths: Sequence[Path]) -> tuple[list[FoundFile], LeftOut]:
    """Return the files of `paths` (files, folders with all below them, globs), sorted by name, and what was left out.

    A name is the path below the folder, or below the part of a glob without a wildcard, or the last part of a file's
    path. Files of equal names are named by their paths as given. Each file is taken once.

    In folders and globs these are left out: files excluded by .gitignore files, likely secrets by their names, every
    entry named .git, and links to folders or to the outside. A link to a file inside counts as that file. An excluded
    folder counts once. In a glob, `*`, `?` and `[...]` stay within one part of the path, and a part `**` is any number
    of parts. Only files match.

    Raises:
        ContextRefused: One of them does not exist or cannot be read, or no file matches a glob.
    """
    skipped = LeftOut()
    by_real_path: dict[str, FoundFile] = {}
    for path in paths:
        for file in _files_of(path, skipped):
            real = os.path.realpath(file.path) if file.named else file.path  # a walk gives real paths already
            by_real_path.setdefault(real, file)
    names = _distinct_names(by_real_path)
    files = [replace(file, name=names[real]) for real, file in by_real_path.items()]
    return sorted(files, key=lambda file: file.name), skipped


def _files_of(path: Path, skipped: LeftOut) -> list[FoundFile]:
    base, pattern = _fixed_part(path)
    if pattern:
        if files := _walk(base, shell_glob(pattern), skipped) if stat.S_ISDIR(_mode(base)) else []:
            return files
        secret = f"; {skipped[SECRET]:,} left out: {SECRET}" if skipped[SECRET] else ""
        raise ContextRefused(f"{printable(path)} matches no file: check the pattern, and .gitignore{secret}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ContextRefused(f"{printable(path)} does not exist") from None
    except OSError as error:
        raise ContextRefused(f"{printable(path)} cannot be read: {error.strerror}") from error
    except ValueError:
        raise ContextRefused(f"{str(path)!a} cannot be read: no path has a zero byte in it") from None
    if stat.S_ISDIR(mode):
        return _walk(path, _EVERYTHING, skipped)
    return [FoundFile(printable(path.name), printable(path), str(path), named=True)]


def _distinct_names(by_real_path: dict[str, FoundFile]) -> dict[str, str]:
    """Return names by real path, no two of them equal: the first of relative, given and real name that no other file
    has, or else one with a number."""
    names = {real: file.name for real, file in by_real_path.items()}
    for longer in (lambda real: by_real_path[real].given, printable):
        times = Counter(names.values())
        names = {real: name if times[name] == 1 else longer(real) for real, name in names.items()}
    # Paths may still be equal as they are shown, for example b"\\xff" and b"\xff". No file may hide another.
    times = Counter(names.values())
    for real in [real for real, name in names.items() if times[name] > 1]:
        number = 1
        while times[name := f"{names[real]} ({number})"]:
            number += 1
        names[real] = name
        times[name] = 1
    return names


def _walk(root: Path, glob: Glob, skipped: LeftOut) -> list[FoundFile]:
    real_root = Path(os.path.realpath(root))
    ignored = Ignored(real_root)
    files: list[FoundFile] = []
    linked: list[FoundFile] = []
    waiting: list[tuple[str, ...]] = [()]
    while waiting:  # not by recursion: a tree may be deeper than Python's stack
        folder = waiting.pop()
        # The prefixes of all names in this folder. A path object for each file would take longer than reading it.
        below, given = "".join(f"{part}/" for part in folder), str(root.joinpath(*folder, "x"))[:-1]
        try:
            with os.scandir(real_root.joinpath(*folder)) as listing:
                entries = list(listing)
        except OSError:
            skipped.add("unreadable", printable(below or str(root)))
            continue
        for entry in entries:
            parts = (*folder, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git" or not (may_hold if is_folder else matches)(parts, glob):
                continue
            if ignored.is_excluded(parts, is_folder):
                skipped.add("ignored by .gitignore", printable(below + entry.name))
            elif is_secret(parts, is_folder=is_folder):
                skipped.add(SECRET, printable(below + entry.name))
            elif is_folder:
                waiting.append(parts)
            elif entry.is_symlink():
                linked += _linked(parts, root, real_root, ignored, skipped)
            elif entry.is_file():
                files.append(FoundFile(printable(below + entry.name), printable(given + entry.name), entry.path))
            else:
                skipped.add("not a regular file", printable(below + entry.name))
    return files + linked  # files first: if a link leads to one of them, the file's own name is kept


def _linked(parts: tuple[str, ...], root: Path, real_root: Path, ignored: Ignored, skipped: LeftOut) -> list[FoundFile]:
    """Return the file inside the folder to which the link at `parts` leads, if any. A folder inside is left out here,
    since the walk finds it under its own name."""
    name = "/".join(map(printable, parts))
    target = Path(os.path.realpath(real_root.joinpath(*parts)))
    if not target.is_relative_to(real_root):
        skipped.add("link to outside the folder", name)
        return []
    inside = target.relative_to(real_root).parts
    if ".git" in inside or any(
        ignored.is_excluded(inside[:end], end < len(inside)) for end in range(1, len(inside) + 1)
    ):
        skipped.add("ignored by .gitignore", name)
        return []
    if leads_to_secret(inside):
        skipped.add(SECRET, name)
        return []
    mode = _mode(target)
    if not stat.S_ISREG(mode):
        if not stat.S_ISDIR(mode):
            skipped.add("unreadable", name)
        return []
    return [FoundFile(name, printable(root.joinpath(*parts)), str(target))]


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0  # not the mode of any kind of file, so the caller leaves it out


# -- likely secrets --------------------------------------------------------------------------------------------------

SECRET: Final = "likely a secret: name the file itself to include it"
"""Reason for files left out since they likely hold secrets."""

FILES: Final = (
    # variables of programs and services
    *(".env", ".env.*", "*.env", ".envrc"),
    # keys and what holds them
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    # logins
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".npmrc", ".pypirc", ".dockercfg"),
    *("credentials", "credentials.json", "client_secret*.json", "service-account*.json", "service_account*.json"),
    *(".docker/config.json", ".kube/config", ".s3cfg", ".boto", ".vault-token"),
    # state of a tool, which may have any of these in it
    "*.tfstate",
)
"""Patterns of the end of a path: the name, or the folder and the name."""

FOLDERS: Final = (".ssh", ".aws", ".gnupg", ".azure", ".config/gcloud", ".config/gh", ".password-store")
"""Folders left out as a whole."""

HARMLESS: Final = (".env.example", ".env.sample", ".env.template", ".env.dist", "*.pub")
"""Exceptions to the patterns: examples without values, and public keys."""

_COPIES: Final = ("~", ".bak", ".backup", ".old", ".orig", ".save", ".swp", ".gz", ".bz2", ".xz", ".zst")
"""Endings of copies by tools, and of compressed files."""


def is_secret(parts: Sequence[str], *, is_folder: bool = False) -> bool:
    """Whether the entry at `parts` below a folder likely holds secrets, by its name alone, in upper or lower case, with
    and without the endings of copies. The caller has asked about the entry's parents."""
    tail = "/".join(parts[-2:]).lower()
    if is_folder:
        return _FOLDERS.search(tail) is not None
    original = tail
    while ending := next((each for each in _COPIES if original.endswith(each)), ""):
        original = original.removesuffix(ending)
    if _HARMLESS.search(original):
        return False
    return any(_FILES.search(each) for each in (tail, original))


def leads_to_secret(parts: Sequence[str]) -> bool:
    """Whether the file at `parts`, or a folder on the way to it, likely holds secrets."""
    folders = (parts[max(0, end - 2) : end] for end in range(1, len(parts)))
    return is_secret(parts) or any(is_secret(folder, is_folder=True) for folder in folders)


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a path with one of these ends. A `*` is any text within one part."""
    choices = (re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns)
    return re.compile(rf"(?:^|/)(?:{'|'.join(choices)})\Z")


_FILES: Final = _any_of(FILES)
_FOLDERS: Final = _any_of(FOLDERS)
_HARMLESS: Final = _any_of(HARMLESS)


# -- paths named by others than the user -----------------------------------------------------------------------------

_ANY_FILE: Final = "a"
"""Name of any file: a folder of secrets is refused for what may lie in it."""


class Root:
    """The folder below which files may be named by others than the user.

    A path is looked up as the kernel does it, with all its links, before it is opened. The code in a sandbox cannot
    change a link on the way, since it cannot reach these files.

    Raises:
        ContextRefused: It is no folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self.folder = Path(os.path.realpath(folder))
        except ValueError:  # no name of a file
            raise ContextRefused(f"{str(folder)[:80]!a} is not a folder: name one by --root") from None
        if not os.path.isdir(self.folder):  # noqa: PTH112 - before Python 3.14, `Path` raises for what cannot be read
            raise ContextRefused(f"{printable(folder)} is not a folder: name one by --root")

    def resolved(self, paths: Sequence[str]) -> list[Path]:
        """Return the targets of files, folders or globs, relative to the folder or absolute, for `Paths`. Raise
        ContextRefused for one that leads out of the folder, is likely a secret, or cannot be a path."""
        if not paths:
            raise ContextRefused("paths is empty: name files or folders")
        return [self._resolved(path) for path in paths]

    def _resolved(self, path: str) -> Path:
        if not path or "\0" in path or len(path) > MAX_PATH_CHARS:
            raise ContextRefused(f"{path[:80]!a} cannot be a path: name a file or a folder")
        asked = self.folder / path
        fixed, pattern = _fixed_part(asked)
        try:
            real = Path(os.path.realpath(fixed))
        except (OSError, ValueError) as error:
            raise ContextRefused(f"{printable(path)} cannot be read: {error}") from None
        if not real.is_relative_to(self.folder) or ".." in pattern:
            where = printable(self.folder)
            raise ContextRefused(
                f"{printable(path)} is not below {where}: only what is there can be asked about (--root)"
            )
        inside = real.relative_to(self.folder).parts
        if inside and (leads_to_secret(inside) or leads_to_secret((*inside, _ANY_FILE))):
            raise ContextRefused(f"{printable(path)} is likely a secret, by its name, and is not read")
        return real.joinpath(*pattern)
