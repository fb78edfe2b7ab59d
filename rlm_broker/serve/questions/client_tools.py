"""Tools of a client: functions in the REPL whose call waits for a result that the client's next request brings."""

import asyncio
import builtins
import itertools
import json
import keyword
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from rlm_broker.concurrency.threads import aside
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.questions.conversation import CONVERSATION
from rlm_broker.serve.questions.schemas import Room, safe_schema
from rlm_broker.values.json_schemas import CheckedSchema
from sandbox_worker.wire.names import RESERVED

ID_BYTES: Final = 16
"""Random bytes of a call's id, which an attacker cannot guess."""
GATHER_S: Final = 0.05
"""Seconds without a further call after which the calls so far are sent to the client, together."""
MOST_OPEN: Final = 128
"""Calls of one run that wait for results; a further one fails."""
MOST_TOOLS: Final = 128
"""Tools of one request."""
LONGEST_S: Final = 86_400.0
"""Seconds of one call. The run ends sooner: it outlives a response with calls for `wait_s` only."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that a client has described.

    Attributes:
        name: Name that the client gave it.
        description: Description for the model.
        schema: JSON Schema of its arguments, an object.
    """

    name: str
    description: str
    schema: CheckedSchema

    @classmethod
    def of(cls, name: Any, description: Any, schema: Any, param: str, room: Room | None = None) -> "FunctionTool":
        """Return a function as a request describes it.

        Args:
            name, description, schema: Its description; the latter two may be None.
            param: Place of the description in the request.
            room: Room of all tools of the request, or None.

        Raises:
            ApiError: 400: a part of it cannot be used.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ApiError(400, f"{param}.name must have 1 to 64 letters, digits, _ or -", param=f"{param}.name")
        if not isinstance(description, str | None):
            raise ApiError(400, f"{param}.description must be text", param=f"{param}.description")
        at = f"{param}.parameters"
        given = {"type": "object", **(schema or {})} if isinstance(schema, Mapping | None) else {}
        if given.get("type") != "object":
            raise ApiError(400, f'{at} must be a JSON Schema with "type": "object"', param=at)
        if room is not None:
            room.take(chars=len(description or ""))
        return cls(name, description or "no description", safe_schema(given, at, room))


def tools_of(described: Iterable[tuple[Any, Any, Any, str]]) -> tuple[FunctionTool, ...]:
    """Return the functions of a request. Their check takes up to some seconds: call it in a thread.

    Args:
        described: Name, description, schema and place in the request of each.

    Raises:
        ApiError: 400: there are too many, or one cannot be used.
    """
    given = list(itertools.islice(described, MOST_TOOLS + 1))
    if len(given) > MOST_TOOLS:
        raise _too_many()
    room = Room("tools")
    return tuple(FunctionTool.of(*each, room) for each in given)


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One call of a client's tool by code.

    Attributes:
        id: Unguessable text, such as "call_5f...".
        name: Name of the tool, as the client gave it.
        arguments: Its arguments as JSON text.
        result: Takes the result.
    """

    id: str
    name: str
    arguments: str
    result: "asyncio.Future[str]" = field(repr=False)


class ClientTools:
    """Tools of the client of one run, and the calls that wait for results.

    Args:
        tools: The tools.
        wait_s: Seconds for which the run goes on after a response with calls.
        one_at_a_time: Whether the client gets one call in each response.

    Attributes:
        wait_s: As given.
        away: Makes a context manager in which a call waits for its result; see `HostedRuns.away`.

    Raises:
        ApiError: 400: two tools have the same name, or there are too many.
        ConfigurationError: A schema is not valid.
    """

    def __init__(self, tools: Iterable[FunctionTool], wait_s: float, *, one_at_a_time: bool = False) -> None:
        self._tools: dict[str, FunctionTool] = {}
        for tool in tools:
            if (name := _python_name(tool.name)) in self._tools:
                raise ApiError(400, f"two tools are called {tool.name!r}: give each its own name", param="tools")
            self._tools[name] = tool
        if len(self._tools) > MOST_TOOLS:
            raise _too_many()
        self.wait_s = wait_s
        self._most_offered = 1 if one_at_a_time else MOST_OPEN
        self._open: dict[str, ClientCall] = {}
        self._offered: set[str] = set()
        self._answered: set[str] = set()
        self._made = 0
        self._called = asyncio.Event()
        self.away: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    def __bool__(self) -> bool:
        return bool(self._tools)

    def functions(self) -> dict[str, Any]:
        """Return the functions for `Tools`, by the names that code has for them."""
        return {name: self._function(tool) for name, tool in self._tools.items()}

    async def wanted(self) -> list[ClientCall]:
        """Wait until code waits for results, and return the calls, also those that were returned before."""
        while True:
            while not self._open:
                self._called.clear()
                await self._called.wait()
            made = self._made
            await asyncio.sleep(GATHER_S)
            if self._open and made == self._made:
                calls = list(self._open.values())[: self._most_offered]
                self._offered |= {call.id for call in calls}
                return calls

    def answer(self, results: Mapping[str, str]) -> None:
        """Hand the results of calls to the code that waits for them. A result that came before is kept.

        Args:
            results: Id of a call → its result.

        Raises:
            ApiError: 400: a call that the client was told of has no result.
        """
        is_repeated = self._answered.issuperset(results)
        missing = next((id for id in self._open if id in self._offered and id not in results), None)
        if missing is not None and not is_repeated:
            raise ApiError(400, f"the call {missing!r} has no result: send the results of all calls", param="tools")
        for id, result in results.items():
            call = self._open.pop(id, None)
            if call is not None and not call.result.done():
                call.result.set_result(result)
                self._answered.add(id)

    def _function(self, tool: FunctionTool) -> dict[str, Any]:
        properties = tool.schema.get("properties", {})
        told = f"{tool.description} Returns text. Its arguments as JSON Schema: {json.dumps(tool.schema)}"
        made: dict[str, Any] = {"description": " ".join(told.split()), "timeout_s": LONGEST_S}
        if all(isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) for name in properties):

            async def called(**arguments: Any) -> str:
                return await self._result(tool, arguments)

            return {**made, "tool": called, "schema": tool.schema}

        checked = tool.schema.checked

        async def called_with(arguments: dict[str, Any]) -> str:
            await aside(lambda: checked.require(arguments, "arguments"), checked.whose)
            return await self._result(tool, arguments)

        return {**made, "tool": called_with}

    async def _result(self, tool: FunctionTool, arguments: Mapping[str, Any]) -> str:
        if len(self._open) >= MOST_OPEN:
            raise RuntimeError(f"{MOST_OPEN} calls wait for results: make fewer at a time")
        text = json.dumps(arguments, allow_nan=False)
        id = f"call_{secrets.token_hex(ID_BYTES)}"
        call = ClientCall(id, tool.name, text, asyncio.get_running_loop().create_future())
        self._open[id] = call
        self._made += 1
        self._called.set()
        try:
            async with self.away():
                return await call.result
        finally:
            self._open.pop(id, None)


def _too_many() -> ApiError:
    return ApiError(400, f"there are more than {MOST_TOOLS} tools: give fewer", param="tools")


def _python_name(name: str) -> str:
    """Return the name that code has for a tool: that of the client, as far as Python allows it."""
    made = name.replace("-", "_")
    made = f"tool_{made}" if made[0].isdecimal() or made.startswith("__") else made
    is_taken = keyword.iskeyword(made) or made in (*RESERVED, CONVERSATION) or hasattr(builtins, made)
    return f"{made}_" if is_taken or re.fullmatch(r"(context|history)_\d+", made) else made
