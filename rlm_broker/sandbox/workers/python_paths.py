"""What of this Python installation a fork server runs on, and what of it its workers may read."""

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
from sandbox_worker.wire.zygote_control import Packages

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
OWN_PACKAGES = ("jsonschema", "jsonschema_specifications", "referencing", "rpds", "attr", "attrs", "typing_extensions")
"""Modules that a worker's own code imports when it first needs them, beside msgspec, which it has from the start."""


@dataclass(frozen=True)
class Shown:
    """What a fork server is told of packages and files.

    Attributes:
        readable: Folders and files that workers may read.
        hidden: Folders below them that "strict" shows as empty, but for what of them is readable by itself.
        packages: What workers import from. None: from the `sys.path` that the fork server was started with.
    """

    readable: list[str]
    hidden: list[str]
    packages: Packages | None = None


def environment(seed: int | None, venv: Venv | None = None) -> dict[str, str]:
    """Of a zygote; with a seed, sets and dicts of text are ordered alike in all of them."""
    variables = dict(ENVIRONMENT)
    if venv is not None:
        variables["PATH"] = ":".join(dict.fromkeys([str(Path(_python_of(venv)).parent), "/usr/bin", "/bin"]))
    return variables if seed is None else variables | {"PYTHONHASHSEED": str(seed)}


def isolated(seed: int | None) -> list[str]:
    """Options that keep the user's folders away. -I is -E, -P and -s, and -E would ignore PYTHONHASHSEED."""
    return ["-I"] if seed is None else ["-P", "-s"]


def python_paths() -> list[str]:
    """`sys.path` of the zygote: this Python's own folders, and where msgspec and the worker's package are.

    Nothing else of our `sys.path`: it may hold the user's project.
    """
    scheme = sysconfig.get_paths()
    folders = [*_standard_library(), scheme["purelib"], scheme["platlib"]]
    folders += [str(_package_folder(package).parent) for package in (msgspec, sandbox_worker)]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def readable(paths: list[str]) -> list[str]:
    """What a worker may read. The worker's package alone, not the folder that it lies in, which may be a checkout."""
    package = _package_folder(sandbox_worker)
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *paths, str(package)}
    if not any(str(package.parent) == folder for folder in sysconfig.get_paths().values()):
        folders.discard(str(package.parent))
    return sorted(folders)


def shown(paths: list[str], venv: Venv | None) -> Shown:
    """Return what a fork server is told.

    Args:
        paths: `sys.path` that it is started with.
        venv: Whose packages workers have in the place of ours. Of ours they then have what they need themselves.
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
    """Return which of these modules workers can import, told by their files: none is imported.

    Args:
        venv: Whose packages workers have; None: ours.
    """
    paths = python_paths()
    packages = shown(paths, venv).packages
    folders = [Path(folder) for folder in (paths if packages is None else packages.search)]
    return tuple(name for name in names if any(_has(folder, name) for folder in folders))


def _has(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file()


def maps_texts() -> bool:
    """Whether workers of this Python share the texts of a context; elsewhere each has a copy of its own."""
    return mapping_works()


def _standard_library() -> list[str]:
    scheme = sysconfig.get_paths()
    dynload = [entry for entry in sys.path if entry.endswith("lib-dynload")]
    folders = [scheme["stdlib"], str(Path(scheme["platstdlib"]) / "lib-dynload"), *dynload]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def _programs_of(venv: Venv) -> list[Path]:
    """What has Python find this environment when code starts it: none where it runs on a Python that is not shown."""
    if _python_of(venv) != str(venv.python):
        return []
    names = [f"python{suffix}" for suffix in ("", "3", f"3.{sys.version_info.minor}")]
    links = [venv.python.with_name(name) for name in names]
    return [venv.folder / "pyvenv.cfg", *(link for link in links if _is_shown(link))]


def _python_of(venv: Venv) -> str:
    """Return what is `sys.executable`: the environment's, or ours where that one lies in what is not shown."""
    return str(venv.python) if _is_shown(venv.python) else os.path.realpath(sys.executable)


def _is_shown(python: Path) -> bool:
    real = python.resolve()
    return real.is_file() and any(real.is_relative_to(folder) for folder in (sys.base_prefix, "/usr"))


@functools.cache
def _own_packages() -> dict[str, str]:
    return {name: str(place) for name in OWN_PACKAGES if (place := _place_of(name)) is not None}


def _place_of(name: str) -> Path | None:
    """Return the folder of a package or the file of a module, which is not imported; None where it is not there."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).resolve()
    return file.parent if spec.submodule_search_locations is not None else file


def _package_folder(package: object) -> Path:
    file = getattr(package, "__file__", None)
    assert isinstance(file, str)
    return Path(file).resolve().parent
