"""Packages for code in a sandbox: the orchestrator's, an environment's, or a list's."""

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from rlm_broker.concurrency.deadline import Late, to_its_end, within
from rlm_broker.concurrency.forks import FORKING, left_to_parent
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import is_secret_name, redact, secrets_of_environment, without_credentials
from rlm_broker.sandbox.workers.held_process import ended
from rlm_broker.sandbox.workers.private_folder import removed
from rlm_broker.sandbox.workers.python_paths import Venv, read_venv

MAX_REQUIREMENTS, MAX_CHARS = 256, 256
"""Packages in a list, and characters of each. A longer list or entry is refused."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_CLAUSE = r"\s*(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+_-]*(?:\.\*)?\s*"
_REQUIREMENT = re.compile(
    rf"({_NAME})\s*(?:\[\s*({_NAME}(?:\s*,\s*{_NAME})*)\s*\])?\s*({_CLAUSE}(?:,{_CLAUSE})*)?", re.ASCII
)


class Requirements(Struct, frozen=True):
    """Packages to install: names with extras and versions in normal form, sorted and each once, so that equal lists are
    equal."""

    texts: tuple[str, ...]

    @staticmethod
    def of(given: object) -> "Requirements":
        """Return a list such as `["numpy>=2", "six==1.16.0"]` in normal form. Raise ConfigurationError for other
        entries."""
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigurationError(
                f'packages must be a list such as ["numpy>=2", "six==1.16.0"], not {type(given).__name__}'
            )
        if len(given) > MAX_REQUIREMENTS:
            raise ConfigurationError(
                f"packages lists {len(given):,} packages, more than {MAX_REQUIREMENTS}: make a venv of them"
            )
        return Requirements(tuple(sorted({_normalised(each) for each in given})))

    @property
    def digest(self) -> str:
        """Name of an environment with these packages, for this Python on this kind of machine."""
        python = [sys.implementation.name, *sys.version_info[:3], os.path.realpath(sys.executable)]
        machine = [sysconfig.get_config_var("SOABI"), sysconfig.get_platform()]
        sources = sorted((name, value) for name, value in os.environ.items() if _NAMES_A_SOURCE.fullmatch(name))
        return hashlib.sha256(json.dumps([self.texts, python, machine, sources]).encode()).hexdigest()[:40]


_NAMES_A_SOURCE = re.compile(r"(?:UV|PIP)_\w*(?:INDEX|FIND_LINKS)\w*")
"""Variables with an installer's sources of packages. They are part of the digest: another source is another list."""


def _normalised(given: object) -> str:
    if not isinstance(given, str):
        raise ConfigurationError(f"packages: each must be text such as 'numpy>=2', not {type(given).__name__}")
    found = _REQUIREMENT.fullmatch(given.strip()) if len(given) <= MAX_CHARS else None
    if found is None:
        raise ConfigurationError(
            f"packages: {given[:80]!r} is not a name with versions, such as 'numpy>=2' or 'httpx[http2]==0.28.*': "
            "options, paths, addresses and markers are refused; make a venv with such packages, and give it as python="
        )
    name, extras, clauses = found.groups()
    extra = ",".join(sorted({_canonical(each) for each in (extras or "").split(",") if each.strip()}))
    versions = ",".join(sorted({re.sub(r"\s", "", each) for each in (clauses or "").split(",") if each.strip()}))
    return _canonical(name) + (f"[{extra}]" if extra else "") + versions


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


_log = logging.getLogger("rlm_broker")

Chosen = Venv | Requirements | None
"""Environment, or list to make one from; None for the packages of the orchestrator."""


def chosen_packages(python: str | os.PathLike[str] | None, packages: Sequence[str] | None) -> Chosen:
    """Return the choice by the arguments `python` and `packages` of a `Sandbox`. Raise ConfigurationError if one of
    them cannot be used, or both are given."""
    if python is not None and packages is not None:
        raise ConfigurationError("give either python or packages: a venv of your own, or a list to make one of")
    if packages is not None:
        return Requirements.of(packages)
    return None if python is None else read_venv(python)


async def venv_of(chosen: Chosen) -> Venv | None:
    """Return the chosen environment. One from a list is made, unless it was made before and kept. Raise
    ConfigurationError if it cannot be read or made."""
    if isinstance(chosen, Requirements):
        return await venv_with(chosen)
    if chosen is None:
        return None
    venv = await in_thread(lambda _: read_venv(chosen.folder))  # read again: it may have changed since it was chosen
    if venv.left_out:
        _tell_what_is_left_out(venv)
    return venv


@functools.lru_cache(maxsize=256)
def _tell_what_is_left_out(venv: Venv) -> None:
    _log.warning("packages that lead out of %s are not shown to REPLs: %s", venv.folder, ", ".join(venv.left_out))


MAKE_TIMEOUT_S = 600.0
"""Seconds to make an environment, or to wait until another process has made it. Beyond them: an error."""
PAUSE_S = 0.05
"""Seconds between two attempts to take the lock of an environment."""


async def venv_with(requirements: Requirements, timeout_s: float = MAKE_TIMEOUT_S) -> Venv:
    """Return the environment with these packages: the kept one, or one made in at most `timeout_s` seconds.

    Raises:
        ConfigurationError: It cannot be made, or not in that time, or there is no folder to keep it in.
    """
    try:
        folder = _environments()
        made = folder / requirements.digest
        if not _is_there(made):
            await within(timeout_s, _made(requirements, made))
    except Late:
        raise ConfigurationError(
            f"packages: no environment could be made within {timeout_s:g} s: try again, or give python= a venv"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"packages cannot be kept: {error.strerror}: {error.filename}") from None
    return read_venv(made)


async def _made(requirements: Requirements, made: Path) -> None:
    async with _alone(made):
        if _is_there(made):  # another process has made it while this one waited for the lock
            return
        for left in made.parent.glob(f"{made.name}.*"):
            if left.suffix != ".lock":
                await removed(left)
        folder = Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=made.parent))
        try:
            venv = await install(requirements, folder)
            venv.chmod(0o700)
            venv.rename(made)
        finally:
            await to_its_end(partial(removed, folder))


@contextlib.asynccontextmanager
async def _alone(made: Path) -> AsyncIterator[None]:
    """Hold the lock of an environment. The kernel releases the lock of a process that ends."""
    lock = os.open(f"{made}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(PAUSE_S)  # polled, since a thread in flock(2) cannot be cancelled
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # by hand: a forked process may have a copy of the descriptor, and so the lock
    finally:
        os.close(lock)


def _environments() -> Path:
    """Return the folder of all environments, which no other user can write to: code is imported from there. Raise
    ConfigurationError if there is none, and none can be made."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if given.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        raise ConfigurationError("packages cannot be kept: this user has no home: set HOME or XDG_CACHE_HOME") from None
    folder = cache / "rlm-broker" / "environments"
    cache.mkdir(0o700, parents=True, exist_ok=True)  # where the umask is 002, its group could write to it
    found = cache.stat()
    others_may_swap = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if others_may_swap or found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"packages: another user may replace files in {cache}: set XDG_CACHE_HOME to a folder of this user's"
        )
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        _require_own(each)
    return folder.resolve()


def _is_there(made: Path) -> bool:
    if not os.path.lexists(made):
        return False
    _require_own(made)
    return (made / LOCK).is_file()


def _require_own(folder: Path) -> None:
    """Raise ConfigurationError for a folder that another user may have filled."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(
            f"packages: {folder} is not a folder that this user alone can write to: remove it, or set XDG_CACHE_HOME"
        )


LOCK = "packages.lock"
"""File of an environment with its packages, as lines of `name==version` with hashes."""
SAID_LINES, SAID_BYTES = 8, 4096
"""Last lines of a failed installer's output in the error, and last bytes of it to find them in."""
ONLY_WHEELS = ("--only-binary", ":all:")

_WATCHED = """
import os, select, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ours may be ignored: then no exit status is to be had
os.umask(0o022)  # a worker may run as another user, and is to read what is installed
installer = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
ended = os.pidfd_open(installer.pid)
if ended not in select.select([0, ended], [], [])[0]:
    os.killpg(0, 9)  # the orchestrator is gone, or does not want it any more
if installer.wait() == 0:
    open("succeeded", "x")
"""
"""Program that runs its arguments as a program, and ends its whole group when descriptor 0 is closed.

A file reports that the program succeeded: an exit status is lost if the orchestrator ignores SIGCHLD."""
_REDIRECTING = re.compile(
    r"(UV|PIP)_(TARGET|PREFIX|SYSTEM_PYTHON|BREAK_SYSTEM_PACKAGES|ROOT|USER|PYTHON|REQUIREMENT|EDITABLE|NO_BINARY|REQUIRE_VIRTUALENV)"
)
"""Variables by which an installer puts packages elsewhere, or installs others."""


async def install(requirements: Requirements, folder: Path) -> Path:
    """Make a virtual environment with these packages below an empty folder, and return its folder.

    If the caller is cancelled, the installer's process group is ended. Raise ConfigurationError if there is no
    installer, or with the last lines of one that failed.
    """
    venv, listed = folder / "venv", folder / "requirements.txt"
    listed.write_text("".join(f"{text}\n" for text in requirements.texts))
    python, lock = venv / "bin" / "python", venv / LOCK
    await _run([sys.executable, "-I", "-m", "venv", "--without-pip", "--symlinks", str(venv)], folder)
    if not requirements.texts:
        lock.touch()
    elif (uv := shutil.which("uv")) is not None:
        chosen = ["--python", str(python), *ONLY_WHEELS, "--quiet"]
        compiling = ["pip", "compile", str(listed), *chosen, "--generate-hashes", "--no-header", "--no-annotate"]
        await _run([uv, *compiling, "--output-file", str(lock)], folder)
        copying = ["--require-hashes", "--link-mode", "copy"]
        await _run([uv, "pip", "install", *chosen, *copying, "--requirement", str(lock)], folder)
        with contextlib.suppress(ConfigurationError):  # wheels may have files for other versions, which do not compile
            # Not by uv: it would start the environment's own Python, and so run code in .pth files.
            await _run([sys.executable, "-I", "-S", "-m", "compileall", "-q", str(venv / "lib")], folder)
    elif importlib.util.find_spec("pip") is not None:
        report = folder / "report.json"
        said = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--report", str(report)]
        pip = [sys.executable, "-I", "-m", "pip", "--python", str(python), "install", *ONLY_WHEELS, *said]
        await _run([*pip, "--requirement", str(listed)], folder)
        lock.write_text("".join(_locked(json.loads(report.read_text()))))
    else:
        raise ConfigurationError(
            "packages: neither uv is on PATH nor pip in this Python: install one of them, or give python= a venv"
        )
    return venv


def _locked(report: Mapping[str, Sequence[Mapping[str, Mapping[str, object]]]]) -> list[str]:
    """Return the lines of a lock file for pip's report of what it has installed."""
    lines = []
    for each in report["install"]:
        archive = each["download_info"].get("archive_info")
        known = [f" --hash={kind}:{value}" for kind, value in _hashes(archive if isinstance(archive, dict) else {})]
        metadata = each["metadata"]
        lines.append(f"{metadata['name']}=={metadata['version']}{''.join(known)}\n")
    return sorted(lines)


def _hashes(archive: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return kinds and values of a wheel's hashes. Reports of pip before 23.1 have one, as `kind=value`."""
    kind, _, value = (archive.get("hash") or "").partition("=")
    return [*(archive.get("hashes") or ({kind: value} if value else {})).items()]


async def _run(command: list[str], folder: Path) -> None:
    """Run a program in `folder`, in a process group of its own, which ends with this call. Raise ConfigurationError
    with the last lines of a program that failed."""
    said, succeeded = folder / "said.txt", folder / "succeeded"
    succeeded.unlink(missing_ok=True)
    with said.open("wb") as output, FORKING:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHED, *command],
            env=_environment(),
            cwd=folder,  # not the user's folder: a project of another author may have settings for installers there
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdin is not None
        left_to_parent(process.stdin, IO.close)
    try:
        await _ended(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Ends what the installer left. The group's number is its pid, and stays taken until `wait`.
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait()
    if not succeeded.exists():
        raise ConfigurationError(_failure(said))


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the process to end, and leave its exit status for `wait`."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # SIGCHLD is ignored, and it has ended already
        return
    try:
        await ended(pidfd)
    finally:
        os.close(pidfd)


def _environment() -> dict[str, str]:
    """Return our variables (proxies, indexes, certificates), without keys for anything else."""
    kept = {}
    for name, value in os.environ.items():
        is_installers = name.startswith(("UV_", "PIP_"))
        if (is_installers or not is_secret_name(name)) and not _REDIRECTING.fullmatch(name):
            kept[name] = value
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
        kept.pop(name, None)
    return kept


def _addresses() -> list[str]:
    """Return the addresses in our variables for installers. They are redacted, since any part may be a token."""
    given = [value for name, value in os.environ.items() if name.startswith(("UV_", "PIP_")) or "PROXY" in name.upper()]
    return [address for value in given for address in value.split() if "://" in address]


def _failure(said: Path) -> str:
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - SAID_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    told = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line.strip()]
    shown = " ".join(" ".join(line.split()) for line in told[-SAID_LINES:])
    shown = redact(without_credentials(shown), [*secrets_of_environment(), *_addresses()])
    return f"packages cannot be installed (from wheels alone: a source distribution would run its code here): {shown}"
