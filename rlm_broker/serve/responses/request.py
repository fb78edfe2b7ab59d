"""Bodies of requests for a response, and the items of their input."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveInt, StrictBool, Tag

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.questions.client_tools import FunctionTool, tools_of
from rlm_broker.serve.questions.options import COUNTED, MOST_FILES, Neutral, RlmOptions, require_neutral
from rlm_broker.serve.questions.schemas import safe_schema

CODE: Final = "code_interpreter"
"""Name of the tool under which blocks are told."""
OUTPUTS: Final = "code_interpreter_call.outputs"
"""Name under which a request includes the outputs of blocks."""
NEUTRAL: Final[Neutral] = {
    "top_logprobs": ((0,), "a run's answer has no log probabilities"),
    "presence_penalty": ((0,), "the models of a run take none"),
    "frequency_penalty": ((0,), "the models of a run take none"),
    "conversation": ((), "give previous_response_id in its place"),
    "prompt": ((), "the server has no prompt templates"),
    "context_management": (([],), "a run keeps its own conversation short"),
    "moderation": ((), "the server moderates nothing"),
}
"""Field → values that change nothing, and why all others are refused. None changes nothing."""
_IN_NAMESPACE: Final = "function in a namespace"
MetadataText = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], MetadataText], Field(max_length=16)]


class _Lenient(BaseModel):
    """An item or a part, which clients may send back with fields of a later version."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(_Lenient):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Lenient):
    """Refusal of another model, as a part of its message."""

    type: Literal["refusal"]
    refusal: str


class FilePart(_Lenient):
    """A file: one that was uploaded, or its bytes in base64. `file_url` is there to be refused by name."""

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    file_url: str | None = None


class ImagePart(_Lenient):
    """A picture, which is refused by name."""

    type: Literal["input_image"]


_PARTS: Final = {
    **dict.fromkeys(("input_text", "output_text", "text"), "text"),
    **{kind: kind for kind in ("refusal", "input_file", "input_image")},
}
"""Type of a part → its form."""


def _part_form(value: Any) -> str | None:
    """Return which form of part this is, or None. pydantic's own discriminator would write any value into its error."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PARTS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[FilePart, Tag("input_file")]
    | Annotated[ImagePart, Tag("input_image")],
    Discriminator(
        _part_form, custom_error_type="part_form", custom_error_message=f"must be a part of type {', '.join(_PARTS)}"
    ),
]


class MessageItem(_Lenient):
    """A message of a conversation. Its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCallItem(_Lenient):
    """A call of a function of the client, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(_Lenient):
    """The result of a call of a function of the client."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class OtherItem(_Lenient):
    """An item of an earlier output that clients send back, and that says no more than the messages beside it."""

    type: Literal["reasoning", "code_interpreter_call", "compaction", "web_search_call", "file_search_call"]


def _tag(value: Any) -> str:
    """Return which kind of item this is."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"message": "message", "function_call": "call", "function_call_output": "output"}
    return known.get(kind, "other") if isinstance(kind, str) else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("call")]
    | Annotated[FunctionOutputItem, Tag("output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag),
]


def _form(value: Any) -> str | None:
    """Return which form of input this is, or None for what is neither."""
    if isinstance(value, str):
        return "text"
    return "items" if isinstance(value, list) and value else None


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputItem], Tag("items")],
    Discriminator(
        _form, custom_error_type="input_form", custom_error_message="must be text or a list of at least 1 item"
    ),
]


class TextSettings(BaseModel):
    """Form of the answer.

    Attributes:
        format: Text, or JSON of a schema.
        verbosity: Accepted without effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_obfuscation: Accepted without effect: events are never padded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_obfuscation: bool = False


class ResponseRequest(BaseModel):
    """A request for a response.

    The fields from `reasoning` on are accepted without effect, because clients always send some of them.

    Attributes:
        max_output_tokens: Output tokens of each call of a model in the run.
        max_tool_calls: Blocks of the run.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)]
    input: Annotated[Input, COUNTED]
    instructions: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    background: StrictBool | None = None
    store: StrictBool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextSettings | None = None
    max_output_tokens: PositiveInt | None = None
    max_tool_calls: PositiveInt | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    rlm: RlmOptions | None = None
    reasoning: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None

    def require_supported(self) -> None:
        """Refuse fields that ask for what a run cannot do, and fields that the server does not know.

        Raises:
            ApiError: 400, with the field as `param`.
        """
        require_neutral(self.model_extra or {}, NEUTRAL)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream = true", param="stream_options")
        if self.background and self.store is False:
            raise ApiError(400, "a response in the background is stored: leave out store", param="store")
        if "message.output_text.logprobs" in (self.include or ()):
            raise _unsupported("include", "a run's answer has no log probabilities")
        self.code_tool()

    @property
    def is_stored(self) -> bool:
        """Whether the response can be retrieved, and gone on with."""
        return self.store is not False

    @property
    def options(self) -> RlmOptions:
        """The object `rlm`."""
        return self.rlm or RlmOptions()

    def output_type(self) -> dict[str, Any] | None:
        """Return the JSON Schema of the answer, or None for text.

        Raises:
            ApiError: 400: the format is not known, or its schema cannot be used.
        """
        given = None if self.text is None else self.text.format
        if given is None or (kind := given.get("type")) == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            said = "text.format.type must be text, json_object or json_schema"
            raise ApiError(400, said, param="text.format.type")
        return safe_schema(given.get("schema", {}), "text.format.schema")

    def code_tool(self) -> dict[str, Any] | None:
        """Return the tool under which blocks are told, or None if the request does not name it.

        Raises:
            ApiError: 400: it is wanted in a container of the client's choice.
        """
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") == CODE:
                _require_own_container(tool.get("container"), f"tools.{number}.container")
                return tool
        return None

    def file_ids(self) -> Iterable[tuple[str, str]]:
        """Yield the ids of files that the tool for code names, each with its place in the request."""
        for number, tool in enumerate(self.tools or ()):
            container = tool.get("container")
            if tool.get("type") == CODE and isinstance(container, dict):
                for place, id in enumerate(container.get("file_ids") or ()):
                    yield str(id), f"tools.{number}.container.file_ids.{place}"

    def function_tools(self) -> tuple[FunctionTool, ...]:
        """Return the functions of the client.

        Raises:
            ApiError: 400: there is no such tool, or a function is to be called in any case.
        """
        choice = self.tool_choice
        if choice not in (None, "auto", "none", {"type": CODE}):
            raise _unsupported("tool_choice", "code decides which functions it calls; give auto or none")
        made = tools_of(
            (name, tool.get("description"), tool.get("parameters"), at) for name, tool, at in self._functions()
        )
        return () if choice == "none" else made

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return the namespace and the name of each function in a namespace, by the name that code has for it."""
        named = ((name, tool) for name, tool, _ in self._functions() if tool.get("type") == _IN_NAMESPACE)
        return {name: (tool["namespace"], tool["name"]) for name, tool in named}

    def _functions(self) -> Iterator[tuple[Any, Mapping[str, Any], str]]:
        """Yield each function: the name that code has for it, its description, and its place in the request."""
        for number, tool in enumerate(self.tools or ()):
            kind, at = tool.get("type"), f"tools.{number}"
            if kind == "function":
                yield tool.get("name"), tool, at
            elif kind == "namespace":
                yield from _in_namespace(tool, at)
            elif kind != CODE and not (kind == "web_search" and tool.get("external_web_access") is False):
                said = f"there is no tool {str(kind)[:60]!r}: there are function, namespace and {CODE}"
                raise ApiError(400, said, code="unsupported_parameter", param=f"{at}.type")


def _in_namespace(namespace: Mapping[str, Any], at: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    name, tools = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        raise ApiError(400, f"{at} must have a name and a list of tools", param=at)
    for number, tool in enumerate(tools):
        place = f"{at}.tools.{number}"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ApiError(400, f"{place} must be a function with a name", param=place)
        yield f"{name}__{tool['name']}", {**tool, "type": _IN_NAMESPACE, "namespace": name}, place


def _require_own_container(container: Any, at: str) -> None:
    if container is None:
        return
    if not isinstance(container, dict) or container.get("type") != "auto":
        raise ApiError(400, f'{at} must be {{"type": "auto"}}: each conversation has its own REPL', param=at)
    if extra := sorted(container.keys() - {"type", "file_ids"}):
        raise ApiError(400, f"{at} has an unknown field {extra[0][:60]!r}", param=f"{at}.{extra[0][:60]}")
    if not isinstance(container.get("file_ids") or [], list):
        raise ApiError(400, f"{at}.file_ids must be a list", param=f"{at}.file_ids")
    if len(container.get("file_ids") or []) > MOST_FILES:
        raise ApiError(400, f"{at}.file_ids has more than {MOST_FILES:,} files: send fewer", param=f"{at}.file_ids")


def _unsupported(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} is not supported: {why}", code="unsupported_parameter", param=name)
