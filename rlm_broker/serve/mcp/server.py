"""The server of the protocol: lists the tools, checks arguments, and returns results in the forms that clients read."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import mcp_types as types
import pydantic
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from rlm_broker import RlmBrokerError, __version__
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.mcp import forms
from rlm_broker.values.text import encodable
from rlm_broker.values.validation import first_complaint, no_such
from rlm_broker.watch.conventions import continue_trace

if TYPE_CHECKING:
    from rlm_broker.serve.mcp.work import Work

NAME = "rlm-broker"
_log = logging.getLogger(__name__)


class ToolCall:
    """One call of a tool."""

    def __init__(self, context: ServerRequestContext[Any, Any], owner: Owner) -> None:
        self.owner = owner
        self._context = context
        self._began = time.monotonic()

    async def tell(self, doing: str) -> None:
        """Send a notification of progress, if the client has asked for them."""
        seconds = time.monotonic() - self._began
        await self._context.session.report_progress(round(seconds, 1), message=f"{doing}, {seconds:.0f} s")


def server_of(
    work: "Callable[[ToolCall], Awaitable[Work]]",
    key_of: Callable[[ServerRequestContext[Any, Any]], ServerKey],
    *,
    with_paths: bool,
    block_timeout_s: float,
    on_listed: Callable[[], object] = lambda: None,
) -> Server[Any]:
    """Return a server of the tools.

    Args:
        work: Returns the work of the tools, once the sandbox is open.
        key_of: Returns the key of a request: the owner of what it makes, and what it may do.
        with_paths: Whether questions may name files.
        block_timeout_s: Compute time of a block in seconds, for the tool's description.
        on_listed: Called when a client has asked for the tools.
    """
    known = {form.name: form for form in forms.forms(block_timeout_s, with_paths=with_paths)}
    listed = types.ListToolsResult(tools=list(map(_tool, known.values())))

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
            _, said = first_complaint(error, "they", "argument", known=form.arguments.model_fields)
            if form.arguments is forms.Question and "paths" in (params.arguments or {}):
                said += ": over HTTP no file of the server is read, so give the text as context"
            return _refusal(f"the arguments cannot be used: {said}")
        if (trace := (context.meta or {}).get("traceparent")) is not None:
            continue_trace(trace)  # each call has a task, and so a context, of its own
        try:
            call = ToolCall(context, key_of(context).require(form.right))
            return await (await work(call)).done(call, arguments)
        except (RlmBrokerError, ApiError) as error:
            return _refusal(str(error))
        except Exception:  # noqa: BLE001 - the SDK would show its text to the client
            _log.exception("the tool %s has failed", form.name)
            return _refusal("the server has failed: its log says why")

    return Server(
        NAME,
        version=__version__,
        title=NAME,
        instructions=forms.INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        get_tool_input_schema={tool.name: tool.input_schema for tool in listed.tools}.get,
    )


def _tool(form: forms.ToolForm) -> types.Tool:
    hints = dict.fromkeys(("read_only_hint", "destructive_hint", "open_world_hint"), False)
    return types.Tool(
        name=form.name,
        title=form.title,
        description=form.description,
        input_schema=form.arguments.model_json_schema(),
        output_schema=form.result.model_json_schema(mode="serialization"),
        annotations=types.ToolAnnotations.model_validate({**hints, **({form.hint: True} if form.hint else {})}),
    )


def _refusal(sentence: str) -> types.CallToolResult:
    text = encodable(sentence)  # lone surrogates are no JSON
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
