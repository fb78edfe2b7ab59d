"""Peers: each installed into an environment of its own, and run in an interpreter of its own."""

import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scripts.bench.row import Side, side

PACKAGES = {
    "rlms": ("rlms", "jupyter_client", "ipykernel"),
    "jupyter": ("jupyter_client", "ipykernel"),
    "sandlock": ("sandlock",),
    "dspy": ("dspy", "deno"),
}
"""Environment → packages. Each peer has its own environment, so that one peer's packages do not change another's."""

ANSWER_S = 120.0
GOODBYE_S = 20.0
LAST_WORDS_CHARS = 160
SCRIPTS = Path(__file__).parent / "peers"


class NotInstallable(Exception):
    """A peer's packages cannot be installed here. The message is a sentence for the table."""


class Peer:
    """A peer's script: it is sent words, one a line, and answers each with a line of JSON.

    Use it as a context manager. A peer that cannot be installed, or dies, has a `problem` and gives no samples; the
    bench goes on without it. One that runs in our own interpreter has no excuse: the `with` raises `RuntimeError`.

    Args:
        name: What the table calls it.
        script: A file in `peers/`.
        environment: A key of `PACKAGES`; None is our own interpreter.
        arguments: For the script.

    Attributes:
        problem: Why it gives no samples; empty if it does.
    """

    def __init__(self, name: str, script: str, environment: str | None = None, *arguments: str) -> None:
        self.name = name
        self.problem = ""
        self._script = script
        self._environment = environment
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer

    def __enter__(self) -> Self:
        try:
            python = Path(sys.executable) if self._environment is None else python_of(self._environment)
        except NotInstallable as error:
            self.problem = str(error)
            return self
        self._process = subprocess.Popen(
            [str(python), str(SCRIPTS / self._script), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,  # or a line that was read with the one before would not wake `select`
            env=os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self.problem:
                self._process.kill()
            try:
                self._process.communicate(timeout=GOODBYE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
        self._complaints.close()
        if self.problem and self._environment is None:
            raise RuntimeError(f"{self.name or self._script} {self.problem}") from error

    def ask(self, word: str) -> Any:
        """Return its answer, or None if it has a problem."""
        if self._process is None or self.problem:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._failed()
        while select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            line = self._process.stdout.readline()
            if not line:
                return self._failed()
            if line.startswith((b"[", b"{")):  # anything else is a library's chatter
                return json.loads(line)
        self.problem = f"no answer to {word!r} within {ANSWER_S:g} s"
        return None

    def samples(self, word: str) -> list[float]:
        """Return the samples of one turn, in seconds, bytes or per second."""
        return self.ask(word) or []

    def side(self, unit: str, samples: list[float]) -> Side:
        """Return its column of a row."""
        return side(self.name, unit, samples, "" if samples else self.problem)

    def _failed(self) -> None:
        self._complaints.seek(0)
        complaint = self._complaints.read()
        errors = b"\n".join(line for line in complaint.splitlines() if b"rror: " in line)  # a trace may come after it
        self.problem = f"does not run here: {_last_words(errors or complaint)}"


@functools.cache
def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, which is made on first use.

    Raises:
        NotInstallable: The message is pip's last line.
    """
    folder = _folder(environment)
    python, installed = folder / "bin" / "python", folder / "installed"
    wanted = " ".join(PACKAGES[environment])
    if installed.is_file() and installed.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {wanted} into {folder}", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[environment]],
    ):
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise NotInstallable(f"not installable here: {_last_words(done.stderr or done.stdout)}")
    installed.write_text(wanted)
    return python


def versions() -> dict[str, str]:
    """Return the versions of all installed peers."""
    return {
        name: found.version
        for environment, names in PACKAGES.items()
        for name in names
        for found in distributions(name=name, path=[str(path) for path in _folder(environment).glob("lib/*/site-*")])
    }


def _folder(environment: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rlm-broker-bench" / f"{environment}-{sys.version_info.major}.{sys.version_info.minor}"


def _last_words(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-LAST_WORDS_CHARS:] if lines else "it said nothing"
