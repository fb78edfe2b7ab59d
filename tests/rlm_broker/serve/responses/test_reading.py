"""Items of a conversation, by what they are for."""

import base64
from typing import Any

import pytest

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Text
from rlm_broker.serve.responses.answers import Reader, ResponseConversation
from rlm_broker.serve.responses.request import ResponseRequest
from rlm_broker.serve.responses.resource import Item, given_items

FILE: Any = {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"hello").decode()}


def items(*given: Any) -> tuple[Item, ...]:
    return given_items(ResponseRequest(model="m", input=list(given)))


def read(given: tuple[Item, ...], before: tuple[Item, ...] = ()) -> ResponseConversation:
    return Reader(lambda id, _: InlineFile(id, b""), inline_chars=100).read(before, given)


def user(*parts: Any) -> dict[str, Any]:
    made = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": made}


def test_last_message_is_asked_and_others_are_history() -> None:
    said = read(
        items(
            {"role": "developer", "content": "Be brief."},
            user("One?"),
            {"role": "assistant", "content": "1"},
            user("x", FILE, "Two?"),
        )
    )
    assert said.system == ["Be brief."]
    assert said.history == [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]
    assert said.last == [Text("text_1", "x"), InlineFile("a.txt", b"hello"), Text("text_3", "Two?")]
    assert said.at == "input.3.content"


def test_files_and_long_texts_of_earlier_messages_are_context() -> None:
    """Those of earlier requests stand apart, because a REPL that lives on has them."""
    said = read(items(user("y" * 101), user("Two?")), before=items(user(FILE, "One?")))
    assert (said.before, said.files) == ([InlineFile("a.txt", b"hello")], [Text("text_1", "y" * 101)])
    assert said.history == [
        {"role": "user", "content": ["One?", "[file a.txt]"]},
        {"role": "user", "content": "[a text of 101 characters]"},
    ]


def test_results_after_the_last_message_are_found() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    old = {"type": "function_call_output", "call_id": "c0", "output": "old"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    new = {"type": "function_call_output", "call_id": "c1", "output": parts}
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    said = read(items(old, user("Two?"), thought, call, new))
    assert said.results == {"c1": "a\nb"}
    assert [message["role"] for message in said.history] == ["tool", "assistant", "tool"]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"role": "assistant", "content": "I"}, "last message must be of the user"),
        ({"role": "developer", "content": "I"}, "no message of the user"),
        (user({"type": "input_file", "file_url": "http://a"}, "?"), "nothing is fetched"),
        (user({"type": "input_file"}, "?"), "either file_id or file_data"),
        (user({"type": "input_image", "image_url": "x"}, "?"), "images are not taken"),
        ({"role": "developer", "content": [FILE]}, "in messages of the user"),
        ({"type": "function_call_output", "call_id": "c", "output": [FILE]}, "texts alone"),
    ],
)
def test_item_that_cannot_be_used_is_named(item: Any, said: str) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        read(items(item))
    assert refused.value.status == 400
    assert str(refused.value.param).startswith("input")


def test_many_parts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and texts of an earlier message are told apart by where they stand, and not by what they hold."""
    compared = 0
    equal = Text.__eq__

    def counting(one: Text, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(Text, "__eq__", counting)
    said = read(items(user(*[FILE, "short", "y" * 101] * 100), user("Two?")))
    assert said.history[0]["content"][:2] == ["short", "[a text of 101 characters]"]
    assert len(said.files) == 200
    assert not compared
