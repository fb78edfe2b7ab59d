"""Tools and JSON Schemas of a client, and the bounds of a request and of a key on them.

A tool is a function in the REPL. Its call waits for a result in the client's next request. Or the answer
itself has to be a call of it (`call_type`): then no run waits for the result.
"""

import asyncio
import builtins
import itertools
import json
import keyword
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rlm_broker import CheckedSchema, ConfigurationError
from rlm_broker.concurrency.threads import aside
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner
from sandbox_worker.wire.names import RESERVED

ID_BYTES: Final = 16
"""Random bytes of the unguessable id of a call."""
GATHER_S: Final = 0.05
"""Seconds without a further call until the calls so far are sent to the client, together."""
MOST_OPEN: Final = 128
"""Calls of one run waiting for results; a further one fails."""
MOST_TOOLS: Final = 128
"""Tools of one request."""
LONGEST_S: Final = 86_400.0
"""Seconds of one call. The run ends sooner: it outlives a response with calls for `wait_s` only."""
MOST_CHARS_OF_ALL: Final = 100_000
"""Characters of all tools of a request."""
MOST_NODES_OF_ALL: Final = 5_000
"""Schemas within all tools of a request."""
MOST_WAITING: Final = 64
"""Checks of schemas of one key waiting for their turn."""
RETRY_AFTER_S: Final = 1.0
"""Seconds until another attempt is reasonable."""
CONVERSATION: Final = "conversation"
"""Name of the variable holding the earlier messages."""
Take = Callable[[int, int], None]
"""Takes so many characters and parts of a schema from what a request may have, or refuses them."""
T = TypeVar("T")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function described by a client.

    Attributes:
        name: Name given by the client.
        description: Description for the model.
        schema: JSON Schema of its arguments, an object.
        namespace: Namespace given by the client, or None. Code has the namespace before the name.
    """

    name: str
    description: str
    schema: CheckedSchema
    namespace: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], namespace: str | None, param: str, take: "Take") -> "FunctionTool":
        """Return a function as a request describes it.

        Args:
            given: Its name, description and parameters; the latter two may be missing.
            namespace: As for the class.
            param: Place of the description in the request.
            take: Takes its part of what all tools of the request may have.

        Raises:
            ApiError: 400: a part of it cannot be used.
        """
        name, description, schema = given.get("name"), given.get("description"), given.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name if namespace is None else f"{namespace}__{name}"):
            raise ApiError(400, f"{param}.name must have 1 to 64 letters, digits, _ or -", param=f"{param}.name")
        if not isinstance(description, str | None):
            raise ApiError(400, f"{param}.description must be text", param=f"{param}.description")
        at = f"{param}.parameters"
        typed = {"type": "object", **(schema or {})} if isinstance(schema, Mapping | None) else {}
        if typed.get("type") != "object":
            raise ApiError(400, f'{at} must be a JSON Schema with "type": "object"', param=at)
        take(len(description or ""), 0)
        return cls(name, description or "no description", safe_schema(typed, at, take), namespace)

    @property
    def python_name(self) -> str:
        """Name in code: the client's, as far as Python allows it."""
        made = (self.name if self.namespace is None else f"{self.namespace}__{self.name}").replace("-", "_")
        made = f"tool_{made}" if made[0].isdecimal() or made.startswith("__") else made
        is_taken = keyword.iskeyword(made) or made in (*RESERVED, CONVERSATION) or hasattr(builtins, made)
        return f"{made}_" if is_taken or re.fullmatch(r"(context|history)_\d+", made) else made

    def call(self, arguments: Any, result: "asyncio.Future[str] | None" = None) -> "ClientCall":
        """Return a call of it with plain values."""
        text = json.dumps(arguments, allow_nan=False)
        return ClientCall(f"call_{secrets.token_hex(ID_BYTES)}", self.name, text, self.namespace, result)


def tools_of(described: Iterable[tuple[Mapping[str, Any], str | None, str]]) -> tuple[FunctionTool, ...]:
    """Return the functions of a request. Their check takes up to some seconds: call it in a thread.

    Args:
        described: Description, namespace and place in the request of each.

    Raises:
        ApiError: 400: there are too many, one cannot be used, or two have the same name.
    """
    given = list(itertools.islice(described, MOST_TOOLS + 1))
    if len(given) > MOST_TOOLS:
        raise ApiError(400, f"there are more than {MOST_TOOLS} tools: give fewer", param="tools")
    left = [MOST_CHARS_OF_ALL, MOST_NODES_OF_ALL]

    def take(chars: int, nodes: int) -> None:
        left[0] -= chars
        left[1] -= nodes
        if min(left) < 0:
            why = f"have more than {MOST_CHARS_OF_ALL:,} characters, or {MOST_NODES_OF_ALL:,} parts in their schemas"
            raise ApiError(400, f"the tools {why}: give fewer, or simpler ones", param="tools")

    made: dict[str, FunctionTool] = {}
    for each in given:
        tool = FunctionTool.of(*each, take)
        if made.setdefault(tool.python_name, tool) is not tool:
            raise ApiError(400, f"two tools are called {tool.name!r}: give each its own name", param="tools")
    return tuple(made.values())


def call_type(tools: Sequence[FunctionTool]) -> CheckedSchema:
    """Return the type of an answer that is a call of one of some functions: the arguments of a lone one.

    Raises:
        ApiError: 400: the schemas are too large together.
    """
    if len(tools) == 1:
        (tool,) = tools
        return safe_schema({**tool.schema, "description": f"arguments of {tool.name}: {tool.description}"}, "tools")
    calls = []
    for number, tool in enumerate(tools):
        rooted = {key: value for key, value in tool.schema.items() if key != "$schema"}  # a property may be called so
        arguments = _moved(rooted, f"#/anyOf/{number}/properties/arguments")
        properties = {"name": {"const": tool.name}, "arguments": arguments}
        said = {"type": "object", "description": tool.description, "properties": properties}
        calls.append({**said, "required": list(properties)})
    return safe_schema({"description": "a call of one of these functions", "anyOf": calls}, "tools")


def forced_call(tools: Sequence[FunctionTool], answer: Any) -> "ClientCall":
    """Return an answer of `call_type` as a call."""
    if len(tools) == 1:
        return tools[0].call(answer)
    return next(tool for tool in tools if tool.name == answer["name"]).call(answer["arguments"])


def _moved(schema: Any, to: str) -> Any:
    """Return a schema with references that hold within another one."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    if isinstance(pointer := schema.get("$ref"), str):
        moved["$ref"] = f"{to}{pointer.removeprefix('#')}"
    return moved


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One call of a client's tool.

    Attributes:
        id: Unguessable text, for example "call_5f...".
        name: Name of the tool, as the client gave it.
        arguments: Its arguments as JSON text.
        namespace: Namespace of the tool, or None.
        result: Takes the result; None if no run waits for it.
    """

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    result: "asyncio.Future[str] | None" = field(default=None, repr=False)


class ClientTools:
    """Tools of the client of one run, and the calls waiting for results.

    Attributes:
        wait_s: As given.
        away: Makes a context manager in which a call waits for its result; see `HostedRuns.away`.

    """

    def __init__(self, tools: Iterable[FunctionTool], wait_s: float, *, one_at_a_time: bool = False) -> None:
        self._tools = {tool.python_name: tool for tool in tools}
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
        """Return the functions for `Tools`, by their names in code."""
        return {name: self._function(tool) for name, tool in self._tools.items()}

    async def wanted(self) -> list[ClientCall]:
        """Wait until code waits for results, and return all open calls."""
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
        """Hand the results of calls to the code waiting for them. An earlier result is kept.

        Raises:
            ApiError: 400: a call known to the client has no result.
        """
        is_repeated = self._answered.issuperset(results)
        missing = next((id for id in self._open if id in self._offered and id not in results), None)
        if missing is not None and not is_repeated:
            raise ApiError(400, f"the call {missing!r} has no result: send the results of all calls", param="tools")
        for id, result in results.items():
            call = self._open.pop(id, None)
            if call is not None and call.result is not None and not call.result.done():
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
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        call = tool.call(arguments, result)
        self._open[call.id] = call
        self._made += 1
        self._called.set()
        try:
            async with self.away():
                return await result
        finally:
            self._open.pop(call.id, None)


async def checked_in_turn(owner: Owner, check: Callable[[], T]) -> T:
    """Check the schemas of a request in a thread, in the turn of its owner, and return what `check` returns.

    Raises:
        Busy: Many requests of the owner wait for it already.
        ApiError: As for `safe_schema`.
    """

    def work() -> T:
        CheckedSchema.belong_to(owner.name)  # in the thread's copy of the caller's variables
        return check()

    try:
        return await aside(work, owner.name, MOST_WAITING)
    except asyncio.QueueFull:
        said = f"{MOST_WAITING} requests of this key wait for a check of their schemas: try again later"
        raise Busy(said, RETRY_AFTER_S) from None


def safe_schema(schema: Any, param: str, take: Take | None = None) -> CheckedSchema:
    """Return a schema of a client that can be checked in bounded time. Call it by `checked_in_turn`.

    Args:
        schema: Schema of the client.
        param: Place of the schema in the request.
        take: Called with its characters and parts, before its check.

    Raises:
        ApiError: 400: it is no valid schema, too large, or has unsupported keywords.
    """
    try:
        return CheckedSchema(schema, param, take)
    except ConfigurationError as error:
        raise ApiError(400, str(error), param=param) from None
