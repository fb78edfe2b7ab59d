"""`POST /v1/chat/completions`: a run as a chat completion."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.routing import Route

from rlm_broker.hosting.owner import Owner
from rlm_broker.service.asking.asking import BEGINNING, Asked, Following, Since
from rlm_broker.service.asking.client_tools import FunctionTool
from rlm_broker.service.asking.conversation import Divided, divided
from rlm_broker.service.asking.schemas import checked_in_turn
from rlm_broker.service.asking.wanted import Wanted
from rlm_broker.service.bodies import fingerprint_of, idempotency_key, parsed
from rlm_broker.service.chat.messages import Conversation, read
from rlm_broker.service.chat.replies import Replies
from rlm_broker.service.chat.request import ChatRequest
from rlm_broker.service.guard import key_of
from rlm_broker.service.parts import Parts
from rlm_broker.service.replying import EventStream, SlowJson

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
    wanted = Wanted(
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


def _divided(parts: Parts, chat: ChatRequest, said: Conversation, *, has_context: bool) -> Divided:
    return divided(
        said.last,
        said.files,
        chat.options,
        inline_chars=parts.settings.inline_chars,
        has_context=has_context,
        param=f"{said.at}.content",
    )
