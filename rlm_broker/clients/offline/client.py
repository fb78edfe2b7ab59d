"""The offline model as a client. A turn of a loop gets code; any other call gets a quotation from its prompt."""

import asyncio

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.offline import extract, strategy
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage


class OfflineClient(BaseClient):
    """A stand-in for a language model: code for a run's loop, and quotations for what that code asks.

    It takes the question from the request (`LMRequest.question`), never from a prompt: the author of a document could
    write a question into it. It has no state, so one client serves any number of concurrent runs.
    """

    model_name = "offline"
    answers_types = False

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request: a turn of a loop with code, any other from the text of its last user message.

        The usage has no tokens and the cost 0.

        Raises:
            ModelFailed: The code that it had sent for this question did not finish.
        """
        if request.question is None or not request.question.strip():
            text = strategy.without_question(request.is_loop)
        elif request.is_loop:
            text = strategy.turn(request.question, request.messages)
        else:
            prompt = _text(_last_from_user(request.messages))
            # In a thread: a plain completion may hold a whole context, and would block the event loop of all runs.
            text = await asyncio.to_thread(extract.complete, prompt, request.question)
        return LMReply(text, Usage(total_calls=1, total_cost=0.0))


def _last_from_user(messages: tuple[ChatMessage, ...]) -> ChatMessage:
    return next((message for message in reversed(messages) if message.role == "user"), messages[-1])


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = (part.get("text") if isinstance(part, dict) else part for part in message.content)
    return "\n".join(part for part in parts if isinstance(part, str))
