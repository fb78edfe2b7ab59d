"""A request of OpenAI's dialect, in either interface: which fields hold, which are ignored, which are refused.

What a client may send is decided by the servers it was written for. So an unknown field is ignored, and the
response names it in `rlm.ignored`. Refused is only what would change the meaning of the answer.

All clients wait while the event loop reads messages, parts and files, so their number is bounded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, StrictBool
from pydantic_core import PydanticCustomError

from rlm_broker import RLM, RunLimits, StoredContext
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.questions.client_tools import FunctionTool, call_type, checked_in_turn, safe_schema, tools_of
from rlm_broker.values.validation import no_such

AT: Final = "@"
"""Separator of a model and a context, as in "openai/gpt-5@logs"."""
PLAIN: Final = "plain"
"""Word in place of a context for the model itself: one call, without a REPL. A context of that name hides it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model named by a request.

    Attributes:
        name: Name under which the client asked for it, and is answered.
        model: Model for `RLM.start`; None is the server's own.
        context: Context of the server's, or None.
        is_plain: Whether the model itself is asked, without a REPL.
    """

    name: str
    model: str | None
    context: StoredContext | None
    is_plain: bool = False


class ServedModels:
    """Models that clients may name."""

    def __init__(self, rlm: RLM, contexts: Mapping[str, StoredContext]) -> None:
        self._rlm = rlm
        self._contexts = contexts

    @property
    def _root(self) -> str:
        return self._rlm.handler.get_client(depth=0).model_name

    @property
    def known(self) -> tuple[str, ...]:
        """Names of all models, without contexts."""
        return tuple(dict.fromkeys([self._root, *self._rlm.handler.routing.names]))

    def names(self, owner: Owner) -> list[str]:
        """Return all names for an owner, the plain models last."""
        models = [name for name in self.known if owner.models is None or name in owner.models]
        about = [f"{name}{AT}{context}" for name in models for context in self._contexts]
        plain = [f"{name}{AT}{PLAIN}" for name in models if PLAIN not in self._contexts]
        return [*models, *about, *plain]

    def named(self, owner: Owner, name: str) -> ServedModel:
        """Find a model by its name.

        Raises:
            ApiError: 404: there is no such model or context. 403: the owner may not use it.
        """
        known = self.known
        model, context = name, ""
        if name not in known and AT in name:
            model, _, context = name.rpartition(AT)
        if model != name and context not in self._contexts and context != PLAIN:
            said = no_such("context", context, [*self._contexts, PLAIN])
            raise ApiError(404, said, code="model_not_found", param="model")
        if model not in known:
            said = no_such("model", name, self.names(owner))
            raise ApiError(404, said, code="model_not_found", param="model")
        owner.require_model(model)
        about = self._contexts.get(context)
        return ServedModel(name, None if model == self._root else model, about, context == PLAIN and about is None)


CODE: Final = "code_interpreter"
"""Type of the tool under which blocks are reported."""
NO_LOGPROBS: Final = "a run's answer has no log probabilities"
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "n": ((1,), "a run has one answer"),
    "logprobs": ((False,), NO_LOGPROBS),
    "top_logprobs": ((0,), NO_LOGPROBS),
    "audio": ((), "a run answers in text"),
    "modalities": ((["text"],), "a run answers in text"),
    "functions": (([],), "give tools in its place"),
    "function_call": (("auto", "none"), "give tool_choice in its place"),
    "conversation": ((), "give previous_response_id in its place"),
    "prompt": ((), "the server has no prompt templates"),
}
"""Field → values that change nothing, and why all others are refused. None changes nothing."""
SILENT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "client_metadata"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
"""Fields without a bearing on the answer: they are ignored, and not named."""
MOST_ITEMS: Final = 5_000
"""Messages or items of one request, and parts of all of them; also items of a whole kept conversation."""
MOST_FILES: Final = 1_000
"""Files in the messages of one request."""


class RlmOptions(BaseModel):
    """The object `rlm` of a request. Clients send it as `extra_body`.

    Limits may be tighter than the server's, and never wider.

    Attributes:
        question: Question. All texts and files of the last message are then the context.
        context: Context in place of texts and files: a text, or a list or dict of plain values.
        run_timeout_s: Seconds of the run, with its waits for the client's tools.
        max_budget_usd: US dollars of the run and all below it.
        max_tokens: Tokens of the run and all below it, input and output.
        max_llm_calls: Calls of models of the run and all below it.
        max_iterations: Turns of the run.
        max_depth: Levels of runs with a REPL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    question: str | None = None
    context: Any = None
    run_timeout_s: PositiveFloat | None = None
    max_budget_usd: PositiveFloat | None = None
    max_tokens: PositiveInt | None = None
    max_llm_calls: PositiveInt | None = None
    max_iterations: PositiveInt | None = None
    max_depth: Annotated[int, Field(ge=1)] | None = None

    def limits(self, **more: Any) -> RunLimits | None:
        """Return the limits of the request, and `more`, where they are not None; or None if it sets none."""
        said = self.model_dump(exclude={"question", "context"}) | more
        given = {name: value for name, value in said.items() if value is not None}
        return RunLimits(**given) if given else None


def _counted(items: Any) -> Any:
    """Refuse a list with too many messages, parts or files, before each of them is looked at."""
    if not isinstance(items, list):
        return items
    parts = files = 0
    if len(items) > MOST_ITEMS:
        raise _too_many(f"{MOST_ITEMS:,} messages or items: leave out the oldest")
    for item in items:
        for content in (item.get("content"), item.get("output")) if isinstance(item, Mapping) else ():
            if isinstance(content, list):
                parts += len(content)
                if parts > MOST_ITEMS:
                    raise _too_many(f"{MOST_ITEMS:,} parts: join texts, or send a file")
                files += sum(
                    isinstance(part, Mapping) and part.get("type") in ("file", "input_file") for part in content
                )
    if files > MOST_FILES:
        raise _too_many(f"{MOST_FILES:,} files: send an archive of them")
    return items


def _too_many(what: str) -> PydanticCustomError:
    return PydanticCustomError("too_many", "there are more than {what}", {"what": what})


COUNTED: Final = BeforeValidator(_counted)
"""Marks a field whose messages are counted."""
Tokens = Annotated[PositiveInt | None, BeforeValidator(lambda given: None if given == -1 else given)]
"""A number of tokens; chat windows say -1 for "no bound"."""


class StreamOptions(BaseModel):
    """Options of a stream: whether a last chunk reports the usage. Further ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: StrictBool = False


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Type of the answer of a run, and functions for its code.

    Attributes:
        output_type: JSON Schema of the answer, or None for text.
        tools: Functions of the client for code.
        forced: Functions; the answer must call one of them; empty if it need not be one.
    """

    output_type: Mapping[str, Any] | None = None
    tools: tuple[FunctionTool, ...] = ()
    forced: tuple[FunctionTool, ...] = ()


class DialectRequest(BaseModel):
    """The common fields of requests of both interfaces."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    rlm: RlmOptions | None = None

    def require_supported(self) -> None:
        """Refuse fields asking for what a run cannot do.

        Raises:
            ApiError: 400, with the field as `param`.
        """
        for name, value in (self.model_extra or {}).items():
            neutral, why = REFUSED.get(name, ((value,), ""))
            if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
                raise unsupported(name, why)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream = true", param="stream_options")

    def ignored(self) -> list[str]:
        """Return the fields without effect, and the tools that a run does not have."""
        extra = (self.model_extra or {}).items()
        named = [name[:60] for name, value in extra if value and name not in SILENT and name not in REFUSED]
        tools = [str(tool.get("type"))[:60] for tool in self.tools or () if tool.get("type") not in TOOLS]
        return [*named, *(f"tools.{kind}" for kind in dict.fromkeys(tools))]

    @property
    def options(self) -> RlmOptions:
        """The object `rlm`."""
        return self.rlm or RlmOptions()

    @property
    def is_single(self) -> bool:
        """Whether the client gets one call of its tools in each response."""
        return self.parallel_tool_calls is False

    def limits(self) -> RunLimits | None:
        """Return the limits of the run that the request sets."""
        raise NotImplementedError

    def wanted_format(self) -> tuple[dict[str, Any] | None, str]:
        """Return the wanted form of the answer, and its place in the request."""
        raise NotImplementedError

    async def form(self, owner: Owner) -> AnswerForm:
        """Return the form of the answer. The check of schemas takes long, so it is done in a thread.

        Raises:
            ApiError: 400: the format or a tool cannot be used, or a tool is forced that a run does not have.
            Busy: As for `checked_in_turn`.
        """
        if self.wanted_format()[0] is None and not self.tools:
            return self._form()
        return await checked_in_turn(owner, self._form)

    def _form(self) -> AnswerForm:
        mode, names = _choice(self.tool_choice)
        tools = tools_of(self._functions())
        if names is not None:
            if unknown := sorted(names - {tool.name for tool in tools}):
                raise ApiError(400, f"tool_choice names {unknown[0][:64]!r}, which is no tool", param="tool_choice")
            tools = tuple(tool for tool in tools if tool.name in names)
        if mode == "required":
            if not tools:
                raise ApiError(400, "tool_choice asks for a call, and there is no function", param="tool_choice")
            return AnswerForm(call_type(tools), tools if len(tools) > 1 else (), tools)
        return AnswerForm(self._output_type(), () if mode == "none" else tools)

    def _output_type(self) -> Mapping[str, Any] | None:
        given, at = self.wanted_format()
        if given is None or (kind := given.get("type")) == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            raise ApiError(400, f"{at}.type must be text, json_object or json_schema", param=f"{at}.type")
        if at == "response_format":
            given, at = given.get("json_schema"), f"{at}.json_schema"
            if not isinstance(given, dict):
                raise ApiError(400, f"{at} must be an object with a schema", param=at)
        return safe_schema(given.get("schema", {}), f"{at}.schema")

    def _functions(self) -> Iterator[tuple[Mapping[str, Any], str | None, str]]:
        """Yield each function: its description, its namespace or None, and its place in the request."""
        for number, tool in enumerate(self.tools or ()):
            at = f"tools.{number}"
            if tool.get("type") == "function":
                inner = tool.get("function")
                yield (inner, None, f"{at}.function") if isinstance(inner, dict) else (tool, None, at)
            elif tool.get("type") == "namespace":
                name, tools = tool.get("name"), tool.get("tools")
                if not isinstance(name, str) or not isinstance(tools, list):
                    raise ApiError(400, f"{at} must have a name and a list of tools", param=at)
                for place, each in enumerate(tools):
                    if not isinstance(each, dict) or each.get("type") != "function":
                        said = f"{at}.tools.{place} must be a function with a name"
                        raise ApiError(400, said, param=f"{at}.tools.{place}")
                    yield each, name, f"{at}.tools.{place}"


TOOLS: Final = ("function", "namespace", CODE)
"""Types of tools that a run has. Clients offer others to all servers: they are left out."""


def _choice(choice: str | dict[str, Any] | None) -> tuple[str, set[str] | None]:
    """Return whether a call is allowed or required, and the names of the functions; None: of all."""
    if isinstance(choice, dict):
        kind = choice.get("type")
        inner: dict[str, Any] = within if isinstance(within := choice.get(str(kind)), dict) else choice
        if kind == CODE:
            return "auto", None
        if kind == "function":
            return "required", {str(inner.get("name"))}
        if kind == "allowed_tools" and isinstance(inner.get("tools"), list):
            named = [each.get("function", each) for each in inner["tools"] if isinstance(each, dict)]
            return str(inner.get("mode", "auto")), {str(each.get("name")) for each in named if isinstance(each, dict)}
        raise unsupported("tool_choice", f"a run has no tool {str(kind)[:60]!r}")
    if choice not in (None, "auto", "none", "required"):
        raise ApiError(400, "tool_choice must be auto, none, required or a function", param="tool_choice")
    return choice or "auto", None


def unsupported(name: str, why: str) -> ApiError:
    """Return the error for a field asking for what a run cannot do."""
    return ApiError(400, f"{name} is not supported: {why}", code="unsupported_parameter", param=name)
