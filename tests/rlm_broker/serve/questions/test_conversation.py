"""Uses of the items of a conversation, by the messages of chats and by the items of responses."""

import base64
from typing import Any

import pytest

from rlm_broker.serve.chat import ChatRequest
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Material, Text
from rlm_broker.serve.questions.conversation import EARLIER, Dialogue, divided, inline_file, read
from rlm_broker.serve.questions.request import RlmOptions
from rlm_broker.serve.responses.bodies import ResponseRequest

FILE, OTHER = InlineFile("a.txt", b"hello"), InlineFile("b.txt", b"b")
CHAT_FILE = {"type": "file", "file": {"file_id": "file-1"}}
INPUT_FILE = {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"hello").decode()}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def file_of(id: str, param: str) -> Material:
    if id != "file-1":
        raise ApiError(404, f"no file {id}", param=param)
    return FILE


def chat(*messages: Any) -> Dialogue:
    return read(list(ChatRequest(model="m", messages=list(messages)).items()), file_of)


def items(*given: Any) -> list[Any]:
    def referred(id: str, param: str) -> Any:
        raise ApiError(404, f"no item {id}", param=param)

    return list(ResponseRequest(model="m", input=list(given)).items("resp_5f", referred))


def response(*given: Any, before: Any = ()) -> Dialogue:
    earlier = [(item, EARLIER) for item, _ in items(*before)] if before else []
    return read([*earlier, *items(*given)], file_of, inline_chars=100)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def call(id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_each_message_of_a_chat_has_its_use() -> None:
    said = chat(
        {"role": "system", "content": "one"},
        {**user(CHAT_FILE, "first", PICTURE), "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "ignored", "tool_calls": [call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        user("note", "last"),
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
    )
    assert said.system == ["one", "two"]
    assert said.history == [
        {"role": "user", "content": ["[file a.txt]", "first", "[image]"], "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "no"},
    ]
    assert said.files == [FILE]
    assert said.last == [Text("text_1", "note"), Text("text_2", "last")]
    assert (said.results, said.at) == ({}, "messages.5.content")


def test_files_and_long_texts_of_earlier_messages_are_context() -> None:
    """Those of earlier requests stand apart, because a REPL that lives on has them."""
    said = response(user("y" * 101), user("x", INPUT_FILE, "Two?"), before=[user(INPUT_FILE, "One?")])
    assert (said.before, said.files) == ([FILE], [Text("text_1", "y" * 101)])
    assert said.history == [
        {"role": "user", "content": ["[file a.txt]", "One?"]},
        {"role": "user", "content": "[a text of 101 characters]"},
    ]
    assert said.last == [Text("text_1", "x"), FILE, Text("text_3", "Two?")]


def test_results_at_the_end_are_found() -> None:
    """Only results after the last other message resume a run, also where instructions stand behind them."""
    result = {"role": "tool", "content": "old"}
    said = chat(
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [call("a")]},
        {**result, "tool_call_id": "a"},
        {"role": "assistant", "content": "x", "tool_calls": [call("b"), call("c")]},
        {
            "role": "tool",
            "tool_call_id": "b",
            "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "system", "content": "Be brief."},
    )
    assert said.results == {"b": "2\n3", "c": "4"}
    assert said.last == [Text("text_1", "q")]
    output = {"type": "function_call_output", "output": "old"}
    called = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    said = response({**output, "call_id": "c0"}, user("Two?"), thought, called, {**output, "call_id": "c1"})
    assert said.results == {"c1": "old"}
    assert [message["role"] for message in said.history] == ["tool", "assistant", "tool"]


def test_message_that_cannot_be_used_is_named() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT_FILE]}
    refusal = {"type": "refusal", "refusal": "no"}
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        (response, {"role": "assistant", "content": "I"}, "last message must be of the user", "input.0.role"),
        (response, {"role": "developer", "content": "I"}, "no message of the user", "input"),
        (
            response,
            user({"type": "input_file", "file_url": "http://a"}, "?"),
            "nothing is fetched",
            "input.0.content.0",
        ),
        (response, user({"type": "input_file"}, "?"), "either file_id or file_data", "input.0.content.0"),
        (response, user({"type": "input_image", "image_url": "x"}, "?"), "image is not taken", "input.0.content.0"),
        (response, {"role": "developer", "content": [INPUT_FILE]}, "parts are texts", "input.0.content.0.type"),
        (response, {"type": "function_call_output", "call_id": 5, "output": "x"}, "must be text", "input.0.call_id"),
        (response, {"type": "item_reference", "id": "rs_1"}, "no item rs_1", "input.0.id"),
        (response, output, "texts alone", "input.0.output"),
        (chat, {"role": "assistant", "content": [CHAT_FILE]}, "parts are texts", "messages.0.content.0.type"),
        (chat, {"role": "system", "content": [CHAT_FILE]}, "parts are texts", "messages.0.content.0.type"),
        (chat, user(refusal), "parts are texts", "messages.0.content.0.type"),
        (chat, user("?", PICTURE), "image is not taken", "messages.0.content.1.type"),
    ]
    for reader, message, why, param in cases:
        with pytest.raises(ApiError, match=why) as refused:
            reader(message)
        assert str(refused.value.param).startswith(param), message


ASK, NOTE, LONG = Text("text_2", "Which?"), Text("text_1", "note"), Text("text", "x" * 100)


def parted(*last: Material, earlier: tuple[Material, ...] = (), has_context: bool = False, **options: Any) -> Any:
    said = Dialogue(last=list(last), at="messages.0.content")
    materials, question = divided(said, earlier, RlmOptions(**options), inline_chars=50, has_context=has_context)
    return list(materials), question


def test_structure_decides_what_is_context() -> None:
    cases: list[tuple[list[Material], dict[str, Any], list[Material], str | None]] = [
        ([ASK], {}, [], "Which?"),
        ([ASK], {"has_context": True}, [], "Which?"),
        ([LONG], {}, [LONG], None),
        ([NOTE, ASK], {}, [NOTE], "Which?"),
        ([FILE, ASK], {}, [FILE], "Which?"),
        ([ASK, FILE], {}, [FILE], "Which?"),
        ([NOTE, FILE, ASK, OTHER], {}, [NOTE, FILE, OTHER], "Which?"),
        ([LONG, ASK], {}, [LONG], "Which?"),
        ([ASK], {"earlier": (FILE,)}, [FILE], "Which?"),
        ([FILE, ASK], {"earlier": (FILE, OTHER)}, [FILE, OTHER], "Which?"),
        ([NOTE, NOTE, ASK], {}, [NOTE, NOTE], "Which?"),
        ([NOTE, FILE], {"question": "Why?"}, [NOTE, FILE], "Why?"),
        ([FILE], {"question": "Why?"}, [FILE], "Why?"),
        ([ASK], {"context": {"rows": []}}, [], "Which?"),
    ]
    for last, more, materials, question in cases:
        assert parted(*last, **more) == (materials, question), (last, more)


def test_unclear_structure_is_refused() -> None:
    too_long, place = "more than inline_chars = 50", "messages.0.content"
    cases: list[tuple[list[Material], dict[str, Any], str, str]] = [
        ([FILE], {}, "has no text", place),
        ([Text("text", " \n")], {}, "is empty", place),
        ([FILE, LONG], {}, too_long, place),
        ([LONG], {"has_context": True}, too_long, place),
        ([LONG], {"context": "c"}, too_long, place),
        ([FILE], {"question": "x" * 51}, too_long, "rlm.question"),
        ([FILE], {"question": ""}, "is empty", "rlm.question"),
        ([NOTE, ASK], {"context": "c"}, "give one", "rlm.context"),
        ([ASK], {"context": "c", "has_context": True}, "give one", "rlm.context"),
    ]
    for last, more, why, param in cases:
        with pytest.raises(ApiError, match=why) as error:
            parted(*last, **more)
        assert (error.value.status, error.value.param) == (400, param), (last, more)


def test_inline_file_is_decoded_or_refused() -> None:
    """A file within a request is base64, alone or as a data URL, whose type names a file that has no name."""
    data = base64.b64encode(b"%PDF").decode()
    assert inline_file(data, "x.pdf", "p") == InlineFile("x.pdf", b"%PDF")
    assert inline_file(f"data:application/pdf;base64,{data}", None, "p") == InlineFile("file.pdf", b"%PDF")
    assert inline_file(f"data:text/plain;charset=utf-8;base64,{data}", None, "p") == InlineFile("file", b"%PDF")
    cases: list[tuple[Any, Any, str]] = [
        ("https://a.b/c.pdf", "c.pdf", "nothing is fetched"),
        ("FILE:///etc/passwd", "c.pdf", "nothing is fetched"),
        ("not base64", "c", "base64"),
        ("data:text/plain,hello", "c", "base64"),
        (7, "c", "base64"),
        ("aGVsbG8=", 7, "filename"),
    ]
    for given, name, why in cases:
        with pytest.raises(ApiError, match=why):
            inline_file(given, name, "here")


def test_many_parts_are_compared_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is compared with an equal one at most, and no text with another one."""
    compared = 0

    def counting(_one: object, other: object) -> bool:
        nonlocal compared
        compared += 1
        return isinstance(other, InlineFile) and _one.name == other.name  # type: ignore[attr-defined]

    monkeypatch.setattr(InlineFile, "__eq__", counting)
    monkeypatch.setattr(Text, "__eq__", counting)
    files = [InlineFile(f"{number}.txt", b"x") for number in range(300)]
    again = [InlineFile(f"{number}.txt", b"x") for number in range(300)]
    materials, _ = parted(ASK, earlier=(*files, *again))
    assert [each.name for each in materials] == [each.name for each in files]
    said = response(user(*[INPUT_FILE, "short", "y" * 101] * 100), user("Two?"))
    assert len(said.files) == 200
    assert compared < 4 * len(files)
