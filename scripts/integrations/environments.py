"""Virtual environments with the wheel of this tree and the packages of a peer, and the sources of suites."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from scripts.integrations.peer import HERE, Peer, Suite

PROJECT = HERE.parents[1]
INSTALL_S = 1_800


class NotHere(Exception):
    """Something cannot be tried on this machine; the message says why."""


def wheel_of(cache: Path) -> Path:
    """Build the wheel of this tree."""
    folder = cache / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    _pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(PROJECT))
    return next(folder.glob("*.whl"))


def environment_of(peer: Peer, wheel: Path, cache: Path) -> Path:
    """Return the Python of the peer's environment. It is made once for a list of packages; the wheel is installed anew.

    Raises:
        NotHere: There is no such Python.
    """
    base = sys.executable if peer.python is None else shutil.which(f"python{peer.python}")
    if base is None:
        raise NotHere(f"there is no python{peer.python} here")
    digest = hashlib.sha256(repr((peer.packages, base)).encode()).hexdigest()[:12]
    venv = cache / f"{peer.name}-{digest}"
    python = venv / "bin" / "python"
    if not (venv / "complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([base, "-m", "venv", str(venv)], check=True, timeout=INSTALL_S)
        _pip(str(python), "install", str(wheel), *peer.packages)
        (venv / "complete").touch()
    _pip(str(python), "install", "--force-reinstall", "--no-deps", str(wheel))
    return python


def sources_of(suite: Suite, checkouts: Path | None, cache: Path, python: Path) -> Path:
    """Return a fresh copy of a suite's folder.

    Raises:
        NotHere: The suite is in a repository that the user has not cloned.
    """
    folder = cache / "suite"
    shutil.rmtree(folder, ignore_errors=True)
    kind, _, where = (suite.sources or "").partition(" ")
    if kind == "sdist":
        downloads = cache / "sdist" / where
        if not downloads.exists():
            _pip(str(python), "download", "--no-deps", "--no-binary", ":all:", "--dest", str(downloads), where)
        with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        return next(folder.iterdir())
    if kind == "checkout":
        url, _, tag = where.partition(" ")
        name = url.rpartition("/")[2] + (tag and f"-{tag}")
        if checkouts is None or not (checkouts / name).is_dir():
            branch = tag and f"--branch {tag} "
            raise NotHere(f"it needs `git clone {branch}{url} DIR/{name}`, and --checkouts DIR")
        return Path(shutil.copytree(checkouts / name, folder, ignore=shutil.ignore_patterns(".git")))
    folder.mkdir(parents=True)
    return folder


def path_of(cache: Path) -> Path:
    """Return a folder for PYTHONPATH with `scripts` alone: `rlm_broker` shall come from the wheel."""
    folder = cache / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "scripts"
    link.unlink(missing_ok=True)
    link.symlink_to(PROJECT / "scripts")
    return folder


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise NotHere(f"{' '.join(command)}: {done.stderr.strip()[-1_000:]}")
