"""An installer, uv or pip, that puts packages into a new virtual environment: on the host, outside of all sandboxes.

Only wheels are installed: a source distribution would run its author's code on this machine when it is built.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlm_broker.concurrency.forking import FORKING, left_to_parent
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import is_secret_name, redact, secrets_of_environment, without_credentials
from rlm_broker.sandbox.packages.requirements import Requirements
from rlm_broker.sandbox.workers.held_process import ended

LOCK = "packages.lock"
"""File of an environment that lists the installed packages, as lines of `name==version` with hashes."""
SAID_LINES, SAID_BYTES = 8, 4096
"""Last lines of a failed installer's output that the error shows, and last bytes of it that are read for them."""
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
"""Program that runs its arguments as a program, and ends it with all that it started when descriptor 0 is closed.

A file reports that the program succeeded: an exit status is lost if the orchestrator ignores SIGCHLD."""
_REDIRECTING = re.compile(
    r"(UV|PIP)_(TARGET|PREFIX|SYSTEM_PYTHON|BREAK_SYSTEM_PACKAGES|ROOT|USER|PYTHON|REQUIREMENT|EDITABLE|NO_BINARY|REQUIRE_VIRTUALENV)"
)
"""Variables that make an installer put packages elsewhere, or install others."""


async def install(requirements: Requirements, folder: Path) -> Path:
    """Make a virtual environment with these packages below an empty folder, and return its folder.

    If the caller is cancelled, the installer is ended with all that it started.

    Args:
        requirements: List of packages.
        folder: Empty folder.

    Raises:
        ConfigurationError: There is no installer, or it failed. The message has its last lines.
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
            # Not by uv, which would start the environment's own Python: that runs code in .pth files.
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
    """Run a program in `folder`, in a process group of its own. The whole group ends with this call.

    Raises:
        ConfigurationError: The program failed. The message has its last lines.
    """
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
            # Ends all processes that the installer left. The group's number is its pid, which stays taken until `wait`.
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
    """Return our variables, which name proxies, indexes and certificates, without keys that no installer uses."""
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
