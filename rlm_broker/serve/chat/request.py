"""A request for a chat completion: which fields hold, which are accepted without effect, which are refused.

Its messages are texts, files and results of tools.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StrictBool

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import Material, Text
from rlm_broker.serve.questions.client_tools import FunctionTool, tools_of
from rlm_broker.serve.questions.conversation import inline_file
from rlm_broker.serve.questions.options import COUNTED, Neutral, RlmOptions, require_neutral
from rlm_broker.serve.questions.schemas import safe_schema

NEUTRAL: Final[Neutral] = {
    "n": ((1,), "a run has one answer"),
    "logprobs": ((False,), "a run's answer has no log probabilities"),
    "top_logprobs": ((0,), "a run's answer has no log probabilities"),
    "logit_bias": (({},), "the models of a run take none"),
    "audio": ((), "a run answers in text"),
    "modalities": ((["text"],), "a run answers in text"),
    "functions": (([],), "give tools in its place"),
    "function_call": (("auto", "none"), "give tool_choice in its place"),
    "web_search_options": ((), "a run has no network"),
    "prediction": ((), "a run's answer cannot be predicted"),
    "seed": ((), "a run cannot be repeated by a seed"),
    "stop": (([], ""), "a run ends with its answer"),
    "presence_penalty": ((0,), "the models of a run take none"),
    "frequency_penalty": ((0,), "the models of a run take none"),
    "moderation": ((), "the server moderates nothing"),
}
"""Field → values that change nothing, and why all others are refused. None changes nothing."""


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_usage: Whether a last chunk tells the usage.
        include_obfuscation: Accepted without effect: chunks are never padded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: StrictBool = False
    include_obfuscation: bool = False


class ChatRequest(BaseModel):
    """A request for a chat completion.

    The fields from `temperature` on are accepted without effect, because chat windows always send some of them.

    Attributes:
        max_tokens, max_completion_tokens: Output tokens of each call of a model in the run.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1), COUNTED]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    rlm: RlmOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: str | None = None

    def require_supported(self) -> None:
        """Refuse fields that ask for what a run cannot do, and fields that the server does not know.

        Raises:
            ApiError: 400, with the field as `param`.
        """
        require_neutral(self.model_extra or {}, NEUTRAL)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream = true", param="stream_options")

    @property
    def options(self) -> RlmOptions:
        """The object `rlm`."""
        return self.rlm or RlmOptions()

    @property
    def most_tokens(self) -> int | None:
        """Output tokens of each call, or None."""
        given = [each for each in (self.max_tokens, self.max_completion_tokens) if each is not None]
        return min(given, default=None)

    def output_type(self) -> dict[str, Any] | None:
        """Return the JSON Schema of the answer, or None for text.

        Raises:
            ApiError: 400: the format is not known, or its schema cannot be used.
        """
        if self.response_format is None or (kind := self.response_format.get("type")) == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            said = "response_format.type must be text, json_object or json_schema"
            raise ApiError(400, said, param="response_format.type")
        wrapped = self.response_format.get("json_schema")
        at = "response_format.json_schema"
        if not isinstance(wrapped, dict):
            raise ApiError(400, f"{at} must be an object with a schema", param=at)
        return safe_schema(wrapped.get("schema", {}), f"{at}.schema")

    def function_tools(self) -> tuple[FunctionTool, ...]:
        """Return the functions of the client.

        Raises:
            ApiError: 400: a tool is no function, or a tool is to be called in any case.
        """
        if self.tool_choice not in (None, "auto", "none"):
            said = "tool_choice must be auto or none: code decides which functions it calls"
            raise ApiError(400, said, code="unsupported_parameter", param="tool_choice")
        tools = tools_of(self._functions())
        return () if self.tool_choice == "none" else tools

    def _functions(self) -> Iterator[tuple[Any, Any, Any, str]]:
        """Yield each function: its name, description and schema, and its place in the request."""
        for number, tool in enumerate(self.tools or []):
            at = f"tools.{number}"
            if tool.get("type") != "function" or not isinstance(function := tool.get("function"), dict):
                raise ApiError(400, f"{at} is not a function: only functions are supported", param=f"{at}.type")
            yield function.get("name"), function.get("description"), function.get("parameters"), f"{at}.function"


Lookup = Callable[[str, str], Material]
"""Returns the uploaded file of an id; the second argument is its place in the request, for errors."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_FIELDS: Final = {"role", "content", "name"}
_REFUSED: Final = {
    "image_url": "images are not taken: send a text, or a file that has text",
    "input_audio": "audio is not taken: send a text, or a file that has text",
}


@dataclass(slots=True)
class ChatConversation:
    """Messages of a request, by what they are for.

    Attributes:
        system: Texts of system and developer messages.
        history: Messages before the last one, as plain values.
        files: Files of those messages.
        last: Texts and files of the last message, in order.
        results: Id of a call → result of the tool; empty unless the last messages are such.
        at: Place of the last message in the request.
    """

    system: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    files: list[Material] = field(default_factory=list)
    last: list[Material] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    at: str = ""


def read(messages: Sequence[Mapping[str, Any]], file_of: Lookup) -> ChatConversation:
    """Return what the messages of a request are for.

    Args:
        messages: Messages as the client sent them.
        file_of: Returns uploaded files.

    Raises:
        ApiError: 400: a message has a wrong form, or the last one is not of the user or a tool. 404: there is no such
            file.
    """
    read = ChatConversation()
    last = len(messages) - 1
    for number, message in enumerate(messages):
        at = f"messages.{number}"
        role = _role(message, at)
        parts = _parts(message, role, f"{at}.content", file_of)
        if role in ("system", "developer"):
            read.system += [part.text for part in parts if isinstance(part, Text)]
        elif number == last and role == "user":
            read.last = parts
        else:
            read.history.append(_plain(message, role, parts))
            read.files += [part for part in parts if not isinstance(part, Text)]
    read.at = f"messages.{last}"
    if messages[last]["role"] == "tool":
        read.results = _results(messages)
    elif messages[last]["role"] != "user":
        raise ApiError(400, "the last message must be of the user, or the result of a tool", param=f"{read.at}.role")
    return read


def _role(message: Mapping[str, Any], at: str) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    if role != "assistant":  # clients send the fields of our own answers back, such as reasoning_content
        known = _FIELDS | ({"tool_call_id"} if role == "tool" else set())
        if extra := sorted(name for name in message.keys() - known if message[name] is not None):
            raise ApiError(400, f"{at} has an unknown field {extra[0][:60]!r}", param=f"{at}.{extra[0][:60]}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ApiError(400, f"{at}.tool_call_id must be the id of a call", param=f"{at}.tool_call_id")
    return str(role)


def _parts(message: Mapping[str, Any], role: str, at: str, file_of: Lookup) -> list[Material]:
    content = message.get("content")
    if isinstance(content, str):
        return [Text("text", content)]
    if content is None and role == "assistant":
        return []
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be text or a list of parts", param=at)
    made: list[Material] = []
    for number, part in enumerate(content):
        made.append(_part(part, role, f"{at}.{number}", len(made) + 1, file_of))
    return made


def _part(part: Any, role: str, at: str, number: int, file_of: Lookup) -> Material:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        if not isinstance(text := part.get(kind), str):
            raise ApiError(400, f"{at}.{kind} must be text", param=f"{at}.{kind}")
        return Text(f"text_{number}", text)
    if kind == "file" and role == "user":
        return _file(part.get("file"), f"{at}.file", file_of)
    why = _REFUSED.get(str(kind), "parts are texts, and files of the user")
    raise ApiError(400, f"{at}: {why}", code="unsupported_content", param=f"{at}.type")


def _file(file: Any, at: str, file_of: Lookup) -> Material:
    if not isinstance(file, dict) or ("file_id" in file) == ("file_data" in file):
        raise ApiError(400, f"{at} must have either file_id or file_data", param=at)
    if "file_id" not in file:
        return inline_file(file["file_data"], file.get("filename"), f"{at}.file_data")
    if not isinstance(file["file_id"], str):
        raise ApiError(400, f"{at}.file_id must be the id of a file", param=f"{at}.file_id")
    return file_of(file["file_id"], f"{at}.file_id")


def _plain(message: Mapping[str, Any], role: str, parts: Sequence[Material]) -> dict[str, Any]:
    """Return an earlier message as code finds it."""
    said = [part.text if isinstance(part, Text) else f"[file {part.name}]" for part in parts]
    plain: dict[str, Any] = {"role": role, "content": said[0] if len(said) == 1 else said or ""}
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if role == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
    if role == "assistant" and isinstance(calls := message.get("tool_calls"), list) and calls:
        plain["tool_calls"] = [call.get("function") for call in calls if isinstance(call, dict)]
    return plain


def _results(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the results at the end of the messages, by the ids of their calls."""
    found: dict[str, str] = {}
    for message in reversed(messages):
        if message["role"] != "tool":
            break
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        found[message["tool_call_id"]] = text
    return found
