"""A virtual environment whose packages code may import: the parts of it that are used, and the reasons to refuse it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlm_broker.errors import ConfigurationError

MAX_PTH_BYTES = 1 << 16
"""Bytes of a .pth file; a larger one is left out, and named in the log."""
MAX_ADDED_BYTES = 1 << 14
"""Bytes of the names of folders that .pth files add, which go in one packet. With more, the environment is refused."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBRARY = f"python{VERSION}{'t' if 't' in sys.abiflags else ''}"
"""Folder of an environment's packages. An interpreter without the global lock has a "t": its C extensions differ."""
MAKE_ONE = f"make one by `uv venv --python {VERSION} FOLDER` or `python{VERSION} -m venv FOLDER`"


@dataclass(frozen=True)
class Venv:
    """A virtual environment of the orchestrator's version of Python.

    Attributes:
        folder: Absolute path, without links.
        site_packages: Its folders of packages. Beside them, only its Python is readable.
        search: Folders that it adds to `sys.path`: these, and folders within them that its .pth files name.
        left_out: Names of .pth files that lead out of it. The folders that they name are not added.
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
    """Read a virtual environment.

    Args:
        given: Its folder, as a path or text.

    Raises:
        ConfigurationError: It is not a virtual environment, or workers cannot import from it.
    """
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
    """Refuse an environment of another Python, and one that shows the packages of its system.

    Raises:
        ConfigurationError: REPLs cannot use the environment.
    """
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
    """Return the folders that .pth files add, and the names of .pth files that lead out. No code in them is run."""
    added: list[Path] = []
    left_out: list[str] = []
    for folder in site_packages:
        for file in sorted(folder.glob("*.pth")):
            leads_out = False
            for line in _lines_of(file):
                if line is None or line.startswith(("import ", "import\t")):
                    # Code, such as that of editable installs, which makes modules importable from other folders.
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
