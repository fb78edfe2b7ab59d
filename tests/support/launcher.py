"""Runs a worker in its isolation as some user; what `isolated_worker.py` is for."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import landlock, syscalls
from tests.support.forked_child import in_child
from tests.support.places import PROJECT
from tests.support.skips import NEEDS_ROOT

NOBODY = 65534
ROOT, ORDINARY_USER = "root", "ordinary user"
ROOT_WITH_PUBLIC_PYTHON = "root with a Python that everybody can reach"
USERS = [ROOT, ORDINARY_USER]
SCRATCH_BYTES = 8 << 20
BOUNDS = {
    "max_processes": 16,
    "keep_checkpoints": 1,
    "max_open_files": 64,
    "scratch_bytes": SCRATCH_BYTES,
    "max_scratch_files": 1000,
}


def _strict_is_possible() -> str:
    """Why not, or ""."""
    try:
        flags = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
        in_child(lambda: syscalls.unshare(flags))
        landlock.abi()
    except (AssertionError, OSError) as error:
        return str(error).strip().splitlines()[-1]
    return ""


WHY_NOT_STRICT = _strict_is_possible()
needs_strict = pytest.mark.skipif(bool(WHY_NOT_STRICT), reason=f"strict cannot be had here: {WHY_NOT_STRICT}")


class Launcher:
    """Runs `isolated_worker.py` as some user.

    Args:
        uid: Whose process it is; None for our own.
        python: An interpreter that this user can reach.
        folder: A folder that this user can reach, with a copy of the project.
    """

    def __init__(self, uid: int | None, python: str, folder: Path) -> None:
        self.uid = uid
        self._python = python
        self._folder = folder

    def run(self, **spec: Any) -> dict[str, Any]:
        """Evaluate `probes` in a REPL and `init_probes` in its init, inside the isolation."""
        new_root = Path(tempfile.mkdtemp(dir=self._folder))
        if self.uid is not None:
            os.chown(new_root, self.uid, self.uid)
        defaults = {
            "project": str(self._folder),
            "new_root": str(new_root),
            "level": "strict",
            "hidden": [],
            "allow_exec": False,
            "bounds": BOUNDS,
            "probes": {},
            "init_probes": {},
            "masked_proc": False,
        }
        command = [self._python, "-I", str(self._folder / "isolated_worker.py"), json.dumps(defaults | spec)]
        groups: list[int] | None = None if self.uid is None else []
        done = subprocess.run(
            command, user=self.uid, group=self.uid, extra_groups=groups, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert isinstance(report, dict)
        return report | {"exit code": done.returncode, "stderr": done.stderr}


def _python_for(uid: int) -> str | None:
    """An interpreter that `uid` can start: ours may lie below a private home."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(command, user=uid, group=uid, extra_groups=[], check=False).returncode == 0:
                return python
        except OSError:
            continue
    return None


@contextmanager
def launcher_of(user: str) -> Iterator[Launcher]:
    """A launcher for a kind of user; skips the test where we cannot be that user."""
    uid, python = None, sys.executable
    if user != ORDINARY_USER and os.getuid() != 0:
        pytest.skip(NEEDS_ROOT)
    if user != ROOT and os.getuid() == 0:
        found = _python_for(NOBODY)
        if found is None:
            pytest.skip("no Python of 3.11 or later can be reached by an ordinary user")
        uid, python = None if user == ROOT_WITH_PUBLIC_PYTHON else NOBODY, found
    with tempfile.TemporaryDirectory(prefix="layers-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(
            PROJECT / "sandbox_worker", folder / "sandbox_worker", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(Path(__file__).with_name("isolated_worker.py"), folder)
        yield Launcher(uid, python, folder)
