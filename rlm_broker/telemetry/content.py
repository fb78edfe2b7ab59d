"""Texts of runs as the values of attributes: bounded, and prompts and replies in the conventions' form."""

import json
from typing import Any, Final

from rlm_broker.values.text import shorten

MOST_CHARS: Final = 16_384
"""Characters of one text in an attribute; longer text is cut, and the cut is marked."""
NAME_CHARS: Final = 200
"""Characters of a model's, a run's or a tool's name; longer ones are cut."""
MOST_MESSAGES: Final = 16
"""Messages of one prompt; of more the last are kept."""


def named(text: str) -> str:
    """Return a name, cut to `NAME_CHARS` characters."""
    return _whole(text[:NAME_CHARS])


def cut(text: str) -> str:
    """Return a text, cut to `MOST_CHARS` characters."""
    return _whole(shorten(text, MOST_CHARS, end=0, gap=""))


def instructions(system: str) -> str:
    """Return the value of `gen_ai.system_instructions`."""
    return _json([_part(system)])


def asked(prompt: str | list[Any]) -> str:
    """Return the value of `gen_ai.input.messages` for a text, or for a list of chat messages."""
    if isinstance(prompt, str):
        return _json([_message("user", prompt)])
    messages = [each for each in prompt if isinstance(each, dict)][-MOST_MESSAGES:]
    return _json([_message(named(str(each.get("role", "user"))), each.get("content")) for each in messages])


def answered(reply: str) -> str:
    """Return the value of `gen_ai.output.messages` for one reply."""
    return _json([{**_message("assistant", reply), "finish_reason": "stop"}])


def code(source: str) -> str:
    """Return the value of `gen_ai.tool.call.arguments` for a block."""
    return _json({"code": cut(source)})


def printed(stdout: str, stderr: str, error: str | None) -> str:
    """Return the value of `gen_ai.tool.call.result` for a block."""
    told = {"stdout": stdout, "stderr": stderr, "error": error or ""}
    return _json({name: cut(text) for name, text in told.items() if text})


def _message(role: str, content: Any) -> dict[str, Any]:
    """Return one message. Pictures and other parts without text are named by their type alone."""
    if isinstance(content, str):
        return {"role": role, "parts": [_part(content)]}
    parts = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    return {"role": role, "parts": [_part(each.get("text"), each.get("type")) for each in parts[:MOST_MESSAGES]]}


def _part(text: Any, kind: Any = None) -> dict[str, Any]:
    if isinstance(text, str):
        return {"type": "text", "content": cut(text)}
    return {"type": named(str(kind))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _whole(text: str) -> str:
    """Return a text without lone surrogates, for which an exporter would drop all spans of its batch."""
    return text if text.isascii() else text.encode(errors="replace").decode()
