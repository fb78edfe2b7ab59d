"""The process that uses this package stays as its user has made it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.fake_openai import FakeOpenAI, completion
from tests.support.places import PROJECT

PROGRAM = """
import asyncio, json, locale, logging, os, resource, signal, socket, sys, threading, warnings

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

from rlm_broker import RLM, ChatMessage, LiteLLMClient, LMRequest, Sandbox

RLM("offline").completion("The pump is on deck 2.", "Where is the pump?")
with Sandbox() as sandbox, sandbox.repl() as repl:
    repl.execute("1")
used = state()

asked, importers = set(), set()
real = socket.getaddrinfo

def getaddrinfo(host, *args, **kwargs):
    asked.add(host if isinstance(host, str) else host.decode())
    if host in ("provider.test", b"provider.test"):
        return real("127.0.0.1", *args, **kwargs)
    raise socket.gaierror(socket.EAI_NONAME, "no name but the provider's is known here")

socket.getaddrinfo = socket.gethostbyname = socket.gethostbyname_ex = getaddrinfo

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "litellm" and sys._getframe(2).f_code.co_name != "find_spec":  # which only looks whether it is there
            importers.add(threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch())
client = LiteLLMClient("openai/test-model", api_base=sys.argv[1], api_key="sk-test")
assert "litellm" not in sys.modules
reply = asyncio.run(client.complete(LMRequest((ChatMessage("user", "hello"),))))
print(json.dumps([before, used, state(), logged, [reply.text, sorted(asked), sorted(importers)]]))
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("folder")
    (folder / ".env").write_text("CANARY_OF_THE_TEST=1\nOPENAI_API_BASE=http://elsewhere\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LITELLM_", "HF_"))}
    environment = {**own, "PYTHONPATH": str(PROJECT), "LITELLM_LOG": "WARNING"}
    with FakeOpenAI(completion("hi")) as server:
        command = [sys.executable, "-c", PROGRAM, f"http://provider.test:{server.port}/v1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return json.loads(done.stdout)


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if value != before[name]}


def test_process_state_changes_only_open_files(states: Any) -> None:
    """Runs and sandboxes change one limit of the process, and log that."""
    before, used, _, logged, _ = states
    soft, hard = before["open files"]
    assert changes(before, used) == {"open files": [hard, hard]}
    assert f"this process's soft limit of open files was raised from {soft} to {hard}, its hard one" in logged


def test_call_by_litellm_has_no_side_effects(states: Any) -> None:
    """A call contacts no other host, imports off the loop, reads no file of variables, and changes no setting."""
    _, used, after, _, called = states
    assert called == ["hi", ["provider.test"], [False]]
    assert changes(used, after).keys() <= {"filters"}
    added = [each for each in after["filters"] if each not in used["filters"]]
    of_all = [message for _, message, module in added if module not in ("urllib3", "requests")]
    assert len(of_all) == 1
    assert "`ReadOnly` qualifier" in of_all[0]  # litellm's calls cause it
