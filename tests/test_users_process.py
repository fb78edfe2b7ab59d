"""The process that uses this package stays as its user has made it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.places import PROJECT

PROGRAM = """
import json, locale, logging, os, resource, signal, sys, threading, warnings

def state():
    return {
        "environment": dict(os.environ),
        "filters": [(each[0], str(each[1]), each[2].__module__.partition(".")[0]) for each in warnings.filters],
        "warnings shown by": repr(warnings.showwarning),
        "handlers of the root": repr(logging.root.handlers),
        "level of the root": logging.root.level,
        "signal handlers": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "hooks": repr([sys.excepthook, threading.excepthook, sys.unraisablehook]),
        "folder": os.getcwd(),
        "search path": sys.path,
        "locale": locale.setlocale(locale.LC_ALL),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }

logged = []

class Kept(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

logging.getLogger("rlm_broker").addHandler(Kept())
logging.getLogger("rlm_broker").setLevel(logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, (1_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = state()

from rlm_broker import RLM, Sandbox
from rlm_broker.broker.clients.litellm import prefetch

RLM("offline").completion("The pump is on deck 2.", "Where is the pump?")
with Sandbox() as sandbox, sandbox.repl() as repl:
    repl.execute("1")
used = state()
litellm = prefetch().result()
print(json.dumps([before, used, state(), logged]))
"""


@pytest.fixture(scope="module")
def states() -> Any:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LITELLM_", "HF_"))}
    environment = {**own, "PYTHONPATH": str(PROJECT), "LITELLM_LOG": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if value != before[name]}


def test_process_state_changes_only_open_files(states: Any) -> None:
    """Runs and sandboxes change one limit of the process, and log that."""
    before, used, _, logged = states
    soft, hard = before["open files"]
    assert changes(before, used) == {"open files": [hard, hard]}
    assert f"this process's soft limit of open files was raised from {soft} to {hard}, its hard one" in logged


def test_litellm_import_keeps_environment(states: Any) -> None:
    """An import of litellm leaves environment and settings as they were."""
    _, used, after, _ = states
    assert changes(used, after).keys() <= {"filters"}
    added = [each for each in after["filters"] if each not in used["filters"]]
    of_all = [message for _, message, module in added if module not in ("urllib3", "requests")]
    assert len(of_all) == 1
    assert "`ReadOnly` qualifier" in of_all[0]  # litellm's calls cause it
