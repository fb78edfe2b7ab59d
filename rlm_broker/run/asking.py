"""Prompts of model code as the messages of a call: text, content parts, or a conversation of the code's own."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.results import ChatMessage
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.prompts import ImagePart, MessagePart, Part, Prompt, are_messages


def conversation(prompt: Prompt, system: str | None) -> tuple[ChatMessage, ...]:
    """Return the messages that ask `prompt`.

    Args:
        system: System prompt that precedes them; None or empty adds none.
    """
    asked: tuple[ChatMessage, ...]
    if isinstance(prompt, str):
        asked = (ChatMessage("user", prompt),)
    elif messages := _messages(prompt):
        asked = tuple(ChatMessage(each.role, msgspec.to_builtins(each.content)) for each in messages)
    else:
        asked = (ChatMessage("user", msgspec.to_builtins(prompt)),)
    return (ChatMessage("system", system), *asked) if system else asked


def problem_with(prompt: Sequence[Part | MessagePart], system: str | None) -> str | None:
    """Return why a prompt of content parts or messages is refused, or None if it may be sent. Model code wrote it.

    Images must be `data:` addresses. Any other address would be fetched by the provider, or, with some clients, by this
    machine: model code could make it request addresses of the local network.
    """
    try:
        has_messages = are_messages(prompt)
    except MessageInvalid as problem:
        return str(problem)
    messages = _messages(prompt)
    if system and any(message.role == "system" for message in messages):
        return "a prompt with a system message takes no system prompt beside it"
    contents = [message.content for message in messages if not isinstance(message.content, str)]
    parts = [part for content in contents for part in content] if has_messages else prompt
    if all(part.image_url.url.startswith("data:image/") for part in parts if isinstance(part, ImagePart)):
        return None
    return "an image is given as data: {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"


def prompt_key(prompt: Prompt) -> str:
    """Return a key that is equal for equal prompts."""
    return prompt if isinstance(prompt, str) else repr(prompt)


def shown(request: LMRequest, *, is_of_code: bool) -> str | list[Any]:
    """Return what the event of a call shows: the last message, or all if model code asks with a conversation."""
    messages = request.messages
    if not is_of_code or len(messages) == 1 or (len(messages) == 2 and messages[0].role == "system"):
        return messages[-1].content
    return [{"role": message.role, "content": message.content} for message in messages]


def new_system(request: LMRequest) -> str | None:
    """Return the system prompt of a call if it is new in the trace: None for the later turns of a loop, which repeat
    it."""
    first = request.messages[0]
    is_new = first.role == "system" and len(request.messages) == 2
    return str(first.content) if is_new else None


def _messages(prompt: Sequence[Part | MessagePart]) -> list[MessagePart]:
    return [part for part in prompt if isinstance(part, MessagePart)]
