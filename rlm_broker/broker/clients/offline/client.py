"""The offline model as a client: turns of a run's loop get code, any other call gets an answer from its prompt.

The code is the source of `passages`, so linters, type checkers and tests cover what runs in the REPL.
"""

import asyncio
import inspect
import re
from collections.abc import Sequence

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.clients.offline import passages
from rlm_broker.errors import ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from sandbox_worker.wire.names import CONTEXT

_CONTEXT_NAME = re.compile(rf"^`({CONTEXT}(?:_\d+)?)` is a ", re.MULTILINE)
"""Line of a run's first message that names the variable of its context."""


class OfflineClient(BaseClient):
    """A stand-in for a language model: code for a run's loop, and quotations for what code asks.

    It takes the question from the request (`LMRequest.question`), never from a prompt: the author of a document could
    write a question into it. It has no state, so one client serves any number of concurrent runs.
    """

    model_name = "offline"
    answers_types = False

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request: a turn of a loop with code, any other from the text of its last user message.

        The usage has no tokens and the cost 0.

        Raises:
            ModelFailed: The code of the last turn did not answer.
        """
        question = (request.question or "").strip()
        if request.is_loop:
            text = next_turn(question, request.messages)
        else:
            prompt = _prompt(request.messages)
            if prompt.strip() != question:  # what repeats the question is no answer; spaces keep the offsets
                prompt = prompt.replace(question, " " * len(question))
            # In a thread: a plain completion may hold a whole context, and would block the event loop of all runs.
            text = await asyncio.to_thread(passages.find, prompt, question)
        return LMReply(text, Usage(total_calls=1, total_cost=0.0))


def next_turn(question: str, messages: Sequence[ChatMessage]) -> str:
    """Return the reply that follows the last one in the conversation.

    Raises:
        ModelFailed: That was the last turn. Its code ends the run, so it failed: the answer is unknown, not NOT FOUND.
    """
    plan = turns(question, _context_name(messages))
    last = next((message.content for message in reversed(messages) if message.role == "assistant"), "")
    number = plan.index(last) + 1 if isinstance(last, str) and last in plan else 0
    if number < len(plan):
        return plan[number]
    seen = [line.strip() for line in str(messages[-1].content).splitlines() if line.strip()]
    reason = next((line for line in reversed(seen) if "Error" in line or "killed" in line), (seen or [""])[-1])
    raise ModelFailed(f"offline: its search did not come to an end: {reason[:300]}")


def turns(question: str, name: str = CONTEXT) -> list[str]:
    """Return the replies of a run about the variable `name`, in their order: a look at the context, then the search."""
    look = f"{inspect.getsource(passages)}\n\nprint(look({name}))"
    # `repr` doubles each backslash, so this escape is never escaped itself, and no backtick closes the fence.
    find = f"FINAL(find({name}, {question!r}))".replace("`", "\\x60")
    return [
        f"I write down how to search, and look at the context.\n\n```repl\n{look}\n```",
        f"Now I search it for the words of the question.\n\n```repl\n{find}\n```",
    ]


def _context_name(messages: Sequence[ChatMessage]) -> str:
    """Return the name of the variable with the run's context. In a persistent REPL, later runs have further names."""
    named = (_CONTEXT_NAME.search(str(message.content)) for message in messages if message.role == "user")
    return next((found[1] for found in named if found), CONTEXT)


def _prompt(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message of the user."""
    content = next((message for message in reversed(messages) if message.role == "user"), messages[-1]).content
    if isinstance(content, str):
        return content
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(part for part in parts if isinstance(part, str))
