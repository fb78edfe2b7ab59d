"""Bodies of requests for a response, and the items of their input."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag

MetadataText = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], MetadataText], Field(max_length=16)]


class _Lenient(BaseModel):
    """An item or a part that clients send back as they got it, maybe with fields of a later version."""

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


Part = Annotated[TextPart | RefusalPart | FilePart | ImagePart, Field(discriminator="type")]


class MessageItem(_Lenient):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None


class FunctionCallItem(_Lenient):
    """A call of a function of the client, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class FunctionOutputItem(_Lenient):
    """The result of a call of a function of the client."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None


class OtherItem(BaseModel):
    """An item of an earlier output that clients send back, and that says no more than the messages beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["reasoning", "code_interpreter_call", "compaction", "web_search_call", "file_search_call"]
    id: str | None = None


def _tag(value: Any) -> str:
    """Return which kind of item this is. A message may lack its type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"message": "message", "function_call": "call", "function_call_output": "output", None: "message"}
    return known.get(kind, "other") if isinstance(kind, str | None) else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("call")]
    | Annotated[FunctionOutputItem, Tag("output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag),
]


class TextSettings(BaseModel):
    """Form of the answer: text, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(BaseModel):
    """Body of `POST /v1/responses`. `docs/guides/serve-responses.md` says what each field does.

    A field that is listed here, and has no effect, is accepted since clients send it by themselves. Others are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    max_output_tokens: PositiveInt | None = None
    max_tool_calls: NonNegativeInt | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    reasoning: dict[str, Any] | None = None
    rlm: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
