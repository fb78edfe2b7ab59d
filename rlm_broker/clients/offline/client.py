"""The offline model as a client: which of its two sides answers a request."""

import asyncio

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.offline import extract, strategy
from rlm_broker.results import ChatMessage, Usage


class OfflineClient(BaseClient):
    """A stand-in for a language model: REPL code for a run's loop, extractive answers for what that code asks.

    The question comes with the request (`LMRequest.question`) and is never looked for in a prompt: whoever writes a
    document could write a question into it. Without state: one client serves any number of runs at once.
    """

    model_name = "offline"
    answers_types = False

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request: a loop turn with code, anything else from the text of its last user message.

        It uses no tokens and costs nothing.

        Raises:
            ModelFailed: The code that it sent for this question did not come to an end.
        """
        if request.question is None or not request.question.strip():
            text = strategy.without_question(request.is_loop)
        elif request.is_loop:
            text = strategy.turn(request.question, request.messages)
        else:
            prompt = _text(_last_from_user(request.messages))
            # In a thread: a plain completion may hold a whole context, and the loop serves other runs meanwhile.
            text = await asyncio.to_thread(extract.complete, prompt, request.question)
        return LMReply(text, Usage(total_calls=1, total_cost=0.0))


def _last_from_user(messages: tuple[ChatMessage, ...]) -> ChatMessage:
    return next((message for message in reversed(messages) if message.role == "user"), messages[-1])


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = (part.get("text") if isinstance(part, dict) else part for part in message.content)
    return "\n".join(part for part in parts if isinstance(part, str))
