"""The scratch folder where it is a folder of the host's: nothing but looking bounds it as a whole."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contents:
    """`files` counts folders, too."""

    size_bytes: int
    files: int


def contents(folder: str, max_files: int) -> Contents:
    """What is in a folder, as far as it need be known: nothing is looked at beyond `max_files`.

    A folder that cannot be looked into, such as one nested deeper than a path can say, counts as too many files.
    """
    size_bytes = files = 0
    folders = [folder]
    try:
        while folders and files <= max_files:
            for entry in _entries(folders.pop()):
                found = entry.stat(follow_symlinks=False)
                size_bytes += found.st_blocks * 512
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                if files > max_files:
                    break
    except FileNotFoundError:  # removed meanwhile; what is left is seen the next time
        pass
    except OSError:
        files = max_files + 1
    return Contents(size_bytes, files)


def _entries(folder: str) -> "list[os.DirEntry[str]]":
    try:
        return list(os.scandir(folder))
    except PermissionError:
        os.chmod(folder, 0o700)  # noqa: PTH101 - model code has made it so; it is its owner, and so are we
        return list(os.scandir(folder))
