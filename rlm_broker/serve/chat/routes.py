"""`POST /v1/chat/completions`: a run as a chat completion, whole or as the chunks of a stream."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.routing import Route

from rlm_broker.errors import RunFailed
from rlm_broker.serve.bodies import fingerprint_of, idempotency_key, parsed
from rlm_broker.serve.chat.request import ChatConversation, ChatRequest, read
from rlm_broker.serve.errors import api_error_of
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.client_tools import ClientCall, FunctionTool
from rlm_broker.serve.questions.conversation import Divided, divided
from rlm_broker.serve.questions.outcome import RunOutcome, Telling
from rlm_broker.serve.questions.question import QuestionRequest
from rlm_broker.serve.questions.runs import BEGINNING, Asked, Following, Since, Suspended
from rlm_broker.serve.questions.schemas import checked_in_turn
from rlm_broker.serve.replies import EventStream, SlowJson, sse
from rlm_broker.usage import Usage

PATH: Final = "/v1/chat/completions"


def routes(parts: Parts) -> list[Route]:
    """Return the route of chat completions."""

    async def completed(request: Request) -> Any:
        key = key_of(request)
        key.require("run")
        chat, body = await parsed(request, ChatRequest, parts.settings.body_bytes, parts.settings.stall_s)
        chat.require_supported()
        asked, since = await _asked(parts, key.owner, chat, idempotency_key(request), fingerprint_of(request, body))
        replies = Replies(asked, since)
        if not chat.stream:
            return Following(asked, SlowJson(replies.whole, parts.settings.heartbeat_s))
        with_usage = chat.stream_options is not None and chat.stream_options.include_usage
        chunks = replies.chunks(with_usage=with_usage)
        return Following(asked, EventStream(chunks, parts.settings.heartbeat_s, replies.headers))

    return [Route(PATH, completed, methods=["POST"])]


async def _asked(
    parts: Parts, owner: Owner, chat: ChatRequest, key: str | None, fingerprint: str
) -> tuple[Asked, Since]:
    """Return the run that a request begins or resumes, and the point at which its response begins."""
    model = parts.models.named(owner, chat.model)

    said = read(chat.messages, lambda id, param: parts.file(owner, id, param))
    if said.results:
        asked = parts.asking.resumed(owner, said.results, f"{said.at}.tool_call_id")
        return asked, asked.since
    output_type, tools = await _types(owner, chat)
    divide = _divided(parts, chat, said, has_context=model.context is not None)
    wanted = QuestionRequest(
        model=model,
        materials=divide.materials,
        value=chat.options.context,
        question=divide.question,
        history=said.history,
        system="\n\n".join(said.system),
        limits=chat.options.limits(max_completion_tokens=chat.most_tokens),
        output_type=output_type,
        tools=tools,
        one_at_a_time=chat.parallel_tool_calls is False,
        key=key,
        fingerprint=fingerprint,
    )
    return await parts.asking.begin(owner, wanted), BEGINNING


async def _types(owner: Owner, chat: ChatRequest) -> tuple[Mapping[str, Any] | None, Sequence[FunctionTool]]:
    """Return the type of the answer and the tools. Their check takes long, so it is done in a thread."""
    if chat.response_format is None and not chat.tools:
        return None, chat.function_tools()
    return await checked_in_turn(owner, lambda: (chat.output_type(), chat.function_tools()))


def _divided(parts: Parts, chat: ChatRequest, said: ChatConversation, *, has_context: bool) -> Divided:
    return divided(
        said.last,
        said.files,
        chat.options,
        inline_chars=parts.settings.inline_chars,
        has_context=has_context,
        param=f"{said.at}.content",
    )


RUN_HEADER: Final = "x-rlm-run"
"""Header of a response with the id of its run."""


class Replies:
    """Responses of one run.

    Args:
        asked: The run.
        since: Point of the run at which the response before has ended.
    """

    def __init__(self, asked: Asked, since: Since) -> None:
        self._asked = asked
        self._since = since
        number = f"-{since.event}" if since.event else ""
        self._head = {
            "id": f"chatcmpl-{asked.hosted.id}{number}",
            "created": int(asked.hosted.created_at),
            "model": asked.model,
        }

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response."""
        return {RUN_HEADER: self._asked.hosted.id}

    async def whole(self) -> tuple[int, Mapping[str, str], Any]:
        """Return the status, the headers and the body of a response, when the run has ended or waits for a tool.

        Raises:
            ApiError: The run has failed.
        """
        try:
            end = await self._asked.outcome()
        except RunFailed as failed:
            raise self._failed(failed) from None
        message: dict[str, Any] = {"role": "assistant", "content": _content(end), "refusal": None}
        if isinstance(end, Suspended):
            message["tool_calls"] = _calls(end.calls)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(end)}
        usage = {"usage": _usage(end.usage, self._since.usage)}
        body = {**self._head, "object": "chat.completion", "choices": [choice], **usage, **self._about(end)}
        return 200, self.headers, body

    async def chunks(self, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of a stream.

        Args:
            with_usage: Whether a last chunk tells the usage.

        Raises:
            ApiError: The run has failed.
        """
        none = {"usage": None} if with_usage else {}
        yield self._chunk({"role": "assistant", "content": ""}, **none)
        telling = Telling()
        try:
            async for step in self._asked.steps(self._since):
                if not isinstance(step, RunOutcome | Suspended):
                    if text := telling.text(step):
                        yield self._chunk({"reasoning_content": text, "reasoning": text}, **none)
                    continue
                if content := _content(step):
                    yield self._chunk({"content": content}, **none)
                if isinstance(step, Suspended):
                    calls = [{"index": number, **call} for number, call in enumerate(_calls(step.calls))]
                    yield self._chunk({"tool_calls": calls}, **none)
                yield self._chunk({}, _finish(step), **none, **self._about(step))
                if with_usage:
                    usage = {"usage": _usage(step.usage, self._since.usage)}
                    yield sse({**self._chunk_head, "choices": [], **usage, **self._about(step)})
        except RunFailed as failed:
            raise self._failed(failed) from None
        yield sse("[DONE]")

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse({**self._chunk_head, "choices": [choice], **more})

    def _about(self, end: RunOutcome | Suspended) -> dict[str, Any]:
        run = self._asked.hosted.id
        if isinstance(end, RunOutcome):
            return {"rlm": end.told(run)}
        return {"rlm": {"run": run, "cost_usd": end.usage.total_cost, "calls": end.usage.total_calls, "limit": None}}

    def _failed(self, failed: RunFailed) -> Exception:
        error = api_error_of(failed, is_paid=self._asked.hosted.is_paid)
        error.headers |= self.headers
        return error


def _content(end: RunOutcome | Suspended) -> str | None:
    return end.text if isinstance(end, RunOutcome) else None


def _finish(end: RunOutcome | Suspended) -> str:
    if isinstance(end, Suspended):
        return "tool_calls"
    return "stop" if end.is_whole else "length"


def _calls(calls: Sequence[ClientCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _usage(usage: Usage, told: Usage) -> dict[str, Any]:
    """Return the tokens of the whole tree that no earlier response has told."""
    read = usage.total_input_tokens - told.total_input_tokens
    written = usage.total_output_tokens - told.total_output_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
