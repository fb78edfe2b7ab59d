"""Plays a run of the model `offline` in this process: its turns are executed one after the other."""

import contextlib
import io
from typing import Any

from rlm_broker.broker.clients.offline import next_turn, quote
from rlm_broker.results import ChatMessage
from rlm_broker.values.parsing import parse_reply
from sandbox_worker.repl.helpers import search


def played(context: Any, question: str) -> tuple[str, list[str]]:
    """Return the answer of a run about a context, and the replies of its turns."""
    answers: list[str] = []
    names = {"context": context, "search": search, "FINAL": answers.append}
    names["llm_query_batched"] = lambda prompts: [quote(prompt, question) for prompt in prompts]
    messages = [ChatMessage("user", f"`context` is a {type(context).__name__} with some characters in all.")]
    replies: list[str] = []
    while not answers:
        replies.append(next_turn(question, messages))
        (code,) = parse_reply(replies[-1]).code
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(code, names)
        messages += [ChatMessage("assistant", replies[-1]), ChatMessage("user", shown.getvalue())]
    return answers[0], replies


def find(context: Any, question: str) -> str:
    """Return the answer of such a run."""
    return played(context, question)[0]
