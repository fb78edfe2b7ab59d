"""The file system of a worker at `strict`: a read-only root of its own, and one small writable folder."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sandbox_worker.isolation import syscalls

SYSTEM = ("/bin", "/sbin", "/usr", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/etc/fonts")
"""Paths that programs and the C library need, besides /lib*. A path that is a link (a merged /usr) stays a link."""
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
RESERVED = ("/dev", "/proc", "/sys", "/w")
"""Folders made anew for each worker: no file of the host can be shown there."""
SCRATCH, SHARED_MEMORY, TEMPORARY = "/w", "/dev/shm", "/tmp"
LENT_BYTES = 64 << 20
"""Bytes of a fork server's scratch folder during imports of modules and set-up code."""
OWN_INODES = 3
"""Inodes of a scratch folder's own structure, in addition to the files in it."""
INODES_OF_ONE = 16
"""Inodes of a cover for each path shown on top of it, with the folders that lead to it. Beyond them: ENOSPC."""

_CONFINED = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_PLAIN_FILES = syscalls.MS_NOSUID | syscalls.MS_NODEV
_PROC_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


# -- the root: once, in the fork server ------------------------------------------------------------------------------


def enter_private_root(
    new_root: str, readable: Sequence[str], hidden: Sequence[str], mount_proc: Callable[[str], None]
) -> None:
    """Build a minimal read-only tree at `new_root` and make it this process's root for good.

    The process must have a mount namespace of its own.

    Args:
        new_root: An existing empty folder.
        readable: Absolute folders or files of the host to show besides the system's.
        hidden: Absolute folders to show as empty where they lie in a shown folder. Their parts in `readable`
            are shown.
        mount_proc: Called with the place for /proc, while the host's /proc is still mounted: the kernel allows a new
            one only where a complete one is visible (`mount_too_revealing` in fs/namespace.c).

    Raises:
        OSError: EINVAL for paths that cannot be shown or hidden; else the kernel's refusal.
    """
    umask = os.umask(0o022)  # a worker of another uid walks through the folders made here
    try:
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)  # else our mounts spread to the host
        # nodev does not affect the devices below: each of them is a mount with its own flags.
        syscalls.mount("tmpfs", new_root, "tmpfs", _PLAIN_FILES, "size=1m,nr_inodes=4096,mode=755")
        folders, links = _show_system(new_root)
        shown = _show_readable(new_root, readable, folders, links)
        _hide(new_root, hidden, shown, readable)
        _make_devices(new_root)
        for folder in ("/proc", SCRATCH, TEMPORARY):
            _make_folder(new_root + folder)
    finally:
        os.umask(umask)
    mount_proc(new_root + "/proc")
    syscalls.pivot_into(new_root)
    # The root is remounted last, when it is complete. The mounts below it have their own flags.
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | _PLAIN_FILES
    syscalls.mount("none", "/", flags=flags)


def outermost(paths: Iterable[str]) -> list[str]:
    """Return `paths` in order, without repetitions and without paths below another one."""
    unique = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in unique if not any(_is_below(path, other) for other in unique if other != path)]


def temporary_is_free(readable: Iterable[str]) -> bool:
    """Return whether no readable path lies below /tmp, so that the scratch folder can also be shown there."""
    return not any(_is_below(path, TEMPORARY) for given in readable for path in (given, os.path.realpath(given)))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _show_system(new_root: str) -> tuple[list[str], list[str]]:
    """Show the system's folders and files. Return the shown folders and the kept links."""
    folders, links = [], []
    for path in (*SYSTEM, *map(str, Path("/").glob("lib*"))):
        if path.count("/") == 1 and Path(path).is_symlink():
            Path(new_root + path).symlink_to(Path(path).readlink())
            links.append(path)
        elif Path(path).exists():
            _show(path, new_root + path)
            folders.append(path)
    return folders, links


def _show_readable(
    new_root: str, readable: Sequence[str], folders: Sequence[str], links: Sequence[str]
) -> Sequence[str]:
    """Show the readable paths, also under the targets of their links. Return all shown paths."""
    for path in readable:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise OSError(errno.EINVAL, f"readable path {path!r} is not absolute or does not exist")
    shown = list(folders)
    for path in outermost(name for given in readable for name in (given, os.path.realpath(given))):
        if path == "/" or any(_is_below(path, folder) or _is_below(folder, path) for folder in RESERVED):
            raise OSError(
                errno.EINVAL, f"readable path {path!r} holds a folder, or lies in one, that a worker has anew"
            )
        if not any(_is_below(path, other) for other in (*folders, *links)):
            _show(path, new_root + path)
            shown.append(path)
    return shown


def _show(path: str, target: str) -> None:
    if Path(path).is_dir():
        _make_folder(target)
    elif Path(path).is_symlink():  # such as a venv's python, which finds its folders by the path of the link
        _make_folder(str(Path(target).parent))
        Path(target).symlink_to(os.path.realpath(path))
        return
    else:
        _make_file(target)
    syscalls.bind(path, target)
    syscalls.restrict_mount(target, _CONFINED)


def _hide(new_root: str, hidden: Sequence[str], shown: Sequence[str], readable: Sequence[str]) -> None:
    """Cover hidden folders with empty ones wherever they lie in a shown folder.

    A readable path below a hidden folder is shown on top of the cover.
    """
    for path in outermost(os.path.realpath(given) for given in hidden if Path(given).exists()):
        for outer in shown:  # under each of its names: a cover on one name does not cover another
            inner = os.path.realpath(outer)
            if not _is_below(path, inner):
                continue
            if not Path(path).is_dir():
                raise OSError(errno.EINVAL, f"hidden path {path!r} is not a folder")
            target = new_root + outer + path.removeprefix(inner)
            kept = [name for name in map(os.path.realpath, readable) if name != path and _is_below(name, path)]
            inodes = 1 + INODES_OF_ONE * len(kept)
            syscalls.mount("tmpfs", target, "tmpfs", _PROC_FLAGS, f"size=1m,nr_inodes={inodes},mode=755")
            for inner_path in outermost(kept):
                _show(inner_path, target + inner_path.removeprefix(path))
            syscalls.restrict_mount(target, syscalls.MOUNT_ATTR_RDONLY)


def _make_devices(new_root: str) -> None:
    for name in DEVICES:
        if name != "null" and not Path(f"/dev/{name}").exists():  # a container may lack some; init needs only /dev/null
            continue
        target = f"{new_root}/dev/{name}"
        _make_file(target)
        syscalls.bind(f"/dev/{name}", target)
        # Read-only protects the node's owner and mode. Writing to the device stays possible.
        syscalls.restrict_mount(target, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
    for name, destination in DEVICE_LINKS.items():
        Path(f"{new_root}/dev/{name}").symlink_to(destination)
    _make_folder(new_root + SHARED_MEMORY)


def _make_folder(path: str) -> None:
    Path(path).mkdir(mode=0o755, parents=True, exist_ok=True)


def _make_file(path: str) -> None:
    _make_folder(str(Path(path).parent))
    Path(path).touch(mode=0o644)


# -- /proc -----------------------------------------------------------------------------------------------------------


def mount_own_proc(target: str, only_processes: bool) -> None:
    """Mount the /proc of this process's pid namespace.

    Args:
        target: Folder to mount it on.
        only_processes: Show processes alone, without files about the machine such as meminfo and sys. Workers get
            this one.
    """
    syscalls.mount("proc", target, "proc", _PROC_FLAGS, "subset=pid" if only_processes else "")


def cover_proc() -> None:
    """Mount an empty folder over an inherited /proc: a user namespace may not unmount it."""
    syscalls.mount("tmpfs", "/proc", "tmpfs", _PROC_FLAGS | syscalls.MS_RDONLY, "size=4k,nr_inodes=1,mode=555")


# -- the scratch folder: in each worker, and for a while in the fork server -------------------------------------------


def lend_scratch() -> None:
    """Give the fork server itself a small scratch folder at /w, for modules that write a cache when imported."""
    syscalls.mount("tmpfs", SCRATCH, "tmpfs", _PLAIN_FILES, f"size={LENT_BYTES},nr_inodes=4096,mode=700")


def take_scratch_back() -> None:
    """Unmount the fork server's scratch folder. Its workers mount their own."""
    syscalls.unmount(SCRATCH)


def mount_scratch(size_bytes: int, max_files: int, also_temporary: bool) -> None:
    """Mount one writable tmpfs and change into it: /w and /dev/shm share its bytes and inodes.

    Args:
        size_bytes: Size of both together.
        max_files: Number of files and folders in both together.
        also_temporary: Whether to show /w at /tmp as well.
    """
    options = f"size={size_bytes},nr_inodes={max_files + OWN_INODES},mode=700"
    syscalls.mount("tmpfs", SCRATCH, "tmpfs", _PLAIN_FILES, options)
    files, shared = f"{SCRATCH}/files", f"{SCRATCH}/shm"
    os.mkdir(shared, 0o700)  # noqa: PTH102 - runs in each worker: path objects would copy 40 pages
    syscalls.bind(shared, SHARED_MEMORY)
    os.mkdir(files, 0o700)  # noqa: PTH102
    if also_temporary:
        syscalls.bind(files, TEMPORARY)
    syscalls.bind(files, SCRATCH)  # over itself: no path leads to the parent of the two folders any more
    os.chdir(SCRATCH)
