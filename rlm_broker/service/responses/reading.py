"""Items of a conversation as texts and files, as messages for code, and as results of the client's functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlm_broker.service.asking.conversation import inline_file
from rlm_broker.service.errors import ApiError
from rlm_broker.service.materials import Material, Text
from rlm_broker.service.responses.resource import Item

Lookup = Callable[[str, str], Material]
"""Returns the uploaded file of an id; the second argument is its place in the request, for errors."""


@dataclass(slots=True)
class Conversation:
    """Items of a conversation, by what they are for.

    Attributes:
        system: Texts of system and developer messages.
        history: Messages before the last one, as plain values.
        before: Files and long texts of messages before the request, which a REPL that lives on has already.
        files: Files and long texts of messages of the request, but the last one.
        last: Texts and files of the last message of the user, in order; empty if there is none.
        results: Id of a call → result of the function, of the results after the last message.
        at: Place of the last message in the request.
    """

    system: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    before: list[Material] = field(default_factory=list)
    files: list[Material] = field(default_factory=list)
    last: list[Material] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    at: str = "input"


class Reader:
    """Reads items.

    Args:
        file_of: Returns uploaded files.
        inline_chars: Characters beyond which a text of an earlier message is a context, and no part of the variable.
    """

    def __init__(self, file_of: Lookup, inline_chars: int) -> None:
        self._file_of = file_of
        self._inline_chars = inline_chars

    def read(self, before: Sequence[Item], given: Sequence[Item]) -> Conversation:
        """Return what the items of a conversation are for.

        Args:
            before: Items of the responses before this one.
            given: Items of the request.

        Raises:
            ApiError: 400: an item cannot be used, or the last one is not of the user or a function. 404: there is no
                such file.
        """
        read = Conversation()
        items = [(item, "previous_response_id") for item in before]
        items += [(item, f"input.{number}") for number, item in enumerate(given)]
        last = max((n for n, (item, _) in enumerate(items) if item.get("role") == "user"), default=-1)
        for number, (item, at) in enumerate(items):
            if item["type"] == "message":
                if number > last and item["role"] == "assistant" and at.startswith("input."):
                    said = "the last message must be of the user, or a function_call_output"
                    raise ApiError(400, said, param=f"{at}.role")
                read.results.clear()
                self._add_message(read, item, at, is_last=number == last)
            elif item["type"] == "function_call":
                call = {"name": item["name"], "arguments": item["arguments"]}
                read.history.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif item["type"] == "function_call_output":
                text = self._output(item, at)
                read.results[item["call_id"]] = text
                read.history.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        if not any(item.get("role") == "user" or item["type"] == "function_call_output" for item in given):
            raise ApiError(400, "the input has no message of the user: ask a question", param="input")
        return read

    def _add_message(self, read: Conversation, item: Item, at: str, *, is_last: bool) -> None:
        role, parts = item["role"], self._parts(item, f"{at}.content" if at.startswith("input.") else at)
        if role in ("system", "developer"):
            read.system += [part.text for part in parts if isinstance(part, Text)]
        elif is_last:
            read.last, read.at = parts, f"{at}.content"
        else:
            long = [part for part in parts if not isinstance(part, Text) or len(part.text) > self._inline_chars]
            (read.files if at.startswith("input.") else read.before).extend(long)
            shown = {id(part) for part in long}
            said = [_named(part) if id(part) in shown else part.text for part in parts if isinstance(part, Text)]
            said += [_named(part) for part in parts if not isinstance(part, Text)]
            read.history.append({"role": role, "content": said[0] if len(said) == 1 else said or ""})

    def _parts(self, item: Item, at: str) -> list[Material]:
        parts: list[Material] = []
        for number, part in enumerate(item["content"]):
            kind = part["type"]
            if kind == "input_file" and item["role"] == "user":
                parts.append(self._file(part, f"{at}.{number}"))
            elif kind == "input_file" or kind == "input_image":
                why = "images are not taken" if kind == "input_image" else "files are taken in messages of the user"
                raise ApiError(400, f"{at}.{number}: {why}", code="unsupported_content", param=f"{at}.{number}.type")
            else:
                parts.append(Text(f"text_{len(parts) + 1}", part["refusal"] if kind == "refusal" else part["text"]))
        return parts

    def _file(self, part: Mapping[str, Any], at: str) -> Material:
        if part.get("file_url") is not None:
            said = f"{at}.file_url is an address, and nothing is fetched: send file_id or file_data"
            raise ApiError(400, said, param=f"{at}.file_url")
        id, data = part.get("file_id"), part.get("file_data")
        if (id is None) == (data is None):
            raise ApiError(400, f"{at} must have either file_id or file_data", param=at)
        if id is not None:
            return self._file_of(id, f"{at}.file_id")
        return inline_file(data, part.get("filename"), f"{at}.file_data")

    def _output(self, item: Item, at: str) -> str:
        if isinstance(item["output"], str):
            return item["output"]
        if any("text" not in part for part in item["output"]):
            raise ApiError(400, f"{at}.output may have texts alone", code="unsupported_content", param=f"{at}.output")
        return "\n".join(part["text"] for part in item["output"])


def _named(part: Material) -> str:
    return f"[a text of {len(part.text):,} characters]" if isinstance(part, Text) else f"[file {part.name}]"
