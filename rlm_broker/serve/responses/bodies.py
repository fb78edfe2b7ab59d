"""Bodies of requests for a response and of responses, and their items as kept and listed."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, StrictBool
from pydantic_core import PydanticCustomError

from rlm_broker import RunLimits
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.conversation import ROLES, TEXTS, Item
from rlm_broker.serve.questions.request import (
    CODE,
    COUNTED,
    MOST_FILES,
    NO_LOGPROBS,
    TOOLS,
    DialectRequest,
    Tokens,
    unsupported,
)

OUTPUTS: Final = "code_interpreter_call.outputs"
"""Name under which a request includes the outputs of blocks."""
_NAMED: Final = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Kind of an item → its fields that must be texts."""
_SENT_BACK: Final = frozenset({"reasoning", "code_interpreter_call", "compaction"})
"""Kinds of items of our own output, sent back by clients. They say no more than the messages beside them."""


def _items(given: Any) -> Any:
    if isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(item, dict) for item in given)):
        return given
    raise PydanticCustomError("input_form", "must be text or a list of at least 1 item")


class TextSettings(BaseModel):
    """Form of the answer: text, or JSON of a schema. The verbosity has no effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(DialectRequest):
    """A request for a response. The fields from `reasoning` on are there to be repeated in the response.

    Attributes:
        max_output_tokens: Output tokens of each call of a model in the run.
        max_tool_calls: Blocks of the run.
    """

    input: Annotated[Any, BeforeValidator(_items), COUNTED]
    instructions: str | None = None
    background: StrictBool | None = None
    store: StrictBool | None = None
    previous_response_id: str | None = None
    text: TextSettings = TextSettings()
    max_output_tokens: Tokens = None
    max_tool_calls: PositiveInt | None = None
    include: list[str] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    reasoning: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def require_supported(self) -> None:
        """Refuse fields asking for what a run cannot do.

        Raises:
            ApiError: 400, with the field as `param`.
        """
        super().require_supported()
        if self.background and self.store is False:
            raise ApiError(400, "a response in the background is stored: leave out store", param="store")
        if "message.output_text.logprobs" in (self.include or ()):
            raise unsupported("include", NO_LOGPROBS)
        self.code_tool()

    def limits(self) -> RunLimits | None:
        """Return the limits of the run that the request sets."""
        return self.options.limits(max_completion_tokens=self.max_output_tokens, max_blocks=self.max_tool_calls)

    def wanted_format(self) -> tuple[dict[str, Any] | None, str]:
        """Return the wanted form of the answer, and its place in the request."""
        return self.text.format, "text.format"

    def ignored(self) -> list[str]:
        """Return the fields, the tools and the kinds of items without effect."""
        fields = [name for name in ("reasoning", "temperature", "top_p") if getattr(self, name)]
        known = {"message", "item_reference", *_NAMED, *_SENT_BACK}
        kinds = [str(item.get("type") or "message")[:60] for item in self.input if isinstance(item, dict)]
        return [*super().ignored(), *fields, *(f"input.{kind}" for kind in dict.fromkeys(kinds) if kind not in known)]

    @property
    def is_stored(self) -> bool:
        """Whether the response can be retrieved, and gone on with."""
        return self.store is not False

    def code_tool(self) -> dict[str, Any] | None:
        """Return the tool under which blocks are reported, or None if the request does not name it.

        Raises:
            ApiError: 400: it is wanted in a container of the client's choice.
        """
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") == CODE:
                _require_own_container(tool.get("container"), f"tools.{number}.container")
                return tool
        return None

    def file_ids(self) -> Iterable[tuple[str, str]]:
        """Yield the ids of files of the tool for code, each with its place in the request."""
        for number, tool in enumerate(self.tools or ()):
            container = tool.get("container")
            if tool.get("type") == CODE and isinstance(container, dict):
                for place, id in enumerate(container.get("file_ids") or ()):
                    yield str(id), f"tools.{number}.container.file_ids.{place}"

    def items(self, response: str, referred: Callable[[str, str], Item]) -> Iterator[tuple[Item, str]]:
        """Yield the items of the input, each with an id, in the form in which they are listed, and with its place.

        Args:
            response: Id of the response.
            referred: Returns the item of an earlier response; the second argument is the place of the reference.

        Raises:
            ApiError: 400: an item has a wrong form. 404: there is no such item.
        """
        given = self.input if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        for number, item in enumerate(given):
            at, kind = f"input.{number}" if given is self.input else "input", item.get("type") or "message"
            id = item_id("msg" if kind == "message" else "item", response, f"i{number:04x}")
            if kind == "item_reference":
                yield referred(str(item.get("id")), f"{at}.id"), at
            elif kind == "message":
                if (role := item.get("role")) not in ROLES:
                    raise ApiError(400, f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
                content = _listed(item.get("content"), role)
                yield {"id": id, "type": kind, "role": role, "status": "completed", "content": content}, at
            elif kind in _NAMED:
                for name in _NAMED[kind]:
                    if not isinstance(item.get(name), str):
                        raise ApiError(400, f"{at}.{name} must be text", param=f"{at}.{name}")
                yield {"output": None, **item, "id": id, "status": "completed"}, at


def item_id(prefix: str, response: str, number: str) -> str:
    """Return the id of an item for `response_of` to read; `number` has 5 characters."""
    return f"{prefix}_{response.removeprefix('resp_')}{number}"


def response_of(item: str) -> str:
    """Return the id of the response with the item of this id."""
    return f"resp_{item.partition('_')[2][:-5]}"


def _listed(content: Any, role: str) -> Any:
    """Return the content of a message as its item has it. What is wrong with it is left to the reader."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_listed_part(part, role) for part in parts] if isinstance(parts, list) else content


def _listed_part(part: Any, role: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in TEXTS and part["type"] != "refusal":
        return text_part(part.get("text")) if role == "assistant" else {"type": "input_text", "text": part.get("text")}
    return {name: value for name, value in part.items() if value is not None}


def text_part(text: Any) -> dict[str, Any]:
    """Return the content part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _require_own_container(container: Any, at: str) -> None:
    if container is None:
        return
    if not isinstance(container, dict) or container.get("type") != "auto":
        raise ApiError(400, f'{at} must be {{"type": "auto"}}: each conversation has its own REPL', param=at)
    if not isinstance(files := container.get("file_ids") or [], list):
        raise ApiError(400, f"{at}.file_ids must be a list", param=f"{at}.file_ids")
    if len(files) > MOST_FILES:
        raise ApiError(400, f"{at}.file_ids has more than {MOST_FILES:,} files: send fewer", param=f"{at}.file_ids")


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
LIMIT_REASON: Final = "max_output_tokens"
"""Reason of an incomplete response. The schemas know only this one and `content_filter`; `rlm.limit` has the name."""


@dataclass(slots=True)
class Resource:
    """One response, as its body shows it.

    Attributes:
        id: Unguessable text beginning with "resp_".
        model: Name under which the client asked for the model.
        asked: Fields of the body repeating the request.
        created_at: Unix time in seconds.
        status: Its status now.
        output: Complete items.
        usage: Usage of its part of the run, as `usage_of` makes it; None until its end.
        error: Code and message of a failure, or None.
        rlm: Facts about the run beyond OpenAI's fields.
    """

    id: str
    model: str
    asked: dict[str, Any]
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Status = "in_progress"
    completed_at: int | None = None
    output: list[Item] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    rlm: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ended(self) -> bool:
        """Whether the status is the last one."""
        return self.status not in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        """Return the body as it is now."""
        is_incomplete = self.status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "model": self.model,
            "output": list(self.output),
            "error": self.error,
            "incomplete_details": {"reason": LIMIT_REASON} if is_incomplete else None,
            "usage": self.usage,
            **self.asked,
            "rlm": dict(self.rlm),
        }


def usage_of(read: int, cached: int, written: int) -> dict[str, Any]:
    """Return the tokens of the whole tree since the last response."""
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def message(id: str, text: str, status: str) -> Item:
    """Return the item of an answer."""
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [text_part(text)]}


def reasoning(id: str, text: str | None, status: str) -> Item:
    """Return the item of a turn's prose; `text` is None while it has none."""
    summary = [] if text is None else [summary_part(text)]
    return {"id": id, "type": "reasoning", "summary": summary, "status": status, "encrypted_content": None}


def summary_part(text: str) -> dict[str, Any]:
    """Return the part of a reasoning summary."""
    return {"type": "summary_text", "text": text}


def function_call(id: str, call: ClientCall, arguments: str, status: str) -> Item:
    """Return the item of a call of a function of the client, with the arguments so far."""
    namespace = {} if call.namespace is None else {"namespace": call.namespace}
    about = {"id": id, "type": "function_call", "call_id": call.id, "name": call.name, **namespace}
    return {**about, "arguments": arguments, "status": status}


def code_call(id: str, container: str, code: str, status: str, logs: str | None = None) -> Item:
    """Return the item of a block.

    Args:
        logs: Output of the block, if the request wants it.
    """
    return {
        "id": id,
        "type": "code_interpreter_call",
        "container_id": container,
        "code": code,
        "status": status,
        "outputs": None if logs is None else [{"type": "logs", "logs": logs}],
    }


def repeated(request: ResponseRequest) -> dict[str, Any]:
    """Return the fields of a body repeating the request, with the defaults of what it leaves out."""
    text = request.text
    return {
        "background": bool(request.background),
        "frequency_penalty": 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": _reasoning_of(request.reasoning),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _format_of(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_of(tool) for tool in request.tools or () if tool.get("type") in TOOLS],
        "top_logprobs": 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _reasoning_of(given: dict[str, Any] | None) -> dict[str, Any]:
    said = {key: value for key, value in (given or {}).items() if value is not None}
    return {"effort": None, "summary": None, **said}


def _format_of(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None or given.get("type") != "json_schema":
        return given or {"type": "text"}
    return {"description": None, "strict": True, **{key: value for key, value in given.items() if value is not None}}


def _tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
