"""The user's functions for code in a REPL. They run in the orchestrator, with validated arguments."""

import asyncio
import contextvars
import dataclasses
import inspect
import math
import re
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlm_broker.concurrency.deadline import Late, closed_if_deaf, within
from rlm_broker.concurrency.threads import DaemonThreads, aside
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.values.names import require_name
from rlm_broker.values.validation import Unfit, complaints
from sandbox_worker.wire.counts import MAX_VALUES, has_more_values_than
from sandbox_worker.wire.encoding import with_article
from sandbox_worker.wire.errors import ValueInvalid, ValueProblem, ValueRefused
from sandbox_worker.wire.messages import Slot
from sandbox_worker.wire.values import decode, encode, has_tags

if TYPE_CHECKING:
    from rlm_broker.sandbox.mcp_tools import McpTools

_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+")
"""An absolute path of this machine, up to its last slash. It is cut out of errors for a model."""
MAX_ARGUMENT_CHARS = 4 << 20
"""Characters of the arguments of one call, as JSON; a call with more is refused."""
SHOWN_NAME_CHARS = 80
"""Characters of a name in an error. Model code may give a name of any length."""
MAX_THREADS = 64
"""Calls of blocking tools of one RLM at the same time; further ones wait, within their time limit."""


class ToolFacts(msgspec.Struct, frozen=True):
    """The facts about a function for code.

    Attributes:
        signature: Its parameters and its result, in Python's form.
        description: One paragraph for the model.
        timeout_s: Seconds of one call; None takes `tool_timeout_s` of the limits.
    """

    signature: str
    description: str
    timeout_s: float | None = None


class _Arguments(msgspec.Struct):
    args: list[Any]
    kwargs: dict[str, Any]


class Tools:
    """Functions and values for code.

    Example:
        ```python
        def price(name: str) -> float:
            "Return the price of a part in euros."
            return 5.0

        RLM("offline", tools=Tools({"price": price, "currency": "EUR"}, for_children={}))
        ```

    Args:
        given: Name → a callable (sync or async), a plain value, or `{"tool": either, "description": text}`. A callable
            may also have a `"schema"`, the JSON Schema of an object with its arguments, and `"timeout_s"`: seconds of
            one call in place of `tool_timeout_s` of the limits.
        for_children: The same for child runs; None gives them the tools of their parent, `{}` gives none.

    Attributes:
        names: Names of the callables.
        functions: Name of a callable → its signature, its description and its seconds.
        values: Name → value.
        notes: Name of a value → its description.

    Raises:
        ConfigurationError: A name cannot be used, a callable's arguments cannot be validated, or a value does not
            cross.
    """

    def __init__(self, given: Mapping[str, Any] | None = None, for_children: Mapping[str, Any] | None = None) -> None:
        self._tools: dict[str, _Tool] = {}
        self._threads = DaemonThreads(MAX_THREADS)
        weakref.finalize(self, self._threads.close, RuntimeError("its tools are gone"))
        self.functions: dict[str, ToolFacts] = {}
        self.values: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        for tools in (given, for_children):
            _require_mapping(tools)
        for name, what in (given or {}).items():
            self._add(name, what)
        self._for_children = None if for_children is None else Tools(for_children)

    @staticmethod
    def from_mcp(servers: Any, given: Mapping[str, Any] | None = None, *, timeout_s: float = 30) -> "McpTools":
        """Connect to servers of the Model Context Protocol, and return their tools as functions for code.

        The host calls the servers, so code needs no network and sees no key. Close the tools at the end, or use them
        as a context manager. It waits for the servers; in a coroutine, call it by `asyncio.to_thread`.

        Example:
            ```python
            import sys

            with Tools.from_mcp({"box": [sys.executable, "-m", "rlm_broker", "mcp"]}) as tools:
                print(tools.names[0])  # box_execute_python
            ```

        Args:
            servers: Address (`https://...`), command line, or list of a command's words; or a dict of these by name,
                which is put in front of the names of their tools.
            given: Functions and values of your own, as for `Tools`.
            timeout_s: Seconds until all servers have said which tools they have.

        Raises:
            ConfigurationError: A server cannot be reached, or has tools that cannot be used.
            ExtraMissing: The packages of the extra `mcp` are not installed.
        """
        from rlm_broker.values.extras import require_extra

        with require_extra("mcp", "Tools.from_mcp"):
            from rlm_broker.sandbox.mcp_tools import McpTools
        return McpTools(servers, given, timeout_s)

    def extended(self, given: Mapping[str, Any]) -> "Tools":
        """Return these tools together with further ones, for children as well.

        Example:
            ```python
            Tools({"price": lambda name: 5}).extended({"stock": lambda name: 2}).names
            ```

        Raises:
            ConfigurationError: A name is taken by one of these tools, or as for `Tools`.
        """
        if taken := sorted((self.functions.keys() | self.values.keys()) & given.keys()):
            raise ConfigurationError(f"there is a tool {taken[0]!r} already: give the other one another name")
        made = Tools(given)
        made._tools = {**self._tools, **made._tools}
        made.values = {**self.values, **made.values}
        made.functions = {**self.functions, **made.functions}
        made.notes = {**self.notes, **made.notes}
        made._for_children = None if self._for_children is None else self._for_children.extended(given)
        return made

    @property
    def for_children(self) -> "Tools":
        """Tools of child runs."""
        return self._for_children or self  # never a cycle: the threads end when the last reference goes

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return list(self.functions)

    def documentation(self) -> list[str]:
        """Return a line for each function and value, for a prompt."""
        lines = [f"- `{name}{facts.signature}`: {facts.description}" for name, facts in self.functions.items()]
        return lines + [f"- `{name}`: {self.notes[name]}" for name in self.values]

    def unknown(self, name: str) -> Slot:
        """Return the answer to a call of a missing tool."""
        there_are = ", ".join(self.functions) or "none"
        return Slot(error=f"there is no tool {name[:SHOWN_NAME_CHARS]!r}; there are: {there_are}")

    def refusal(self, name: str, arguments: str) -> Slot | None:
        """Return the answer to a call of a missing tool or with too long arguments; None for any other."""
        if name not in self.functions:
            return self.unknown(name)
        if len(arguments) > MAX_ARGUMENT_CHARS:
            given = f"{len(arguments):,} characters, more than {MAX_ARGUMENT_CHARS:,}"
            return Slot(error=f"{name}() was given {given}: give less at a time")
        return None

    @classmethod
    def of(cls, functions: "Mapping[str, Any] | Tools", scaffold: bool) -> "Tools":
        """Return these functions as tools of a REPL, which has a `scaffold` or none.

        Raises:
            ConfigurationError: As for `Tools`, or one of them is no function.
        """
        if isinstance(functions, Tools):
            made = functions
        else:
            made = Tools()
            for name, what in functions.items():
                made._add(name, what, scaffold)
        if made.values:
            raise ConfigurationError(f"{', '.join(made.values)}: give what is no function in values=")
        return made

    async def call(
        self,
        name: str,
        arguments: str,
        timeout_s: float | None,
        most_bytes: float = math.inf,
        callers: contextvars.Context | None = None,
    ) -> Slot:
        """Call a tool with the arguments of code, an encoded dict of `args` and `kwargs`.

        Args:
            name: Name of the tool.
            arguments: The encoded arguments.
            timeout_s: Seconds, if the tool has none of its own; None sets no limit.
            most_bytes: Bytes of an encoded result; a longer one is refused.
            callers: Context variables that the tool gets, as a copy; None gives it those of this call.

        Returns:
            Its result, encoded; or an error with the traceback of the tool's own lines, without paths of this machine.
        """
        if (refusal := self.refusal(name, arguments)) is not None:
            return refusal
        tool = self._tools[name]
        given = await _decoded(arguments)
        if isinstance(given, str):
            return Slot(error=f"{name}() {given}")
        from pydantic import ValidationError

        limit = "tool_timeout_s" if tool.timeout_s is None else "timeout_s"
        timeout_s = timeout_s if tool.timeout_s is None else tool.timeout_s
        try:
            work = tool.call(given.args, given.kwargs, most_bytes, callers)
            if tool.is_async or timeout_s is not None:  # no task is made for a thread alone: it would take turns
                work = _guarded(work, timeout_s, callers)
            return Slot(text=await work)
        except Late:
            return Slot(error=f"{name}() took longer than {limit} = {timeout_s:g} s")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Slot(error=f"{name}() cancelled itself")
        except ValidationError as error:
            traceback.clear_frames(error.__traceback__)  # else the arguments live until the garbage collector runs
            return Slot(error=f"{name}(): {complaints(error, 'arguments')}")
        except (Unfit, ValueRefused) as refused:
            return Slot(error=f"{name}(): {refused}")
        except Exception as error:  # noqa: BLE001 - the tool is the user's own code: the model reads what it raised
            return Slot(error=_traceback_text(name, error))

    def _add(self, name: str, what: Any, scaffold: bool = True) -> None:
        require_name(name, "a tool", scaffold)
        description = timeout_s = None
        if isinstance(what, dict) and what.get("type") == "function" and "function" in what:
            raise ConfigurationError(
                f"tool {name!r}: that describes a function: give {{'tool': function, 'schema': its parameters}}"
            )
        if isinstance(what, dict) and "tool" in what:
            if what.keys() - {"tool", "description", "schema", "timeout_s"}:
                raise ConfigurationError(
                    f"tool {name!r}: a dict with 'tool' may have 'description', 'schema' and 'timeout_s' as well, and "
                    "no other keys"
                )
            schema, timeout_s = what.get("schema"), what.get("timeout_s")
            require_kind(f"the description of tool {name!r}", what.get("description"), str, type(None))
            require_kind(f"timeout_s of tool {name!r}", timeout_s, int, float, type(None))
            what, description = what["tool"], what.get("description")
            if schema is not None:
                if not callable(what):
                    raise ConfigurationError(f"tool {name!r}: a schema needs a function, whose arguments it describes")
                what = with_schema(what, schema, f"the schema of tool {name!r}")
        if callable(what):
            tool = self._tools[name] = _Tool(name, what, self._threads, timeout_s)
            described = description or _first_paragraph(what)
            self.functions[name] = ToolFacts(tool.signature, described, timeout_s)
            return
        try:
            encoded = encode(what, "it", others=_fields)
        except ValueRefused as refused:
            raise ConfigurationError(f"tool {name!r}: neither a callable nor a value that crosses: {refused}") from None
        self.values[name] = decode(encoded)
        self.notes[name] = description or f"a {type(what).__name__}"


async def _decoded(arguments: str) -> _Arguments | str:
    """Return the arguments of a call, or why the call is refused."""
    encoded = arguments.encode()
    if has_more_values_than(MAX_VALUES, encoded):
        return f"was given more than {MAX_VALUES:,} values: give a text, or fewer at a time"
    try:
        if has_tags(encoded):  # a tag may need a package, whose import would hold the event loop
            return msgspec.convert(await asyncio.to_thread(decode, encoded, MAX_VALUES), _Arguments)
        return msgspec.convert(decode(encoded, MAX_VALUES), _Arguments)
    except ValueInvalid as invalid:
        return f"was given an invalid value: {invalid}"
    except msgspec.ValidationError:
        return "was called with arguments in a form that no REPL sends"


class _Tool:
    """One callable of the user's."""

    def __init__(
        self, name: str, function: Callable[..., Any], threads: DaemonThreads, timeout_s: float | None
    ) -> None:
        import pydantic  # takes as long as all our modules, and few programs have tools

        self.timeout_s = timeout_s
        any_class = pydantic.ConfigDict(arbitrary_types_allowed=True)  # arrays are checked by `isinstance`
        called: Any = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        try:
            self.signature = str(inspect.signature(function))
            self._validated = pydantic.validate_call(config=any_class)(called)
        except Exception as error:  # noqa: BLE001 - pydantic may call methods of the user's class, which raise anything
            why = str(error).splitlines()[0]
            raise ConfigurationError(
                f"tool {name!r}: its arguments cannot be validated ({why}); wrap it in a function"
            ) from None
        self.is_async = inspect.iscoroutinefunction(called)
        self._threads = threads

    async def call(
        self, args: list[Any], kwargs: dict[str, Any], most_bytes: float, callers: contextvars.Context | None
    ) -> str:
        """Call it, and return its result, encoded. A thread has a copy of these context variables."""
        if self.is_async:
            return await self._awaited(partial(self._validated, *args, **kwargs), most_bytes)
        submit = partial(self._threads.submit, partial(_called, partial(self._validated, *args, **kwargs), most_bytes))
        result = await asyncio.wrap_future(submit() if callers is None else callers.copy().run(submit))
        if isinstance(result, str):
            return result
        return await _guarded(self._awaited(lambda: result, most_bytes), None, callers)

    async def _awaited(self, invoke: Callable[[], Awaitable[Any]], most_bytes: float) -> str:
        try:
            return _encoded(await invoke(), most_bytes)
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:  # raised in a task, these end the event loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def _guarded(work: Coroutine[Any, Any, str], timeout_s: float | None, callers: contextvars.Context | None) -> str:
    """Await code of the user's, which may be deaf to its cancellation, in a copy of these context variables."""
    guarded = within(timeout_s, closed_if_deaf(work))
    return await (guarded if callers is None else asyncio.create_task(guarded, context=callers.copy()))


def _called(invoke: Callable[[], Any], most_bytes: float) -> Any:
    """Call a blocking tool in its thread; return its encoded result, or an awaitable for the event loop."""
    try:
        result = invoke()
        return result if isinstance(result, Awaitable) else _encoded(result, most_bytes)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration) as error:
        # A future cannot carry StopIteration; the others would end the event loop that awaits it.
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _encoded(result: Any, most_bytes: float) -> str:
    size = len(result) if isinstance(result, str | bytes) else 0  # looked at before a gigabyte is copied
    encoded = b"" if size > most_bytes else encode(result, "its result", others=_fields)
    if (size := max(size, len(encoded))) > most_bytes:
        raise Unfit(f"its result has {size:,} bytes, more than max_frame_bytes = {most_bytes:,}")
    return encoded.decode()


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a pydantic model or a dataclass.

    Raises:
        ValueProblem: It is neither.
    """
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    made = ": return a list" if isinstance(value, Iterator) else ""
    raise ValueProblem(f"is {with_article(type(value))}, which does not cross{made}")


def _require_mapping(tools: object) -> None:
    if tools is None or isinstance(tools, Mapping):
        return
    named = [getattr(each, "__name__", "name") for each in tools] if isinstance(tools, list | tuple | set) else []
    example = ", ".join(f"{name!r}: {name}" for name in named) or "'name': function"
    raise ConfigurationError(
        f"tools must be a dict from name to function, not {type(tools).__name__}: give {{{example}}}"
    )


def _first_paragraph(function: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(function) or "no description").partition("\n\n")[0].split())


def _traceback_text(name: str, error: BaseException) -> str:
    """Return the error of a tool, and the names of the user's files and functions on its way.

    It has no line of source, since one may hold a secret, and no folder of the host.
    """
    ours = str(Path(__file__).parents[1])
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(ours) and "pydantic" not in frame.filename:
            lines.append(f"  {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}")
    what = "".join(traceback.format_exception_only(error)).strip()
    return _PATH.sub("", "\n".join([f"{name}() raised {what}", *lines[-5:]]))


class _LeftOut:
    """Placeholder default of an optional argument: if the caller omits it, the function's own default holds."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._shown = repr(schema["default"]) if "default" in schema else "..."

    def __repr__(self) -> str:
        return self._shown


def with_schema(function: Callable[..., Any], schema: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """Return a function with the properties of an object schema as its arguments, validated by it.

    Args:
        function: Called with the given arguments by keyword. An async function stays async.
        schema: Schema of type "object". Positional arguments are its properties in order, the required ones first.
        what: Name of the schema's owner in errors.

    Raises:
        ConfigurationError: It is not a valid JSON Schema of an object, or its properties cannot be parameter names.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigurationError(f'{what} must be a JSON Schema with "type": "object"')
    from rlm_broker.values.json_schemas import JsonSchema

    checked = JsonSchema.of(schema, what)
    signature = _signature(schema, what)

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in arguments.items() if not isinstance(value, _LeftOut)}
        checked.require(given, "arguments")
        return given

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(**bound(args, kwargs))

    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if checked.is_bounded:
            return await function(**await aside(lambda: bound(args, kwargs), checked.whose))
        return await function(**bound(args, kwargs))

    made: Any = awaited if inspect.iscoroutinefunction(function) else called
    del made.__wrapped__
    made.__signature__, made.__annotations__ = signature, {}
    return made  # type: ignore[no-any-return]


def _signature(schema: Mapping[str, Any], what: str) -> inspect.Signature:
    properties, required = schema.get("properties", {}), set(schema.get("required", []))
    names = [*(name for name in properties if name in required), *(name for name in properties if name not in required)]
    try:
        return inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if name in required else _LeftOut(properties[name]),
                )
                for name in names
            ]
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{what}: its properties cannot be parameters: {error}") from None
