"""Runs a module's tests in a copy of the tree, with one fault after the other: `python -m scripts.mutation.server`.

Everything that is slow to import is imported once; each fault gets a fork of this process, with the project's own
modules forgotten. Requests are JSON lines on stdin, answers on stdout: see `Trial` and `Verdict`.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

import hypothesis

Outcome = Literal["passed", "failed", "too slow"]
LOOK_AGAIN_S = 0.01
OPTIONS = (
    "-x",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-o",
    "addopts=--import-mode=importlib",
    "--hypothesis-profile=mutation",
)


@dataclass(frozen=True)
class Trial:
    """One run of tests.

    Attributes:
        path: File that gets another content for it, below the tree.
        source: That content; None is the file as it is.
        tests: Test modules, below the tree; the run ends with the first that fails.
        timeout_s: Seconds until it is ended.
        cpu_s: Seconds of CPU time until it is ended.
    """

    path: str
    source: str | None
    tests: list[str]
    timeout_s: float
    cpu_s: int


@dataclass(frozen=True)
class Verdict:
    """The end of a trial, with its seconds and CPU seconds."""

    outcome: Outcome
    took_s: float
    cpu_s: float


def serve(tree: Path, answers: TextIO) -> None:
    """Answer the trials on stdin until it ends. Each writes the mutated file anew, with a time of its own.

    A file's time is what decides whether its bytecode is still good, in seconds.
    """
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.path[:] = [entry for entry in sys.path if entry]  # the working folder, under another name
    has_imported = False
    changed_at = int(time.time())
    for line in sys.stdin:
        trial = Trial(**json.loads(line))
        path = tree / trial.path
        original = path.read_bytes()
        if not has_imported:
            _import(trial)
            has_imported = True
        try:
            changed_at += 2
            if trial.source is not None:
                path.write_text(trial.source)
            os.utime(path, (changed_at, changed_at))
            verdict = _try(trial)
        finally:
            path.write_bytes(original)
        print(json.dumps(asdict(verdict)), file=answers, flush=True)


def _import(trial: Trial) -> None:
    """Import what the tests need, and forget what is the project's own: a fork imports it with the fault."""
    child = os.fork()  # this one collects, so that bytecode is written
    if child == 0:
        os._exit(_pytest(["--collect-only", *trial.tests]))
    os.waitpid(child, 0)
    for name in ("pytest", "pytest_asyncio"):
        importlib.import_module(name)
    # The first example that fails is enough, and the same are tried each time.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    checks = (hypothesis.HealthCheck.too_slow,)
    hypothesis.settings.register_profile(
        "mutation", deadline=None, derandomize=True, database=None, phases=phases, suppress_health_check=checks
    )
    ours = {path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()}
    module = trial.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    with contextlib.suppress(Exception):  # it is imported again where that matters
        importlib.import_module(module)
    for name in [
        name for name in sys.modules if name.split(".")[0] in ours and not name.startswith("scripts.mutation")
    ]:
        if name != "scripts":
            del sys.modules[name]


def _try(trial: Trial) -> Verdict:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (trial.cpu_s, trial.cpu_s))
        os._exit(_pytest(trial.tests))
    is_late = False
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - began > trial.timeout_s and not is_late:
            is_late = True
            os.kill(child, signal.SIGKILL)
        time.sleep(LOOK_AGAIN_S)
    _end_session(child)
    outcome: Outcome = "too slow" if os.WIFSIGNALED(status) else "failed" if status else "passed"
    return Verdict(outcome, time.monotonic() - began, used.ru_utime + used.ru_stime)


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _pytest(arguments: list[str]) -> int:
    """Run pytest in a process of its own. What it prints is of no interest; nor is what is still open at its end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        import pytest

        return int(pytest.main([*OPTIONS, *arguments]))
    except BaseException:  # noqa: BLE001 - a fault may raise anything, also while tests are collected
        return 1


if __name__ == "__main__":
    answering = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), answering)
