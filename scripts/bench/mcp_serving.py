"""Times of `rlm-broker mcp` next to a bare server of the SDK: until it is up, and one block through it."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scripts.bench.measure import Effort, by_turns
from scripts.bench.row import OURS, Row, side

BARE = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("bare")
@server.tool()
def echo(text: str) -> str:
    return text
server.run("stdio")
"""
BARE_NAME = "SDK's echo"
OUR_COMMAND = [sys.executable, "-m", "rlm_broker", "mcp"]
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
UP_FACTOR = 1.2
ABOVE_MS = 1.0


class Lines:
    """A client of a server over stdio that does no more than it must.

    Args:
        command: Starts the server.
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._number = 0

    def __enter__(self) -> Self:
        self.ask("initialize", HELLO)
        self._say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the result of its answer."""
        self._number += 1
        self._say({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None
        while True:
            message = json.loads(self._process.stdout.readline())
            if message.get("id") == self._number:
                return dict(message["result"])

    def call(self, name: str, **arguments: object) -> dict[str, Any]:
        """Call a tool, and return its structured result."""
        return dict(self.ask("tools/call", {"name": name, "arguments": arguments})["structuredContent"])

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def starting(effort: Effort) -> list[Row]:
    """Time a server from its command to the list of its tools."""
    with tempfile.TemporaryDirectory() as folder:
        bare = _bare(folder)
        ours, theirs = by_turns(effort.times(20), lambda: [_up_seconds(OUR_COMMAND)], lambda: [_up_seconds(bare)])
    mine, other = side(OURS, "ms", ours), side(BARE_NAME, "ms", theirs)
    return [Row("MCP over stdio, until the tools are listed", mine, [other], [mine.at_most_times(UP_FACTOR, other)])]


def block(effort: Effort) -> list[Row]:
    """Time a block in a live REPL through the server."""
    with tempfile.TemporaryDirectory() as folder, Lines(OUR_COMMAND) as server, Lines(_bare(folder)) as echo:
        repl = server.call("execute_python", code="n = 1")["repl"]
        ours, theirs = by_turns(
            effort.times(400),
            lambda: [_seconds(server, "execute_python", code="1 + n", repl=repl)],
            lambda: [_seconds(echo, "echo", text="1 + n")],
        )
    mine, other = side(OURS, "ms", ours), side(BARE_NAME, "ms", theirs)
    return [Row("MCP over stdio, a block", mine, [other], [mine.at_most((other.median or 0) + ABOVE_MS)])]


def _bare(folder: str) -> list[str]:
    file = Path(folder, "bare.py")
    file.write_text(BARE)
    return [sys.executable, str(file)]


def _up_seconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    with Lines(command) as server:
        server.ask("tools/list", {})
        return time.perf_counter() - began


def _seconds(server: Lines, name: str, **arguments: object) -> float:
    began = time.perf_counter()
    server.call(name, **arguments)
    return time.perf_counter() - began
