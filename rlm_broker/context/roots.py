"""Paths that a client or a line of a batch may name: those below one folder, wherever links lead."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from rlm_broker.context.files import is_glob, leads_to_secret
from rlm_broker.context.found_files import printable
from rlm_broker.context.store import MAX_PATH_CHARS
from rlm_broker.errors import ContextRefused

A_FILE = "a"
"""Name of any file: a folder of secrets is refused for what may lie in it."""


class Root:
    """The folder below which files may be named by others than the user.

    A path is looked up as the kernel does it, with all its links, before it is opened. The code in a sandbox cannot
    change a link on the way, since it cannot reach these files.

    Args:
        folder: The folder.

    Raises:
        ContextRefused: It is no folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.realpath(folder))
        if not self.folder.is_dir():
            raise ContextRefused(f"{printable(folder)} is not a folder: name one by --root")

    def resolved(self, paths: Sequence[str]) -> list[Path]:
        """Return where the paths lead, for `Paths`.

        Args:
            paths: Files, folders or globs, relative to the folder or absolute.

        Raises:
            ContextRefused: One of them leads out of the folder, is likely a secret, or cannot be a path.
        """
        if not paths:
            raise ContextRefused("paths is empty: name files or folders")
        return [self._resolved(path) for path in paths]

    def _resolved(self, path: str) -> Path:
        if not path or "\0" in path or len(path) > MAX_PATH_CHARS:
            raise ContextRefused(f"{path[:80]!a} cannot be a path: name a file or a folder")
        asked = self.folder / path
        fixed, pattern = _parts(asked)
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
        if inside and (leads_to_secret(inside) or leads_to_secret((*inside, A_FILE))):
            raise ContextRefused(f"{printable(path)} is likely a secret, by its name, and is not read")
        return real.joinpath(*pattern)


def _parts(path: Path) -> tuple[PurePath, tuple[str, ...]]:
    """Return the part of a path without wildcards, and the rest of it if it is a glob."""
    if not is_glob(path):
        return path, ()
    first = next(at for at, part in enumerate(path.parts) if set("*?[") & set(part))
    return Path(*path.parts[:first]), path.parts[first:]
