"""The life of `rlm-broker mcp`: a real process, spoken to in raw lines, and what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker import RLM, ConfigurationError, Models
from rlm_broker.serve.mcp.stdio import _Opening
from tests.support import command
from tests.support.forked_python import Python, python
from tests.support.waiting import WAIT_S, until_now

HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Raw:
    """A client that writes and reads lines."""

    def __init__(self, process: Python) -> None:
        self.process = process
        self._number = 0

    def say(self, method: str, params: dict[str, Any], **id: int) -> None:
        """Send one message."""
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", **id, "method": method, "params": params}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request, and return the result of its answer."""
        self._number += 1
        self.say(method, params, id=self._number)
        assert self.process.stdout is not None
        while True:
            message = json.loads(self.process.stdout.readline())  # a line that is no message fails here
            if message.get("id") == self._number:
                return dict(message["result"])

    def execute(self, code: str) -> dict[str, Any]:
        """Run a block in a new REPL, and return its structured result."""
        called = self.ask("tools/call", name="execute_python", arguments={"code": code})
        return dict(called["structuredContent"])

    def below(self) -> list[psutil.Process]:
        """All processes below the server."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Raw]:
    """A server that has shaken hands."""
    pipe = subprocess.PIPE
    with command.started("mcp", *arguments, stdin=pipe) as process:
        raw = Raw(process)
        try:
            raw.ask("initialize", **HELLO)
            raw.say("notifications/initialized", {})
            yield raw
        finally:
            process.kill()


def end_of(raw: Raw) -> tuple[int, str, str]:
    """The exit code of the server, and what it still writes."""
    out, err = raw.process.communicate(timeout=WAIT_S)
    return raw.process.wait(), out, err


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


@pytest.mark.parametrize("how", ["eof", "SIGINT", "SIGTERM", "SIGHUP"])
def test_server_ends_with_all_its_processes(how: str) -> None:
    """The end of stdin and each signal end the server and all below it, also while a block and a run go on."""
    with started() as raw:
        assert raw.execute("print(1)")["stdout"] == "1\n"
        raw.say("tools/call", {"name": "execute_python", "arguments": {"code": "import time; time.sleep(1000)"}}, id=90)
        raw.execute("2")
        below = raw.below()
        assert len(below) >= 3
        if how == "eof":
            code, out, err = end_of(raw)
        else:
            raw.process.send_signal(signal.Signals[how])
            code, out, err = (raw.process.wait(WAIT_S), "", "")
        assert code == (0 if how == "eof" else 128 + signal.Signals[how])
        assert are_gone(below)
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in out.splitlines())
        assert "Traceback" not in err


def test_killed_server_leaves_no_worker() -> None:
    with started() as raw:
        raw.say("tools/call", {"name": "execute_python", "arguments": {"code": "import time; time.sleep(1000)"}}, id=90)
        raw.execute("import os; os.system('sleep 1000 &')")
        below = raw.below()
        assert len(below) >= 3
        raw.process.kill()
        until_now(lambda: are_gone(below))


def test_server_ends_before_any_sandbox_is_open() -> None:
    """A client that leaves at once leaves no process, and is told nothing on stdout but protocol."""
    with started() as raw:
        raw.ask("tools/list")
        code, out, err = end_of(raw)
        assert (code, out, err) == (0, "", "")
    done = command.run("mcp")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_requests_before_the_end_of_stdin_are_answered() -> None:
    """Also a line that is no message gets an answer, which names no request."""
    lines = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        "{no json",
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    ]
    said = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    done = command.run("mcp", stdin=said.encode())
    answers = {message["id"]: message for message in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, done.stderr, set(answers)) == (0, "", {1, 2, None})
    assert answers[None]["error"]["code"] == -32700
    assert answers[2]["result"]["tools"]


@pytest.mark.parametrize("closes_stdin", [False, True])
def test_client_that_reads_no_more_ends_it(closes_stdin: bool) -> None:
    with started() as raw:
        assert raw.process.stdout is not None
        assert raw.process.stderr is not None
        raw.process.stdout.close()
        raw.say("tools/list", {}, id=90)
        if closes_stdin:
            assert raw.process.stdin is not None
            raw.process.stdin.close()
        assert raw.process.wait(WAIT_S) == 0
        assert raw.process.stderr.read() == ""


def test_code_in_sandbox_does_not_reach_the_wire() -> None:
    """Bytes that code writes to descriptors 1 and 2 are its output, and no message of the protocol."""
    with started() as raw:
        ran = raw.execute("import os; os.write(1, b'{}\\n'); os.write(2, b'x\\n'); None")
        assert (ran["stdout"], ran["stderr"]) == ("{}\n", "x\n")
        assert end_of(raw)[:2] == (0, "")


def test_isolation_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    """A sandbox that cannot be opened fails each call by its sentence, and the server goes on."""
    folder = tmp_path / "no-venv"
    folder.mkdir()
    with started("--python", str(folder)) as raw:
        for _ in range(2):
            called = raw.ask("tools/call", name="execute_python", arguments={"code": "1"})
            assert called["isError"]
            assert str(folder) in called["content"][0]["text"]


async def test_failed_openings_leave_nothing_open(tmp_path: Path) -> None:
    """Each call tries again: what one attempt has opened, such as an exporter of spans, is closed by its end."""
    is_open: list[bool] = []

    @contextlib.asynccontextmanager
    async def around() -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            is_open.append(True)
            stack.callback(is_open.pop)
            yield

    opening = _Opening(lambda: RLM("offline", models=Models(record=tmp_path / "no" / "run.jsonl")), os.sep, around)
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            await opening.begin()
        assert is_open == []


def test_config_is_what_clients_want() -> None:
    """`--config` prints the JSON with the arguments that were given, and starts no server."""
    done = command.run("mcp", "--model", "offline", "--config", "--root", os.sep)
    server = json.loads(done.stdout)["mcpServers"]["rlm"]
    assert server["args"] == ["mcp", "--model", "offline", "--root", os.sep]
    assert server["command"]


def test_config_has_absolute_paths(tmp_path: Path) -> None:
    """A client starts the command in a folder of its own."""
    (tmp_path / "logs").mkdir()
    options = ["mcp", "--root", "logs", "--tools=../tools.py", "--config"]
    done = python("-m", "rlm_broker", *options, env=command.ENVIRONMENT, check=True, cwd=tmp_path)
    args = json.loads(done.stdout)["mcpServers"]["rlm"]["args"]
    assert args == ["mcp", "--root", str(tmp_path / "logs"), f"--tools={tmp_path.parent / 'tools.py'}"]


def test_wrong_settings_are_a_sentence() -> None:
    for arguments, sentence in {
        ("--limit", "x=1"): "there is no such limit",
        ("--root", "/nonexistent"): "/nonexistent is not a folder",
        ("--root", "/nonexistent", "--config"): "/nonexistent is not a folder",
    }.items():
        done = command.run("mcp", *arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_missing_extra_is_a_sentence(tmp_path: Path) -> None:
    """Without the SDK, or without Ray for a cluster, the command says what to install."""
    for package, options in {"mcp": [], "ray": ["--set", "cluster=auto"]}.items():
        blocked = (
            f"import sys; sys.argv = ['rlm-broker', 'mcp', *{options}]\n"
            "for name in [name for name in sys.modules if name.startswith(('mcp', 'rlm_broker.serve.mcp'))]: "
            f"del sys.modules[name]\nsys.modules[{package!r}] = None\n"
        )
        code = f"{blocked}from rlm_broker.cli.main import main; main()"
        done = python("-c", code, cwd=tmp_path, env=command.ENVIRONMENT)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), package
        assert done.stderr.strip().endswith(f"pip install 'rlm-broker[{package}]'")
