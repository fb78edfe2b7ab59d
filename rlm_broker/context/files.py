"""Which files a path, a folder or a glob stands for, and their text in pieces.

Files are the user's and may change while they are read: nothing here maps one, waits for one, or holds a whole one.
"""

import codecs
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from pathspec import GitIgnoreSpec, Pattern

from rlm_broker.errors import ContextRefused

PIECE_BYTES = 1 << 18
"""Read at once: whatever a file's size, it takes a few times this of our own memory."""

_MAX_GITIGNORE_BYTES = 1 << 20
_WILDCARDS = frozenset("*?[")
_EVERYTHING = ("**",)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileUnfit(Exception):
    """A file that cannot be part of a context. The message is one sentence.

    Attributes:
        reason: Under what it is counted where it is one of many.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read.

    Attributes:
        name: What it is called in the context.
        given: Its path as the user wrote it, or began it with the folder that was written.
        path: Where to open it.
        named: Whether the user named this very file, which may then be a symbolic link to anywhere.
    """

    name: str
    given: str
    path: str
    named: bool = False


def printable(path: str | os.PathLike[str]) -> str:
    """A path that can be printed and sent: bytes in it that are not UTF-8 are shown as `\\xff`."""
    path = os.fspath(path)
    return path if path.isascii() else os.fsencode(path).decode("utf-8", "backslashreplace")


def is_glob(path: Path) -> bool:
    """Whether `path` is a pattern: it has `*`, `?` or `[`, and nothing has that very name."""
    return bool(_WILDCARDS & set(str(path))) and not os.path.lexists(path)


# -- which files -----------------------------------------------------------------------------------------------------


def find_files(paths: Sequence[Path]) -> tuple[list[FoundFile], Counter[str]]:
    """The files that `paths` stand for: files themselves, folders with everything below them, globs.

    A name is the path below the folder, or below the part of a glob that has no wildcard, or the last part of a file's
    path. Files whose names would be equal are called by their paths as given. The same file is taken only once.

    Of folders and globs is left out what .gitignore files exclude, anything called .git, and what is reached through
    links to folders or to the outside. A link to a file inside counts as that file.

    Args:
        paths: In a glob `*`, `?` and `[...]` stay within one part of the path, a part `**` is any number of them; only
            files match.

    Returns:
        The files, sorted by name; and how many entries were left out for which reason. An excluded folder counts once.

    Raises:
        ContextRefused: One of them does not exist or cannot be looked at, or a glob matches nothing.
    """
    skipped: Counter[str] = Counter()
    by_real_path: dict[str, FoundFile] = {}
    for path in paths:
        for file in _files_of(path, skipped):
            real = os.path.realpath(file.path) if file.named else file.path  # what a walk finds has its real path
            by_real_path.setdefault(real, file)
    names = _distinct_names(by_real_path)
    files = [replace(file, name=names[real]) for real, file in by_real_path.items()]
    return sorted(files, key=lambda file: file.name), skipped


def _files_of(path: Path, skipped: Counter[str]) -> list[FoundFile]:
    if is_glob(path):
        first = next(at for at, part in enumerate(path.parts) if _WILDCARDS & set(part))
        base, pattern = Path(*path.parts[:first]), path.parts[first:]
        if files := _walk(base, pattern, skipped) if stat.S_ISDIR(_mode(base)) else []:
            return files
        raise ContextRefused(f"{printable(path)} matches no file: check the pattern, and .gitignore")
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
    """Names by real path: the first of relative, as given and real that no other file has, or a number behind it."""
    names = {real: file.name for real, file in by_real_path.items()}
    for longer in (lambda real: by_real_path[real].given, printable):
        times = Counter(names.values())
        names = {real: name if times[name] == 1 else longer(real) for real, name in names.items()}
    # What is left are paths that are equal only as they are shown: b"\\xff" and b"\xff". No file may hide another.
    times = Counter(names.values())
    for real in [real for real, name in names.items() if times[name] > 1]:
        number = 1
        while times[name := f"{names[real]} ({number})"]:
            number += 1
        names[real] = name
        times[name] = 1
    return names


def _walk(root: Path, pattern: tuple[str, ...], skipped: Counter[str]) -> list[FoundFile]:
    real_root = Path(os.path.realpath(root))
    ignored = _Ignored(real_root)
    files: list[FoundFile] = []
    linked: list[FoundFile] = []
    waiting: list[tuple[str, ...]] = [()]
    while waiting:  # not by recursion: a tree may be deeper than Python's stack
        folder = waiting.pop()
        # What stands before each name; a path object for every file would take longer than reading it.
        below, given = "".join(f"{part}/" for part in folder), str(root.joinpath(*folder, "x"))[:-1]
        try:
            with os.scandir(real_root.joinpath(*folder)) as listing:
                entries = list(listing)
        except OSError:
            skipped["unreadable"] += 1
            continue
        for entry in entries:
            parts = (*folder, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git" or not (_may_hold if is_folder else _matches)(parts, pattern):
                continue
            if ignored.is_excluded(parts, is_folder):
                skipped["ignored by .gitignore"] += 1
            elif is_folder:
                waiting.append(parts)
            elif entry.is_symlink():
                linked += _linked(parts, root, real_root, ignored, skipped)
            elif entry.is_file():
                files.append(FoundFile(printable(below + entry.name), printable(given + entry.name), entry.path))
            else:
                skipped["not a regular file"] += 1
    return files + linked  # in this order: of a file and a link to it, the file's own name is kept


def _linked(
    parts: tuple[str, ...], root: Path, real_root: Path, ignored: "_Ignored", skipped: Counter[str]
) -> list[FoundFile]:
    """What the link at `parts` leads to, if that is a file inside. Folders inside are walked under their own names."""
    target = Path(os.path.realpath(real_root.joinpath(*parts)))
    if not target.is_relative_to(real_root):
        skipped["link to outside the folder"] += 1
        return []
    inside = target.relative_to(real_root).parts
    if ".git" in inside or any(
        ignored.is_excluded(inside[:end], end < len(inside)) for end in range(1, len(inside) + 1)
    ):
        skipped["ignored by .gitignore"] += 1
        return []
    mode = _mode(target)
    if not stat.S_ISREG(mode):
        if not stat.S_ISDIR(mode):
            skipped["unreadable"] += 1
        return []
    return [FoundFile("/".join(map(printable, parts)), printable(root.joinpath(*parts)), str(target))]


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0  # no kind of file: what cannot be looked at cannot be read


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(parts[taken:], pattern[1:]) for taken in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _may_hold(folder: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether something below `folder` can match: without this `*.txt` would walk all there is below."""
    for part, wanted in zip(folder, pattern, strict=False):
        if wanted == "**":
            return True
        if not fnmatchcase(part, wanted):
            return False
    return len(folder) < len(pattern)


class _Ignored:
    """What the .gitignore files exclude: those of the folder, of all below it, and of the repository around it.

    Args:
        root: Real path of the folder. If the repository excludes this folder itself, its rules do not count: the user
            has named the folder.
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
        """Whether the entry at `parts` below the folder is excluded. Its parents were asked about, and are not."""
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
    """A line of a .gitignore. As in git, of the lines that mean an entry the last one of the nearest file decides.

    pathspec translates the line and no more: asked about a whole file it lets some lines win over later ones, and it
    takes a line to mean all that is below a folder too, so that `!*/` after `*` would not bring folders back.
    """

    excludes: bool
    only_folders: bool
    pattern: Pattern

    def means(self, path: str, is_folder: bool) -> bool:
        """Whether the line is about the entry at `path` itself, not only about a folder that it lies in."""
        if self.only_folders and not is_folder:
            return False
        result = self.pattern.match_file(path)
        return result is not None and not any(result.match.groupdict().values())  # its one group: a "/" after a folder


_Rules = tuple[tuple[int, list[_Rule]], ...]
"""How deep a .gitignore lies, and its lines from the last to the first; the nearest file first."""


def _read_gitignore(path: Path) -> list[_Rule]:
    try:
        fd, _ = _open_regular(FoundFile(".gitignore", printable(path), str(path)))
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
    except ValueError:  # no pattern: git passes over it as well
        return []
    return [_Rule(pattern.include, only_folders, pattern) for pattern in patterns if pattern.include is not None]


# -- their text ------------------------------------------------------------------------------------------------------


def text_of(file: FoundFile) -> Iterator[str | bytes]:
    """The text of `file`, in pieces; one of bytes is ASCII, as most of most files. What is appended to it meanwhile is
    left out. A byte order mark is not text.

    Raises:
        FileUnfit: It cannot be read, is not a regular file, is binary (it has a zero byte), or is not UTF-8. This may
            come after any number of pieces.
    """
    fd, size_bytes = _open_regular(file)
    try:
        yield from decoded(_bytes_of(file, fd, size_bytes), file.given)
    finally:
        os.close(fd)


def _open_regular(file: FoundFile) -> tuple[int, int]:
    """A descriptor, and the size of what it is of."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe that became of it is not waited for
    try:
        # Before it is opened: opening a device can do something.
        _refuse_special(file, os.stat(file.path).st_mode)  # noqa: PTH116 - a path object takes longer than the call
        fd = os.open(file.path, flags if file.named else flags | os.O_NOFOLLOW)
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        opened = os.fstat(fd)
        _refuse_special(file, opened.st_mode)
    except FileUnfit:
        os.close(fd)
        raise
    return fd, opened.st_size


def _refuse_special(file: FoundFile, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileUnfit(
            "not a regular file", f"{file.given} is {kind}, not a file: read it first, and hand in its text"
        )


def _bytes_of(file: FoundFile, fd: int, size_bytes: int) -> Iterator[bytes]:
    left = size_bytes or (1 << 62)  # files of /proc have text and no size
    try:
        while left and (piece := os.read(fd, min(left, PIECE_BYTES))):
            if not size_bytes and (size_bytes := os.fstat(fd).st_size):
                return  # it was empty: this was appended meanwhile, and more may be without end
            yield piece
            left -= len(piece)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: FoundFile, error: OSError) -> FileUnfit:
    return FileUnfit("unreadable", f"{file.given} cannot be read: {error.strerror}")


def decoded(pieces: Iterable[bytes], name: str) -> Iterator[str | bytes]:
    """Yield UTF-8 as text, piece by piece; a piece of bytes is ASCII. A byte order mark is not text.

    Args:
        name: What the bytes are of, for the error.

    Raises:
        FileUnfit: They are binary, or not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0  # of the piece, in the file
    begun = False
    for piece in chain(pieces, [b""]):
        if (zero := piece.find(0)) >= 0:
            sentence = f"{name} is binary (a zero byte at offset {start + zero:,}), not text: convert it to UTF-8 text"
            raise FileUnfit("binary", sentence)
        behind = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
        if piece and not behind and piece.isascii():
            begun = True
            yield piece
            start += len(piece)
            continue
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            offset, byte = start - behind + error.start, error.object[error.start]
            sentence = f"{name} is not UTF-8 text: byte {byte:#04x} at offset {offset:,}; convert it (iconv -t UTF-8)"
            raise FileUnfit("not UTF-8", sentence) from None
        yield text if begun else text.removeprefix("\ufeff")
        begun = begun or bool(text)
        start += len(piece)
