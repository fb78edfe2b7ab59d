"""Bodies of requests for a response, and the items of their input in the form in which they are kept and listed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, StrictBool
from pydantic_core import PydanticCustomError

from rlm_broker import RunLimits
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.questions.conversation import ROLES, TEXTS, Item
from rlm_broker.serve.questions.request import (
    CODE,
    COUNTED,
    MOST_FILES,
    NO_LOGPROBS,
    DialectRequest,
    Tokens,
    unsupported,
)

OUTPUTS: Final = "code_interpreter_call.outputs"
"""Name under which a request includes the outputs of blocks."""
_NAMED: Final = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Kind of an item → its fields that must be texts."""
_SENT_BACK: Final = frozenset({"reasoning", "code_interpreter_call", "compaction"})
"""Kinds of items of our own output, which clients send back. They say no more than the messages beside them."""


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
        """Refuse fields that ask for what a run cannot do.

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
        """Return the form of the answer that the request asks for, and its place in it."""
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
        """Yield the ids of files that the tool for code names, each with its place in the request."""
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
    """Return the id of an item, from which `response_of` finds its response; `number` has 5 characters."""
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
