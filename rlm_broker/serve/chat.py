"""`POST /v1/chat/completions`: a run as a chat completion, whole or as the chunks of a stream."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.routing import Route

from rlm_broker import RunFailed, RunLimits
from rlm_broker.serve.bodies import repeat_of
from rlm_broker.serve.errors import ApiError, api_error_of
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.conversation import ROLES, Item, read
from rlm_broker.serve.questions.request import COUNTED, DialectRequest, Tokens
from rlm_broker.serve.questions.runs import BEGINNING, RUN_HEADER, Asked, Following, RunOutcome, Since, Telling
from rlm_broker.serve.replies import EventStream, SlowJson, sse

PATH: Final = "/v1/chat/completions"
_FIELDS: Final = frozenset({"role", "content", "name", "tool_call_id", "tool_calls"})


class ChatRequest(DialectRequest):
    """A request for a chat completion.

    Attributes:
        max_tokens, max_completion_tokens: Output tokens of each call of a model in the run.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), COUNTED]
    response_format: dict[str, Any] | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None

    def limits(self) -> RunLimits | None:
        """Return the limits of the run that the request sets."""
        given = [each for each in (self.max_tokens, self.max_completion_tokens) if each is not None]
        return self.options.limits(max_completion_tokens=min(given, default=None))

    def wanted_format(self) -> tuple[dict[str, Any] | None, str]:
        """Return the wanted form of the answer, and its place in the request."""
        return self.response_format, "response_format"

    def items(self) -> Iterator[tuple[Item, str]]:
        """Yield the messages as items of a conversation, each with its place.

        Raises:
            ApiError: 400: a message has a wrong form.
        """
        for number, message in enumerate(self.messages):
            at = f"messages.{number}"
            role, content, call = (message.get(name) for name in ("role", "content", "tool_call_id"))
            if role not in (*ROLES, "tool"):
                raise ApiError(400, f"{at}.role must be one of {', '.join((*ROLES, 'tool'))}", param=f"{at}.role")
            if role == "tool":
                if not isinstance(call, str):
                    raise ApiError(400, f"{at}.tool_call_id must be the id of a call", param=f"{at}.tool_call_id")
                yield {"type": "function_call_output", "call_id": call, "output": content}, at
                continue
            calls = message.get("tool_calls")
            functions = [call.get("function") for call in calls if isinstance(call, dict)] if calls else []
            if content or not functions or role != "assistant":
                is_empty = content is None and role == "assistant"
                yield {**message, "type": "message", "content": "" if is_empty else content}, at
            if role == "assistant":
                yield from (({**each, "type": "function_call"}, at) for each in functions if isinstance(each, dict))

    def ignored(self) -> list[str]:
        """Return the fields without effect. Clients send all fields of our answers back: those are not named."""
        of_others = (message for message in self.messages if message.get("role") != "assistant")
        named = (name for message in of_others for name, value in message.items() if value and name not in _FIELDS)
        return [*super().ignored(), *(f"messages.{name[:60]}" for name in dict.fromkeys(named))]


def routes(parts: Parts) -> list[Route]:
    """Return the route of chat completions."""

    async def completed(request: Request) -> Any:
        owner, heartbeat_s = key_of(request).require("run"), parts.settings.heartbeat_s
        chat, body = await parts.parsed(request, ChatRequest)
        chat.require_supported()
        model = parts.models.named(owner, chat.model)
        said = read(list(chat.items()), lambda id, param: parts.file(owner, id, param))
        if (asked := parts.asking.resumed(owner, said, f"{said.results_at}.tool_call_id")) is not None:
            since = asked.since
        else:
            asked = await parts.asking.begin(owner, chat, said, model, said.files, repeat=repeat_of(request, body))
            since = BEGINNING
        replies = Replies(asked, since)
        if not chat.stream:
            return Following(asked, SlowJson(replies.whole, heartbeat_s, replies.failed))
        chunks = replies.chunks(with_usage=chat.stream_options is not None and chat.stream_options.include_usage)
        return Following(asked, EventStream(chunks, heartbeat_s, replies.headers))

    return [Route(PATH, completed, methods=["POST"])]


class Replies:
    """Responses of one run."""

    def __init__(self, asked: Asked, since: Since) -> None:
        self._asked = asked
        self._since = since
        number = f"-{since.event}" if since.event else ""
        self._head = {
            "id": f"chatcmpl-{asked.hosted.id}{number}",
            "created": int(asked.hosted.created_at),
            "model": asked.model,
        }
        self.headers = {RUN_HEADER: asked.hosted.id}

    async def whole(self) -> tuple[int, Mapping[str, str], Any]:
        """Return the status, the headers and the body of a response, when the run has ended or waits for a tool.

        Raises:
            ApiError: The run has failed.
        """
        try:
            end = await self._asked.outcome()
        except RunFailed as failed:
            raise self._error(failed) from failed
        message: dict[str, Any] = {"role": "assistant", "content": None if end.calls else end.text, "refusal": None}
        message |= {"tool_calls": _calls(end.calls)} if end.calls else {}
        return 200, self.headers, self._completion(message, _finish(end), end)

    def failed(self, error: Exception) -> Any:
        """Return the body for a run that failed after the status was sent, with its partial answer."""
        partial = getattr(error.__cause__, "partial_answer", None)
        message = {"role": "assistant", "content": partial or str(error), "refusal": str(error)}
        end = RunOutcome(self._asked.hosted.usage, facts={"error": getattr(error.__cause__, "kind", None)})
        return {**api_error_of(error).body(), **self._completion(message, "length", end)}

    async def chunks(self, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream.

        Raises:
            ApiError: The run has failed.
        """
        none = {"usage": None} if with_usage else {}
        yield self._chunk({"role": "assistant", "content": ""}, **none)
        telling = Telling()
        try:
            async for step in self._asked.steps(self._since):
                if not isinstance(step, RunOutcome):
                    if text := telling.text(step):
                        yield self._chunk({"reasoning_content": text, "reasoning": text}, **none)
                    continue
                yield b"".join([*self._last_chunks(step, none, with_usage=with_usage), sse("[DONE]")])
        except RunFailed as failed:
            raise self._error(failed) from failed

    def _last_chunks(self, end: RunOutcome, none: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
        """Yield the events of an outcome. They are sent as one piece: each piece is a packet."""
        if end.text:
            yield self._chunk({"content": end.text}, **none)
        if end.calls:
            calls = [{"index": number, **call} for number, call in enumerate(_calls(end.calls))]
            yield self._chunk({"tool_calls": calls}, **none)
        told = self._asked.told(end)
        yield self._chunk({}, _finish(end), **none, rlm=told)
        if with_usage:
            yield self._chunk(None, usage=_usage(*self._since.more(end.usage)), rlm=told)

    def _chunk(self, delta: Mapping[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return sse({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})

    def _completion(self, message: Mapping[str, Any], finish: str, end: RunOutcome) -> dict[str, Any]:
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        usage = {"usage": _usage(*self._since.more(end.usage)), "rlm": self._asked.told(end)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **usage}

    def _error(self, failed: RunFailed) -> ApiError:
        error = api_error_of(failed, is_paid=self._asked.hosted.is_paid)
        error.headers |= self.headers
        return error


def _finish(end: RunOutcome) -> str:
    return "tool_calls" if end.calls else "stop" if end.is_whole else "length"


def _calls(calls: Sequence[ClientCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _usage(read: int, cached: int, written: int) -> dict[str, Any]:
    """Return the tokens of the whole tree since the last response."""
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
