"""What of this Python installation a fork server runs on, and what of it its workers may read."""

import sys
import sysconfig
from pathlib import Path

import msgspec

import sandbox_worker
from sandbox_worker.loading.self_test import mapping_works

ENVIRONMENT = {
    # This Python first: `subprocess.run(["python", ...])` is to find the same packages.
    "PATH": ":".join(dict.fromkeys([str(Path(sys.executable).parent), "/usr/bin", "/bin"])),
    # What `getpass.getuser` takes: there is no entry in a password file for a worker's user.
    "LOGNAME": "rlm",
    "USER": "rlm",
    "LANG": "C.UTF-8",
    # One thread: a process with a second one cannot enter a user namespace.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator, which pandas imports
    # Huge pages for the heap: forking a process that holds 1 GB costs 1 ms instead of 11.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""All of the zygote's environment. Nothing of ours is inherited: it may hold keys."""


def environment(seed: int | None) -> dict[str, str]:
    """Of a zygote; with a seed, sets and dicts of text are ordered alike in all of them."""
    return ENVIRONMENT if seed is None else ENVIRONMENT | {"PYTHONHASHSEED": str(seed)}


def isolated(seed: int | None) -> list[str]:
    """Options that keep the user's folders away. -I is -E, -P and -s, and -E would ignore PYTHONHASHSEED."""
    return ["-I"] if seed is None else ["-P", "-s"]


def python_paths() -> list[str]:
    """`sys.path` of the zygote: this Python's own folders, and where msgspec and the worker's package are.

    Nothing else of our `sys.path`: it may hold the user's project.
    """
    scheme = sysconfig.get_paths()
    folders = [scheme["stdlib"], str(Path(scheme["platstdlib"]) / "lib-dynload"), scheme["purelib"], scheme["platlib"]]
    folders += [str(_package_folder(package).parent) for package in (msgspec, sandbox_worker)]
    dynload = [entry for entry in sys.path if entry.endswith("lib-dynload")]
    return [folder for folder in dict.fromkeys([*folders, *dynload]) if Path(folder).is_dir()]


def readable(paths: list[str]) -> list[str]:
    """What a worker may read. The worker's package alone, not the folder that it lies in, which may be a checkout."""
    package = _package_folder(sandbox_worker)
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *paths, str(package)}
    if not any(str(package.parent) == folder for folder in sysconfig.get_paths().values()):
        folders.discard(str(package.parent))
    return sorted(folders)


def maps_texts() -> bool:
    """Whether workers of this Python share the texts of a context; elsewhere each has a copy of its own."""
    return mapping_works()


def _package_folder(package: object) -> Path:
    file = getattr(package, "__file__", None)
    assert isinstance(file, str)
    return Path(file).resolve().parent
