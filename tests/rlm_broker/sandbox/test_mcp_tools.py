"""Tools of MCP servers in code: a real server, started by its command."""

import gc
import signal
import sys
import weakref
from collections.abc import Iterator

import pytest

from rlm_broker import RLM, ConfigurationError, ScriptedClient, Tools
from rlm_broker.sandbox.mcp_tools import McpTools
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.processes import living_below
from tests.support.waiting import until_now

SERVER = """
import logging
from mcp.server import MCPServer

logging.disable()
server = MCPServer("shop")

@server.tool()
def stock(item: str, at_least: int = 1) -> bool:
    "Whether there are that many of an item."
    return {"lens": 4}[item] >= at_least

@server.tool(name="list-items")
def items() -> list[str]:
    "All items."
    return ["lens", "tripod"]

server.run("stdio")
"""
CALLS = """```repl
print(stock("lens", at_least=3), stock("lens", 5), list_items(), LIMIT)
for wrong in ("telescope", 5):
    try:
        stock(wrong)
    except Exception as error:
        print(error)
```"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def tools(command: list[str]) -> Iterator[McpTools]:
    with Tools.from_mcp(command, {"LIMIT": 3}) as opened:
        yield opened


def test_code_calls_tools_with_their_schemas(tools: McpTools, open_sandbox: Sandbox) -> None:
    client = ScriptedClient([CALLS, "FINAL(done)"])
    done = RLM(client, tools=tools, sandbox=open_sandbox).completion("text", "?")
    assert done.trajectory[0].blocks[0].stdout.splitlines() == [
        "True False ['lens', 'tripod'] 3",
        "stock() raised RuntimeError: Error executing tool stock",
        "stock(): item: 5 is not of type 'string'",
    ]
    prompt = str(client.requests[0].messages[0].content)
    assert "`stock(item, at_least=1)`: Whether there are that many of an item." in prompt


def test_servers_have_their_names_in_front_and_end_with_the_tools(command: list[str]) -> None:
    before = living_below()
    tools = Tools.from_mcp({"one": command, "two": " ".join(command)})
    assert tools.names == ["one_stock", "one_list_items", "two_stock", "two_list_items"]
    assert len(living_below() - before) == 2
    tools.close()
    tools.close()
    until_now(lambda: not living_below() - before)


def test_dropped_tools_end_their_servers(command: list[str]) -> None:
    before = living_below()
    tools = weakref.ref(Tools.from_mcp(command))
    gc.collect()
    assert tools() is None
    until_now(lambda: not living_below() - before)


def test_server_that_cannot_be_used_is_a_sentence(command: list[str]) -> None:
    before = living_below()
    wrong: dict[str, object] = {
        "No such file": "nonexistent-command",
        "Connection closed": [sys.executable, "-c", "1"],
        "a server must be an address": 5,
    }
    for why, server in wrong.items():
        with pytest.raises(ConfigurationError, match=why):
            Tools.from_mcp(server)
    with pytest.raises(ConfigurationError, match=r"did not answer within timeout_s = 0\.1"):
        Tools.from_mcp([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.1)
    with pytest.raises(ConfigurationError, match="two tools have one name"):
        Tools.from_mcp(command, {"stock": 1})
    until_now(lambda: not living_below() - before)


def test_ctrl_c_while_a_server_is_awaited_ends_it() -> None:
    before = living_below()
    interrupting = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a runner of tests may have replaced
    try:
        with pytest.raises(KeyboardInterrupt):
            Tools.from_mcp([sys.executable, "-c", interrupting], timeout_s=60)
    finally:
        signal.signal(signal.SIGINT, handler)
    until_now(lambda: not living_below() - before)
