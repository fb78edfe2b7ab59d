"""Fields of a request for a chat completion: which hold, which are accepted without effect, which are refused."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StrictBool

from rlm_broker.service.asking.client_tools import FunctionTool, tools_of
from rlm_broker.service.asking.counts import COUNTED
from rlm_broker.service.asking.options import Neutral, RlmOptions, require_neutral
from rlm_broker.service.asking.schemas import safe_schema
from rlm_broker.service.errors import ApiError

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
