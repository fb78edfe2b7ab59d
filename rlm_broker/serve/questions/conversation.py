"""Which part of a conversation is context, and which is the question. Structure decides it, never a guess.

The rules hold for all interfaces:

- Files of any message, and texts of the last message before its last text, are the context.
- The last text of the last message is the question. `rlm.question` takes its place; then all its texts are context.
- A text without any context is a context itself, with its task in it.
- Earlier messages are a variable. Files in them stand there by name.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Material, Text
from rlm_broker.serve.questions.options import RlmOptions

CONVERSATION: Final = "conversation"
"""Name of the variable that holds the earlier messages."""
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.ASCII)
_ENDINGS: Final = {"application/pdf": ".pdf", "text/csv": ".csv", "application/json": ".json", "text/html": ".html"}


@dataclass(frozen=True, slots=True)
class Divided:
    """Context and question of a conversation.

    Attributes:
        materials: Texts and files that the question is about.
        question: Question; None: the task is in the context.
    """

    materials: tuple[Material, ...]
    question: str | None


def divided(
    last: Sequence[Material],
    earlier: Sequence[Material],
    options: RlmOptions,
    *,
    inline_chars: int,
    has_context: bool,
    param: str,
) -> Divided:
    """Divide the last message into context and question.

    Args:
        last: Texts and files of the last message, in order.
        earlier: Files of earlier messages.
        options: The object `rlm` of the request.
        inline_chars: Characters beyond which a text cannot be a question.
        has_context: Whether the model was named with a context of the server's, or an earlier response has one.
        param: Place of the last message's content in the request.

    Raises:
        ApiError: 400: there is no question, it is too long, or there are two contexts.
    """
    parts, question = list(last), options.question
    if question is None:
        where = max((n for n, part in enumerate(parts) if isinstance(part, Text)), default=None)
        if where is None:
            raise ApiError(400, "the last message has no text: ask a question beside the files", param=param)
        asked = parts.pop(where)
        assert isinstance(asked, Text)
        question = asked.text
    elif not question.strip():
        raise ApiError(400, "rlm.question is empty: say what you want to know", param="rlm.question")
    if not question.strip():
        raise ApiError(400, "the last text is empty: say what you want to know", param=param)
    materials = _each_once([*earlier, *parts])
    if options.context is not None:
        if materials or has_context:
            raise ApiError(400, "the request has rlm.context and another context: give one", param="rlm.context")
        has_context = True
    if len(question) > inline_chars:
        if materials or has_context:
            raise ApiError(
                400,
                f"the question has {len(question):,} characters, more than inline_chars = {inline_chars:,}: put the "
                "text that it is about into a part of its own before it",
                param=param if options.question is None else "rlm.question",
            )
        return Divided((Text("text", question),), None)
    return Divided(materials, question)


def inline_file(data: Any, filename: Any, param: str) -> InlineFile:
    """Return a file that a request has within, as a data URL or as base64.

    Raises:
        ApiError: 400: it is an address, which is not fetched, or no base64.
    """
    if not isinstance(data, str) or not isinstance(filename, str | None):
        raise ApiError(400, f"{param} must be base64 or a data URL, beside a filename", param=param)
    if re.match(r"[a-z][a-z0-9+.-]*://", data, re.IGNORECASE):
        raise ApiError(400, f"{param} is an address, and nothing is fetched: send the content", param=param)
    head = _DATA_URL.match(data)
    try:
        content = base64.b64decode(data[head.end() :] if head else data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{param} is not valid base64", param=param) from None
    return InlineFile(filename or f"file{_ENDINGS.get((head and head[1]) or '', '')}", content)


def _each_once(materials: Sequence[Material]) -> tuple[Material, ...]:
    """Return materials without files that the conversation has twice: clients send earlier messages again."""
    known: set[Material] = set()
    once: list[Material] = []
    for each in materials:
        if isinstance(each, Text) or each not in known:
            once.append(each)
            known.add(each)
    return tuple(once)
