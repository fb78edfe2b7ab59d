"""Chat completions as clients read them: a whole one, and the chunks of a stream."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from rlm_broker.errors import RunFailed
from rlm_broker.service.asking.asking import Asked, Since, Suspended
from rlm_broker.service.asking.client_tools import ClientCall
from rlm_broker.service.asking.outcome import Outcome
from rlm_broker.service.asking.telling import Telling
from rlm_broker.service.errors import api_error_of
from rlm_broker.service.replying import sse
from rlm_broker.usage import Usage

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
                if not isinstance(step, Outcome | Suspended):
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

    def _about(self, end: Outcome | Suspended) -> dict[str, Any]:
        run = self._asked.hosted.id
        if isinstance(end, Outcome):
            return {"rlm": end.told(run)}
        return {"rlm": {"run": run, "cost_usd": end.usage.total_cost, "calls": end.usage.total_calls, "limit": None}}

    def _failed(self, failed: RunFailed) -> Exception:
        error = api_error_of(failed, is_paid=self._asked.hosted.is_paid)
        error.headers |= self.headers
        return error


def _content(end: Outcome | Suspended) -> str | None:
    return end.text if isinstance(end, Outcome) else None


def _finish(end: Outcome | Suspended) -> str:
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
