"""The messages of a chat request: their texts and files, and which of them are results of tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlm_broker.service.asking.conversation import inline_file
from rlm_broker.service.errors import ApiError
from rlm_broker.service.materials import Material, Text

Lookup = Callable[[str, str], Material]
"""Returns the uploaded file of an id; the second argument is its place in the request, for errors."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_FIELDS: Final = {"role", "content", "name"}
_REFUSED: Final = {
    "image_url": "images are not taken: send a text, or a file that has text",
    "input_audio": "audio is not taken: send a text, or a file that has text",
}


@dataclass(slots=True)
class Conversation:
    """Messages of a request, by what they are for.

    Attributes:
        system: Texts of system and developer messages.
        history: Messages before the last one, as plain values.
        files: Files of those messages.
        last: Texts and files of the last message, in order.
        results: Id of a call → result of the tool; empty unless the last messages are such.
        at: Place of the last message in the request.
    """

    system: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    files: list[Material] = field(default_factory=list)
    last: list[Material] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    at: str = ""


def read(messages: Sequence[Mapping[str, Any]], file_of: Lookup) -> Conversation:
    """Return what the messages of a request are for.

    Args:
        messages: Messages as the client sent them.
        file_of: Returns uploaded files.

    Raises:
        ApiError: 400: a message has a wrong form, or the last one is not of the user or a tool. 404: there is no such
            file.
    """
    read = Conversation()
    last = len(messages) - 1
    for number, message in enumerate(messages):
        at = f"messages.{number}"
        role = _role(message, at)
        parts = _parts(message, role, f"{at}.content", file_of)
        if role in ("system", "developer"):
            read.system += [part.text for part in parts if isinstance(part, Text)]
        elif number == last and role == "user":
            read.last = parts
        else:
            read.history.append(_plain(message, role, parts))
            read.files += [part for part in parts if not isinstance(part, Text)]
    read.at = f"messages.{last}"
    if messages[last]["role"] == "tool":
        read.results = _results(messages)
    elif messages[last]["role"] != "user":
        raise ApiError(400, "the last message must be of the user, or the result of a tool", param=f"{read.at}.role")
    return read


def _role(message: Mapping[str, Any], at: str) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    if role != "assistant":  # clients send the fields of our own answers back, such as reasoning_content
        known = _FIELDS | ({"tool_call_id"} if role == "tool" else set())
        if extra := sorted(name for name in message.keys() - known if message[name] is not None):
            raise ApiError(400, f"{at} has an unknown field {extra[0][:60]!r}", param=f"{at}.{extra[0][:60]}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ApiError(400, f"{at}.tool_call_id must be the id of a call", param=f"{at}.tool_call_id")
    return str(role)


def _parts(message: Mapping[str, Any], role: str, at: str, file_of: Lookup) -> list[Material]:
    content = message.get("content")
    if isinstance(content, str):
        return [Text("text", content)]
    if content is None and role == "assistant":
        return []
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be text or a list of parts", param=at)
    made: list[Material] = []
    for number, part in enumerate(content):
        made.append(_part(part, role, f"{at}.{number}", len(made) + 1, file_of))
    return made


def _part(part: Any, role: str, at: str, number: int, file_of: Lookup) -> Material:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        if not isinstance(text := part.get(kind), str):
            raise ApiError(400, f"{at}.{kind} must be text", param=f"{at}.{kind}")
        return Text(f"text_{number}", text)
    if kind == "file" and role == "user":
        return _file(part.get("file"), f"{at}.file", file_of)
    why = _REFUSED.get(str(kind), "parts are texts, and files of the user")
    raise ApiError(400, f"{at}: {why}", code="unsupported_content", param=f"{at}.type")


def _file(file: Any, at: str, file_of: Lookup) -> Material:
    if not isinstance(file, dict) or ("file_id" in file) == ("file_data" in file):
        raise ApiError(400, f"{at} must have either file_id or file_data", param=at)
    if "file_id" not in file:
        return inline_file(file["file_data"], file.get("filename"), f"{at}.file_data")
    if not isinstance(file["file_id"], str):
        raise ApiError(400, f"{at}.file_id must be the id of a file", param=f"{at}.file_id")
    return file_of(file["file_id"], f"{at}.file_id")


def _plain(message: Mapping[str, Any], role: str, parts: Sequence[Material]) -> dict[str, Any]:
    """Return an earlier message as code finds it."""
    said = [part.text if isinstance(part, Text) else f"[file {part.name}]" for part in parts]
    plain: dict[str, Any] = {"role": role, "content": said[0] if len(said) == 1 else said or ""}
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if role == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
    if role == "assistant" and isinstance(calls := message.get("tool_calls"), list) and calls:
        plain["tool_calls"] = [call.get("function") for call in calls if isinstance(call, dict)]
    return plain


def _results(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the results at the end of the messages, by the ids of their calls."""
    found: dict[str, str] = {}
    for message in reversed(messages):
        if message["role"] != "tool":
            break
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        found[message["tool_call_id"]] = text
    return found
