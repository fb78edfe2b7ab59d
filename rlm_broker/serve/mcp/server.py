"""The server of the protocol: lists the tools, checks arguments, and returns results in the forms that clients read."""

import importlib.metadata
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import mcp_types as types
import pydantic
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from rlm_broker.errors import RlmBrokerError
from rlm_broker.serve.mcp import forms
from rlm_broker.values.text import encodable
from rlm_broker.values.validation import complaints, no_such
from rlm_broker.watch.conventions import checked_traceparent, traceparent

if TYPE_CHECKING:
    from rlm_broker.serve.hosting.owner import Owner
    from rlm_broker.serve.mcp.work import Work

NAME = "rlm-broker"
PROGRESS_S = 2.0
"""Seconds between two notifications of progress while the sandbox is started."""
NO_PATHS = "there is no argument 'paths' over HTTP, where no file of the server is read: give the text as context"

_log = logging.getLogger(__name__)


class SdkCall:
    """One call of a tool, as the SDK has it.

    Args:
        context: The request.
        owner: Owner of what the call makes.
    """

    def __init__(self, context: ServerRequestContext[Any, Any], owner: "Owner") -> None:
        self.owner = owner
        self._context = context
        self._began = time.monotonic()

    async def tell(self, seconds: float, doing: str) -> None:
        """Send a notification of progress, if the client has asked for them."""
        seconds = time.monotonic() - self._began
        await self._context.session.report_progress(round(seconds, 1), message=f"{doing}, {seconds:.0f} s")


def server_of(
    work: "Callable[[SdkCall], Awaitable[Work]]",
    owner_of: "Callable[[ServerRequestContext[Any, Any]], Owner]",
    *,
    with_paths: bool,
    block_timeout_s: float,
    on_listed: Callable[[], object] = lambda: None,
    require: Callable[[ServerRequestContext[Any, Any], forms.Right], object] = lambda _context, _right: None,
) -> Server[Any]:
    """Return a server of the tools.

    Args:
        work: Returns the work of the tools, once the sandbox is open.
        owner_of: Returns the owner of a request.
        with_paths: Whether questions may name files.
        block_timeout_s: Compute time of a block in seconds, which the tool says.
        on_listed: Called when a client has asked for the tools.
        require: Raises a `RlmBrokerError` if the owner of a request lacks a right.
    """
    known = {form.name: form for form in forms.forms(with_paths=with_paths)}
    listed = types.ListToolsResult(tools=[_tool(form, block_timeout_s) for form in known.values()])

    async def list_tools(
        _context: ServerRequestContext[Any, Any], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        on_listed()
        return listed

    async def call_tool(
        context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        form = known.get(params.name)
        if form is None:
            raise MCPError(types.INVALID_PARAMS, no_such("tool", params.name, known))
        try:
            arguments = form.arguments.model_validate(params.arguments or {})
        except pydantic.ValidationError as error:
            if form is forms.ASK_TEXT and "paths" in (params.arguments or {}):
                return _refusal(NO_PATHS)
            return _refusal(f"the arguments cannot be used: {complaints(error, 'they', 'argument')}")
        _continue_trace(context)
        call = SdkCall(context, owner_of(context))
        try:
            require(context, form.right)
            return await (await work(call)).done(call, form, arguments)
        except RlmBrokerError as error:
            return _refusal(str(error))
        except Exception:  # noqa: BLE001 - the SDK would show its text to the client
            _log.exception("the tool %s has failed", form.name)
            return _refusal("the server has failed: its log says why")

    return Server(
        NAME,
        version=importlib.metadata.version("rlm-broker"),
        title=NAME,
        instructions=forms.INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema={tool.name: tool.input_schema for tool in listed.tools}.get,
    )


def _continue_trace(context: ServerRequestContext[Any, Any]) -> None:
    """Make the call a part of the client's trace. Each call has a task, and so a context, of its own."""
    given = (context.meta or {}).get("traceparent")
    if isinstance(given, str) and (parent := checked_traceparent(given)) is not None:
        traceparent.set(parent)


def _tool(form: forms.ToolForm, block_timeout_s: float) -> types.Tool:
    return types.Tool(
        name=form.name,
        title=form.title,
        description=form.description.format(block_timeout=f"{block_timeout_s:g} s"),
        input_schema=form.arguments.model_json_schema(),
        output_schema=form.result.model_json_schema(mode="serialization"),
        annotations=types.ToolAnnotations(
            read_only_hint=form.is_read_only, destructive_hint=form.is_destructive, open_world_hint=form.is_open
        ),
    )


def _refusal(sentence: str) -> types.CallToolResult:
    text = encodable(sentence)
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
