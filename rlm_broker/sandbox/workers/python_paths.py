"""The Python installation: the parts that a fork server runs on, and the parts that its workers may read."""

import functools
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

import sandbox_worker
from rlm_broker.errors import ConfigurationError
from sandbox_worker.loading.self_test import mapping_works
from sandbox_worker.wire.control import Packages

MAX_PTH_BYTES = 1 << 16
"""Bytes of a .pth file; a larger one is left out, and named in the log."""
MAX_ADDED_BYTES = 1 << 14
"""Bytes of all folders' names in .pth files, sent in one packet. With more, the environment is refused."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBRARY = f"python{VERSION}{'t' if 't' in sys.abiflags else ''}"
"""Folder of an environment's packages. An interpreter without the global lock has a "t": its C extensions differ."""
MAKE_ONE = f"make one by `uv venv --python {VERSION} FOLDER` or `python{VERSION} -m venv FOLDER`"

WORTH_TELLING: Final = (
    *("numpy", "pandas", "polars", "pyarrow", "scipy", "sklearn", "statsmodels", "networkx", "sympy", "matplotlib"),
    *("PIL", "bs4", "lxml", "yaml", "regex", "dateutil", "openpyxl", "pypdf", "docx", "pydantic", "nltk", "spacy"),
)
"""Packages of use to model code. The prompt names those of them that the sandbox can import."""


class Venv(msgspec.Struct, frozen=True):
    """A virtual environment of the orchestrator's version of Python.

    Attributes:
        folder: Absolute path, without links.
        site_packages: Its folders of packages. Beside them, only its Python is readable.
        search: Folders it adds to `sys.path`: these, and folders within them from its .pth files.
        left_out: Names of .pth files with folders outside of it, which are not added.
    """

    folder: Path
    site_packages: tuple[Path, ...]
    search: tuple[Path, ...]
    left_out: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Path of its interpreter, a link to the one that it was made with."""
        return self.folder / "bin" / "python"


def read_venv(given: object) -> Venv:
    """Read a virtual environment in a folder, given as a path or text. Raise ConfigurationError if it is none, or
    workers cannot import from it."""
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise ConfigurationError(f"python must be the path of a virtual environment, not {type(given).__name__}")
    if not os.fspath(given):
        raise ConfigurationError("python is empty: give the folder of a virtual environment")
    try:
        folder = Path(given).expanduser().resolve()
        if not folder.exists():
            raise ConfigurationError(f"python: there is no {folder}: {MAKE_ONE}")
        if not folder.is_dir():
            raise ConfigurationError(f"python: {os.fspath(given)} is a file: give the folder of a virtual environment")
        config = _configuration(folder)
        _require_suitable(folder, config)
        found = [folder / lib / _LIBRARY / "site-packages" for lib in ("lib", "lib64")]
        site_packages = tuple(dict.fromkeys(path.resolve() for path in found if path.is_dir()))
        if not site_packages:
            _refuse_other_version(folder)
        for path in site_packages:
            if not path.is_relative_to(folder):
                raise ConfigurationError(f"python: the packages of {folder} lie outside of it, in {path}")
        added, left_out = _of_pth_files(site_packages)
        if sum(len(os.fsencode(path)) for path in added) > MAX_ADDED_BYTES:
            raise ConfigurationError(f"python: .pth files of {folder} add {len(added):,} folders, which are too many")
    except (OSError, RuntimeError, ValueError) as error:  # "~" without a home, links in a circle, a NUL character
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigurationError(f"python: {os.fspath(given)!r} cannot be read: {why}") from None
    return Venv(folder, site_packages, (*site_packages, *added), left_out)


def _configuration(folder: Path) -> dict[str, str]:
    try:
        text = (folder / "pyvenv.cfg").read_text(errors="replace")
    except FileNotFoundError:
        raise ConfigurationError(
            f"python: {folder} is not a virtual environment, since it has no pyvenv.cfg: {MAKE_ONE}"
        ) from None
    lines = (line.partition("=") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _require_suitable(folder: Path, config: dict[str, str]) -> None:
    """Raise ConfigurationError for an environment of another Python, or with the packages of its system."""
    version = config.get("version") or config.get("version_info") or ""  # venv writes the first, virtualenv the other
    if version and version.split(".")[:2] != VERSION.split("."):
        _refuse_version(folder, f"Python {version}")
    implementation = config.get("implementation", sys.implementation.name)
    if implementation.lower() != sys.implementation.name:
        _refuse_version(folder, implementation)
    if config.get("include-system-site-packages", "false").lower() == "true":
        raise ConfigurationError(
            f"python: {folder} shows the packages of its system, too (include-system-site-packages = true), and REPLs "
            "are shown its own alone: make one without, and install the packages that you need there"
        )


def _refuse_other_version(folder: Path) -> None:
    others = sorted(path.parent.name for path in folder.glob("lib*/*/site-packages"))
    _refuse_version(folder, others[0] if others else "no folder of packages")


def _refuse_version(folder: Path, got: str) -> None:
    raise ConfigurationError(
        f"python: {folder} is for {got}, and REPLs run on {sys.implementation.name} {VERSION}, which cannot load its "
        f"C extensions: {MAKE_ONE}"
    )


def _of_pth_files(site_packages: tuple[Path, ...]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the folders in .pth files, and the names of .pth files with folders outside. No code in them is run."""
    added: list[Path] = []
    left_out: list[str] = []
    for folder in site_packages:
        for file in sorted(folder.glob("*.pth")):
            leads_out = False
            for line in _lines_of(file):
                if line is None or line.startswith(("import ", "import\t")):
                    # Code, for example of editable installs: it makes modules of other folders importable.
                    leads_out |= line is None or "__editable__" in line
                    continue
                path = (folder / line).resolve()
                if not path.is_relative_to(folder):
                    leads_out = True
                elif path.is_dir() and path != folder:
                    added.append(path)
            if leads_out:
                left_out.append(file.name)
    return tuple(dict.fromkeys(added)), tuple(dict.fromkeys(left_out))


def _lines_of(file: Path) -> list[str | None]:
    """Return the lines without comments; a single None if the file is too large to be read."""
    with file.open("rb") as opened:
        content = opened.read(MAX_PTH_BYTES + 1)
    if len(content) > MAX_PTH_BYTES:
        return [None]
    lines = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


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
    # Huge pages for the heap: a process holding 1 GB forks in 1 ms, and without them in 11 ms.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""All variables of the zygote. It inherits none of the orchestrator's, since these may hold keys."""
OWN_PACKAGES = ("jsonschema", "jsonschema_specifications", "referencing", "rpds", "attr", "attrs", "typing_extensions")
"""Modules of a worker's own code, imported when it first needs them. msgspec is imported from the start."""


class VisibleFiles(msgspec.Struct, frozen=True):
    """Packages and files for the workers of a fork server.

    Attributes:
        hidden: Folders below the `readable` ones, shown as empty by "strict" but for what `readable` names itself.
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
    """Return the zygote's `sys.path`: this Python's own folders, msgspec's and the worker package's.

    The rest of our `sys.path` is left out, since it may hold the user's project.
    """
    scheme = sysconfig.get_paths()
    folders = [*_standard_library(), scheme["purelib"], scheme["platlib"]]
    folders += [str(_package_folder(package).parent) for package in (msgspec, sandbox_worker)]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def readable(paths: list[str]) -> list[str]:
    """Return the readable folders of a worker. Of a checkout, the worker's package alone is among them."""
    package = _package_folder(sandbox_worker)
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *paths, str(package)}
    if not any(str(package.parent) == folder for folder in sysconfig.get_paths().values()):
        folders.discard(str(package.parent))
    return sorted(folders)


def shown(paths: list[str], venv: Venv | None) -> VisibleFiles:
    """Return the packages and files for the workers of a fork server. `paths` is the `sys.path` that it is started
    with. With an environment, workers also have those packages of the orchestrator's that their own code needs."""
    if venv is None:
        return VisibleFiles(readable(paths), [str(Path(path) / "litellm") for path in paths])
    own = _own_packages()
    libraries = _standard_library()
    needed = [str(_package_folder(package)) for package in (msgspec, sandbox_worker)]
    folders = [sys.base_prefix, sys.base_exec_prefix, *libraries, *needed, *own.values()]
    folders += map(str, (*venv.site_packages, *_programs_of(venv)))
    others = {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])}
    others |= {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    packages = Packages([*libraries, *map(str, venv.search)], own, _python_of(venv))
    return VisibleFiles(sorted(set(folders)), sorted(others - set(map(str, venv.site_packages))), packages)


def installed(names: Iterable[str], venv: Venv | None) -> tuple[str, ...]:
    """Return which of these modules workers can import. Their files are looked for; none is imported."""
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
    """Return the files by which Python uses this environment; none if its interpreter is not shown to workers."""
    if _python_of(venv) != str(venv.python):
        return []
    names = [f"python{suffix}" for suffix in ("", "3", f"3.{sys.version_info.minor}")]
    links = [venv.python.with_name(name) for name in names]
    return [venv.folder / "pyvenv.cfg", *(link for link in links if _is_shown(link))]


def _python_of(venv: Venv) -> str:
    """Return `sys.executable` of workers: the environment's Python, or ours if workers do not see its folder."""
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
