"""Tools of servers of the Model Context Protocol, as functions for code. The host calls them, never a REPL.

Theory of operation. The SDK's client has to be left by the task that entered it. So one task on the background loop
enters the clients of all servers, waits until it is told to stop, and leaves them. A tool is an async function that
makes its call on that loop. The schema of each tool validates its arguments before they are sent.
"""

import asyncio
import concurrent.futures
import contextlib
import re
import shlex
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, TextContent, Tool

from rlm_broker.concurrency.event_loop import EventLoopRef, Job
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.sandbox.tools import Tools

MOST_TOOLS = 256
"""Tools of one server; a server with more is refused, since each has a line in the prompt."""
MOST_DESCRIPTION_CHARS = 1_000
"""Characters of a tool's description in the prompt; a longer one is cut."""
CLOSING_S = 10
"""Seconds that the servers have to end."""

Found = list[tuple[str, Client, Tool]]
"""Name of the function, client and description of each tool."""


class McpTools(Tools):
    """Tools of MCP servers, beside functions and values of the user's. `Tools.from_mcp` makes it.

    Example:
        ```python
        import sys

        with Tools.from_mcp([sys.executable, "-m", "rlm_broker", "mcp"]) as tools:  # or a command line, or an address
            print(tools.names[0])  # execute_python
        ```
    """

    def __init__(self, servers: Any, given: Mapping[str, Any] | None, timeout_s: float) -> None:
        require_kind("timeout_s", timeout_s, int, float)
        named = servers if isinstance(servers, Mapping) else {"": servers}
        wanted = [(prefix, _address(server)) for prefix, server in named.items()]
        loop = EventLoopRef.background()
        if loop.is_here:
            raise ConfigurationError("Tools.from_mcp waits for its servers: call it in another thread")
        stop = asyncio.Event()
        opened: concurrent.futures.Future[Found] = concurrent.futures.Future()
        self._job: Job[None] = loop.job(_connected(wanted, opened, stop))
        self._job.start()
        self._end = weakref.finalize(self, loop.call_soon, stop.set)
        try:
            found = opened.result(timeout_s)
            tools = {name: _tool(client, tool, loop) for name, client, tool in found}
            if len(tools) < len(found) or (given and tools.keys() & given.keys()):
                raise ConfigurationError("two tools have one name: give the servers as a dict, with a name for each")
            super().__init__({**tools, **(given or {})})
        except BaseException as error:  # Ctrl+C as well
            if not opened.done():
                self._job.cancel()  # it still waits for a server, and not to be stopped
            self.close()
            if isinstance(error, TimeoutError):
                raise ConfigurationError(f"the MCP server did not answer within timeout_s = {timeout_s:g}") from None
            raise

    def close(self) -> None:
        """End the connections, and the servers that were started. A second call has no effect.

        Example:
            ```python
            import sys

            tools = Tools.from_mcp([sys.executable, "-m", "rlm_broker", "mcp"])
            tools.close()
            ```
        """
        self._end()
        with contextlib.suppress(Exception):
            self._job.result(CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _connected(
    wanted: Sequence[tuple[str, str | StdioServerParameters]],
    opened: "concurrent.futures.Future[Found]",
    stop: asyncio.Event,
) -> None:
    """Hold the connections until `stop` is set."""
    try:
        async with contextlib.AsyncExitStack() as own:
            found: Found = []
            for prefix, address in wanted:
                client = await own.enter_async_context(Client(address))
                found += [(_name(prefix, tool.name), client, tool) for tool in await _listed(client)]
            opened.set_result(found)
            await stop.wait()
    except BaseException as error:
        if not opened.done():
            why = _first(error)
            opened.set_exception(ConfigurationError(f"the MCP server cannot be used: {type(why).__name__}: {why}"))
            return
        raise


async def _listed(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MOST_TOOLS:
            raise ConfigurationError(f"it has more than {MOST_TOOLS} tools")
        if cursor is None:
            return tools


def _address(server: Any) -> str | StdioServerParameters:
    """Return the server in a form that the SDK takes: an address, or the command that starts it."""
    if isinstance(server, StdioServerParameters) or (isinstance(server, str) and re.match("https?://", server)):
        return server
    command = shlex.split(server) if isinstance(server, str) else server
    if not isinstance(command, list | tuple) or not command or not all(isinstance(each, str) for each in command):
        raise ConfigurationError("a server must be an address, a command line, or a list of a command's words")
    return StdioServerParameters(command=command[0], args=[*command[1:]])


def _name(prefix: str, name: str) -> str:
    """Return the name of a tool as an identifier: servers use dots, dashes and slashes as well."""
    return re.sub(r"\W", "_", f"{prefix}_{name}" if prefix else name)


def _tool(client: Client, tool: Tool, loop: EventLoopRef) -> dict[str, Any]:
    async def call(**arguments: Any) -> Any:
        return _value(await loop.arun(client.call_tool(tool.name, arguments)))

    function: Callable[..., Any] = call
    described = " ".join((tool.description or tool.title or tool.name).split())[:MOST_DESCRIPTION_CHARS]
    return {"tool": function, "description": described, "schema": {"type": "object", **tool.input_schema}}


def _value(result: CallToolResult) -> Any:
    """Return the value of a call: its structured content, else its text.

    Raises:
        RuntimeError: The tool says that it failed.
    """
    texts = [each.text if isinstance(each, TextContent) else f"[{each.type}]" for each in result.content]
    if result.is_error:
        raise RuntimeError("\n".join(texts) or "the tool failed")
    structured = result.structured_content
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        return structured["result"]
    return "\n".join(texts) if structured is None else structured


def _first(error: BaseException) -> BaseException:
    """Return the first error within groups of errors: task groups of the SDK wrap each failure."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
