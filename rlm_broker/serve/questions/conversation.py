"""Uses of the items of a conversation: instructions, history, context, or the question. Structure decides it.

Both interfaces bring their messages as items of OpenAI's responses, see `Item`. The rules hold for both:

- Files of any message, and texts of the last message of the user before its last text, are the context.
- The last text of that message is the question. `rlm.question` takes its place; then all its texts are context.
- A text without any context is a context itself, with its task in it.
- All other messages are a variable. Files in them stand there by name, and pictures as "[image]": a conversation that
  once had a picture can go on.
"""

import asyncio
import base64
import binascii
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlm_broker import Instructions, StoredContext, store_as_it_is
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Material, Text, stored_of
from rlm_broker.serve.questions.client_tools import CONVERSATION
from rlm_broker.serve.questions.request import AT, RlmOptions, ServedModel

Item = dict[str, Any]
"""A message, a function call or its output, as `/v1/responses` has them. Parts have the form of either interface."""
Lookup = Callable[[str, str], Material]
"""Returns the uploaded file of an id; the second argument is its place in the request, for errors."""
EARLIER: Final = "previous_response_id"
"""Place of items of an earlier request."""
ROLES: Final = ("system", "developer", "user", "assistant")
TEXTS: Final = ("text", "input_text", "output_text", "refusal")
"""Types of parts with text."""
_FILES: Final = ("file", "input_file")
_SHOWN_AS: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "video_url": "video",
}
"""Type of a refused part → its name in the history."""
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.ASCII)
_ENDINGS: Final = {"application/pdf": ".pdf", "text/csv": ".csv", "application/json": ".json", "text/html": ".html"}


@dataclass(slots=True)
class Dialogue:
    """Items of a conversation, by what they are for.

    Attributes:
        system: Texts of system and developer messages.
        history: All other messages but the last one of the user, as plain values.
        before: Files and long texts of messages before the request. A REPL of the conversation has them already.
        files: Files and long texts of messages of the request, but the last one of the user.
        last: Texts and files of the last message of the user, in order; empty if there is none.
        results: Id of a call → result of the function, of the results at the end.
        at: Place of the content of the last message of the user.
        results_at: Place of the last result.
    """

    system: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    before: list[Material] = field(default_factory=list)
    files: list[Material] = field(default_factory=list)
    last: list[Material] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    at: str = ""
    results_at: str = ""


def read(items: Sequence[tuple[Item, str]], file_of: Lookup, inline_chars: int | None = None) -> Dialogue:
    """Return what the items of a conversation are for.

    Args:
        items: Each item with its place in the request, or with `EARLIER`.
        file_of: Returns uploaded files.
        inline_chars: Characters beyond which a text of an earlier message is context, and no part of the history.

    Raises:
        ApiError: 400: an item cannot be used, or the last one is not of the user or a function. 404: there is no such
            file.
    """
    read = Dialogue()
    last = max((n for n, (item, _) in enumerate(items) if item.get("role") == "user"), default=-1)
    end, end_at, at = "", "", "input"
    for number, (item, at) in enumerate(items):
        if item["type"] == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            read.history.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item["type"] == "function_call_output":
            text = _output(item, at)
            read.results[item["call_id"]], read.results_at = text, at
            read.history.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        elif item["type"] != "message":
            continue
        elif (role := item["role"]) in ("system", "developer"):
            read.system += [part.text for part in _parts(item, at, file_of) if isinstance(part, Text)]
            continue
        else:
            read.results.clear()
            parts = _parts(item, at, file_of, is_last=number == last)
            if number == last:
                read.last, read.at = parts, at if at == EARLIER else f"{at}.content"
            else:
                long = [part for part in parts if _is_context(part, inline_chars)]
                (read.before if at == EARLIER else read.files).extend(long)
                read.history.append(_plain(item, role, parts, inline_chars))
        end, end_at = str(item.get("role", item["type"])), at
    if end_at in ("", EARLIER):
        raise ApiError(400, "the request has no message of the user: ask a question", param=at)
    if end in ("assistant", "function_call"):
        said = "the last message must be of the user, or the result of a function"
        raise ApiError(400, said, param=f"{end_at}.role" if end == "assistant" else end_at)
    return read


def _is_context(part: Material, inline_chars: int | None) -> bool:
    return not isinstance(part, Text) or (inline_chars is not None and len(part.text) > inline_chars)


def _plain(item: Item, role: str, parts: Sequence[Material], inline_chars: int | None) -> dict[str, Any]:
    """Return an earlier message as code finds it."""
    said = []
    for part in parts:
        if not isinstance(part, Text):
            said.append(f"[file {part.name}]")
        else:
            said.append(f"[a text of {len(part.text):,} characters]" if _is_context(part, inline_chars) else part.text)
    name = {"name": item["name"]} if isinstance(item.get("name"), str) else {}
    return {"role": role, "content": said[0] if len(said) == 1 else said or "", **name}


def _output(item: Item, at: str) -> str:
    if isinstance(output := item["output"], str):
        return output
    parts = [part for part in output if isinstance(part, dict)] if isinstance(output, list) else []
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if not isinstance(output, list) or len(texts) < len(output):
        raise ApiError(400, f"{at}: a result may have texts alone", code="unsupported_content", param=f"{at}.output")
    return "\n".join(texts)


def _parts(item: Item, at: str, file_of: Lookup, *, is_last: bool = False) -> list[Material]:
    """Return the parts of a message. What is not taken in the last message of the user is named in the others."""
    content, at = item["content"], at if at == EARLIER else f"{at}.content"
    if isinstance(content, str):
        return [Text("text", content)]
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be text or a list of parts", param=at)
    made: list[Material] = []
    for number, part in enumerate(content):
        place = at if at == EARLIER else f"{at}.{number}"
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind in TEXTS and (kind != "refusal" or item["role"] == "assistant"):
            if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
                raise ApiError(400, f"{place}.text must be text", param=f"{place}.text")
            made.append(Text(f"text_{len(made) + 1}", text))
        elif kind in _FILES and item["role"] == "user":
            made.append(_file(part, place, file_of))
        elif kind in _SHOWN_AS and not is_last:
            made.append(Text(f"text_{len(made) + 1}", f"[{_SHOWN_AS[kind]}]"))
        else:
            why = f"{_SHOWN_AS[kind]} is not taken: send a text" if kind in _SHOWN_AS else "parts are texts"
            said = f"{place}: {why}, or a file of the user that has text"
            raise ApiError(400, said, code="unsupported_content", param=f"{place}.type")
    return made


def _file(part: Mapping[str, Any], at: str, file_of: Lookup) -> Material:
    if part["type"] == "file":
        part, at = part["file"] if isinstance(part.get("file"), dict) else {}, f"{at}.file"
    if part.get("file_url") is not None:
        said = f"{at}.file_url is an address, and nothing is fetched: send file_id or file_data"
        raise ApiError(400, said, param=f"{at}.file_url")
    id, data = part.get("file_id"), part.get("file_data")
    if (id is None) == (data is None):
        raise ApiError(400, f"{at} must have either file_id or file_data", param=at)
    if id is None:
        return inline_file(data, part.get("filename"), f"{at}.file_data")
    if not isinstance(id, str):
        raise ApiError(400, f"{at}.file_id must be the id of a file", param=f"{at}.file_id")
    return file_of(id, f"{at}.file_id")


def inline_file(data: Any, filename: Any, param: str) -> InlineFile:
    """Return a file within a request, as a data URL or as base64.

    Raises:
        ApiError: 400: it is an address, never fetched, or no base64.
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


def divided(
    said: Dialogue, earlier: Sequence[Material], options: RlmOptions, *, inline_chars: int, has_context: bool
) -> tuple[tuple[Material, ...], str | None]:
    """Divide the last message into context and question.

    Args:
        said: The conversation.
        earlier: Files of earlier messages.
        options: The object `rlm` of the request.
        inline_chars: Characters beyond which a text cannot be a question.
        has_context: Whether the model was named with a context of the server's.

    Returns:
        Texts and files as context, and the question; None: the task is in the context.

    Raises:
        ApiError: 400: there is no question, it is too long, or there are two contexts.
    """
    parts, question, at = list(said.last), options.question, "rlm.question"
    if question is None:
        at = said.at
        where = max((n for n, part in enumerate(parts) if isinstance(part, Text)), default=None)
        if where is None:
            raise ApiError(400, "the last message has no text: ask a question beside the files", param=at)
        question = getattr(parts.pop(where), "text", "")
    if not question.strip():
        raise ApiError(400, f"{at} is empty: say what you want to know", param=at)
    materials = tuple(_each_once([*earlier, *parts]))
    if options.context is not None and (materials or has_context):
        raise ApiError(400, "the request has rlm.context and another context: give one", param="rlm.context")
    if len(question) <= inline_chars:
        return materials, question
    if materials or has_context or options.context is not None:
        said_chars = f"the question has {len(question):,} characters, more than inline_chars = {inline_chars:,}"
        raise ApiError(400, f"{said_chars}: put the text that it is about into a part of its own before it", param=at)
    return (Text("text", question),), None


def _each_once(materials: Sequence[Material]) -> Iterator[Material]:
    """Yield materials, each file once: clients send earlier messages again."""
    known: set[Material] = set()
    for each in materials:
        if isinstance(each, Text) or each not in known:
            known.add(each)
            yield each


@dataclass(frozen=True, slots=True)
class RunQuestion:
    """A question with its context.

    Attributes:
        text: The question; None: the task is in the context.
        materials: Texts and files as its context.
        value: Context of plain values, in place of materials; None is none.
        history: Earlier turns, as dicts of `role` and `content`, the oldest first.
        system: Instructions of the caller, beside our prompt; empty if there are none.
    """

    text: str | None
    materials: Sequence[Material] = ()
    value: Any = None
    history: Sequence[Mapping[str, Any]] = ()
    system: str = ""

    @classmethod
    def of(
        cls, said: Dialogue, options: RlmOptions, model: ServedModel, earlier: Sequence[Material], inline_chars: int
    ) -> "RunQuestion":
        """Return the question of a conversation. A model without a REPL gets the messages themselves as its context.

        Args:
            said: The conversation.
            options: The object `rlm` of the request.
            model: Its model.
            earlier: Files of earlier messages.
            inline_chars: Characters beyond which a text cannot be a question.

        Raises:
            ApiError: 400: there is no question, or the model cannot take what the request has.
        """
        has_context = model.context is not None
        materials, text = divided(said, earlier, options, inline_chars=inline_chars, has_context=has_context)
        system = "\n\n".join([*said.system, *([_LATE_RESULTS] if said.results else [])])
        if not model.is_plain:
            if not materials and options.context is None and not has_context:  # the context has the task in it
                materials, text = (Text("question", text or ""),), None
            return cls(text, materials, options.context, said.history, system)
        if any(not isinstance(each, Text) for each in materials):
            why = f"the model {model.name} takes texts alone: name it without @plain to ask about a file"
            raise ApiError(400, why, code="unsupported_content", param="model")
        if options.context is not None:
            return cls(text, (), options.context, (), system)
        last = "\n\n".join([*(each.text for each in materials if isinstance(each, Text)), *([text] if text else [])])
        rules = [{"role": "system", "content": system}] if system else []
        return cls(None, (), [*rules, *map(_as_text, said.history), {"role": "user", "content": last}])

    @property
    def task(self) -> str | None:
        """Text with the task: the question, or the last text of the materials or messages."""
        if self.text is not None:
            return self.text
        texts = [each.text for each in self.materials if isinstance(each, Text)]
        return texts[-1] if texts else self.value[-1]["content"] if self.value else None

    def instructions(self, base: Instructions) -> Instructions | None:
        """Return the server's instructions with the caller's beside them, or None if it has none."""
        if not self.system.strip():
            return None
        own = f"Instructions of the caller:\n{self.system.strip()}"
        return dataclasses.replace(base, prologue=f"{base.prologue}\n\n{own}" if base.prologue else own)

    def variables(self) -> dict[str, Any]:
        """Return what code finds beside the context, as values for `Tools`."""
        if not self.history:
            return {}
        told = (
            f"the {len(self.history):,} earlier messages of this conversation, a list of dicts with `role` and "
            "`content`, the oldest first. The question may refer to them"
        )
        return {CONVERSATION: {"tool": [dict(message) for message in self.history], "description": told}}

    async def context(self, model: ServedModel) -> StoredContext:
        """Return the context, for the caller to close.

        Raises:
            ContextRefused: A file has no text, or there is no memory for it.
            UnknownHandle: A file was deleted meanwhile.
        """
        if self.value is not None:
            return await asyncio.to_thread(store_as_it_is, self.value)
        if model.context is None:
            return await stored_of(self.materials)
        if not self.materials:
            return model.context.another()
        with await stored_of(self.materials) as brought:
            name = model.name.rpartition(AT)[2]
            return await asyncio.to_thread(store_as_it_is, {name: model.context, "attached": brought})


_LATE_RESULTS = (
    f"Functions were called for this question before. The calls and their results are at the end of `{CONVERSATION}`."
)


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message of the history for a model that takes texts of a user, an assistant and a system alone."""
    content, role = message["content"], message["role"]
    said = [content] if isinstance(content, str) else list(content)
    said += [f"[calls {call['name']}({call['arguments']})]" for call in message.get("tool_calls", ())]
    if role == "tool":
        said, role = ["[result]", *said], "user"
    return {"role": role, "content": "\n".join(filter(None, said))}
