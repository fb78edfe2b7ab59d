"""The same attacks once more, started by an ordinary user: other layers hold them then.

Where the tests are run by root. He becomes user 1000 of a user namespace, without capabilities. To files he is still
root's user, so only the isolation keeps him from them.
"""

import os
import re
import subprocess
import sys

import pytest

from sandbox_worker.isolation import syscalls
from tests.support.places import PROJECT
from tests.support.skips import NEEDS_ROOT

WAIT_S = 280
AS_USER = f"""
import os, sys
sys.path.insert(0, {str(PROJECT)!r})
from sandbox_worker.isolation import syscalls
syscalls.unshare({syscalls.CLONE_NEWUSER})
for name, text in (("setgroups", "deny"), ("uid_map", "1000 0 1"), ("gid_map", "1000 0 1")):
    open(f"/proc/self/{{name}}", "w").write(text)
assert os.getuid() == 1000
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""
SAME_FOR_ALL = "libraries_for_data_work or cpu_time_of_orphans or test_ruined_repl"
"""No attack; init's count of CPU time; code that ruins its own REPL alone."""
SAME_USER = ("files", "host_files", "machinery")
"""Attacks that another user would not stop: at `standard`, what keeps the rest out is the same for every user."""
WITHOUT_LEVELS = ("bodies", "siege")
"""Attacks on servers, whose imports take seconds."""
FEWEST = 25
"""Tests that must pass at least: each makes many attacks."""


@pytest.mark.skipif(os.getuid() != 0, reason=NEEDS_ROOT)
def test_attacks_are_held_for_ordinary_users() -> None:
    at_standard = " or ".join(f"test_{name}.py" for name in SAME_USER)
    at_levels = f"strict] or strict- or other_processes_of_the_family or (standard and ({at_standard}))"
    chosen = f"({at_levels}) and not ({SAME_FOR_ALL})"
    options = ["tests/attacks", "-k", chosen, "-n", "0", "-q", "-p", "no:cacheprovider"]
    options += [f"--ignore=tests/attacks/test_{name}.py" for name in WITHOUT_LEVELS]
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    if "PermissionError" in done.stderr:
        pytest.skip("this root may not make a user namespace")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= FEWEST
