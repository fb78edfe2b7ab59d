"""The Python installation: the parts of it that a fork server runs on, and the parts that its workers may read."""

import functools
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

import sandbox_worker
from rlm_broker.sandbox.workers.venv import Venv
from sandbox_worker.loading.self_test import mapping_works
from sandbox_worker.wire.control import Packages

ENVIRONMENT = {
    # This Python first, so that `subprocess.run(["python", ...])` finds the same packages.
    "PATH": ":".join(dict.fromkeys([str(Path(sys.executable).parent), "/usr/bin", "/bin"])),
    # `getpass.getuser` reads these: a password file has no entry for a worker's user.
    "LOGNAME": "rlm",
    "USER": "rlm",
    "LANG": "C.UTF-8",
    # One thread: a process with a second one cannot enter a user namespace (unshare(2): EINVAL).
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator, which pandas imports
    # Huge pages for the heap: a process that holds 1 GB forks in 1 ms, and without them in 11 ms.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""All variables of the zygote. It inherits none of the orchestrator's, since these may hold keys."""
OWN_PACKAGES = ("jsonschema", "jsonschema_specifications", "referencing", "rpds", "attr", "attrs", "typing_extensions")
"""Modules that a worker's own code imports when it first needs them. msgspec is imported from the start."""


@dataclass(frozen=True)
class Shown:
    """Packages and files that a fork server shows to its workers.

    Attributes:
        readable: Folders and files that workers may read.
        hidden: Folders below those that "strict" shows as empty, except what is named in `readable` itself.
        packages: Folders that workers import from; None for the `sys.path` that the fork server was started with.
    """

    readable: list[str]
    hidden: list[str]
    packages: Packages | None = None


def environment(seed: int | None, venv: Venv | None = None) -> dict[str, str]:
    """Return the variables of a zygote. With a seed, sets and dicts of text have the same order in all zygotes."""
    variables = dict(ENVIRONMENT)
    if venv is not None:
        variables["PATH"] = ":".join(dict.fromkeys([str(Path(_python_of(venv)).parent), "/usr/bin", "/bin"]))
    return variables if seed is None else variables | {"PYTHONHASHSEED": str(seed)}


def isolated(seed: int | None) -> list[str]:
    """Return options that keep the user's folders away. -I means -E, -P and -s, and -E would ignore PYTHONHASHSEED."""
    return ["-I"] if seed is None else ["-P", "-s"]


def python_paths() -> list[str]:
    """Return the zygote's `sys.path`: this Python's own folders, and those of msgspec and of the worker's package.

    The rest of our `sys.path` is left out, since it may hold the user's project.
    """
    scheme = sysconfig.get_paths()
    folders = [*_standard_library(), scheme["purelib"], scheme["platlib"]]
    folders += [str(_package_folder(package).parent) for package in (msgspec, sandbox_worker)]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def readable(paths: list[str]) -> list[str]:
    """Return the folders that a worker may read. Of a checkout, the worker's package alone is among them."""
    package = _package_folder(sandbox_worker)
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *paths, str(package)}
    if not any(str(package.parent) == folder for folder in sysconfig.get_paths().values()):
        folders.discard(str(package.parent))
    return sorted(folders)


def shown(paths: list[str], venv: Venv | None) -> Shown:
    """Return the packages and files that a fork server shows to its workers.

    Args:
        paths: `sys.path` that the fork server is started with.
        venv: Environment whose packages workers have; None for the orchestrator's. With an environment, workers also
            have the packages of the orchestrator's that their own code needs.
    """
    if venv is None:
        return Shown(readable(paths), [str(Path(path) / "litellm") for path in paths])
    own = _own_packages()
    libraries = _standard_library()
    needed = [str(_package_folder(package)) for package in (msgspec, sandbox_worker)]
    folders = [sys.base_prefix, sys.base_exec_prefix, *libraries, *needed, *own.values()]
    folders += map(str, (*venv.site_packages, *_programs_of(venv)))
    others = {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])}
    others |= {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    packages = Packages([*libraries, *map(str, venv.search)], own, _python_of(venv))
    return Shown(sorted(set(folders)), sorted(others - set(map(str, venv.site_packages))), packages)


def installed(names: Iterable[str], venv: Venv | None) -> tuple[str, ...]:
    """Return which of these modules workers can import. Their files are looked for; none is imported.

    Args:
        names: Names of modules.
        venv: Environment whose packages workers have; None for the orchestrator's.
    """
    paths = python_paths()
    packages = shown(paths, venv).packages
    folders = [Path(folder) for folder in (paths if packages is None else packages.search)]
    return tuple(name for name in names if any(_has(folder, name) for folder in folders))


def _has(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file()


def maps_texts() -> bool:
    """Whether workers of this Python share the texts of a context; else each has a copy of its own."""
    return mapping_works()


def _standard_library() -> list[str]:
    scheme = sysconfig.get_paths()
    dynload = [entry for entry in sys.path if entry.endswith("lib-dynload")]
    folders = [scheme["stdlib"], str(Path(scheme["platstdlib"]) / "lib-dynload"), *dynload]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def _programs_of(venv: Venv) -> list[Path]:
    """Return the files that make Python use this environment; none if its interpreter is not shown to workers."""
    if _python_of(venv) != str(venv.python):
        return []
    names = [f"python{suffix}" for suffix in ("", "3", f"3.{sys.version_info.minor}")]
    links = [venv.python.with_name(name) for name in names]
    return [venv.folder / "pyvenv.cfg", *(link for link in links if _is_shown(link))]


def _python_of(venv: Venv) -> str:
    """Return `sys.executable` of workers: the environment's Python, or ours if that one lies in a folder not shown."""
    return str(venv.python) if _is_shown(venv.python) else os.path.realpath(sys.executable)


def _is_shown(python: Path) -> bool:
    real = python.resolve()
    return real.is_file() and any(real.is_relative_to(folder) for folder in (sys.base_prefix, "/usr"))


@functools.cache
def _own_packages() -> dict[str, str]:
    return {name: str(place) for name in OWN_PACKAGES if (place := _place_of(name)) is not None}


def _place_of(name: str) -> Path | None:
    """Return the folder of a package or the file of a module, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).resolve()
    return file.parent if spec.submodule_search_locations is not None else file


def _package_folder(package: object) -> Path:
    file = getattr(package, "__file__", None)
    assert isinstance(file, str)
    return Path(file).resolve().parent
