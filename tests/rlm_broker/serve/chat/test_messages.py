"""Messages of a chat request: what each is for."""

from typing import Any

import pytest

from rlm_broker.serve.chat.request import read
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Material, Text

FILE = InlineFile("a.txt", b"hello")


def file_of(id: str, param: str) -> Material:
    if id != "file-1":
        raise ApiError(404, f"no file {id}", param=param)
    return FILE


ATTACHED = {"type": "file", "file": {"file_id": "file-1"}}


def test_each_message_has_its_use() -> None:
    """System texts, earlier messages with files by name, and the last message are told apart."""
    said = read(
        [
            {"role": "system", "content": "one"},
            {"role": "user", "content": [ATTACHED, {"type": "text", "text": "first"}], "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "ignored",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": [{"type": "text", "text": "note"}, {"type": "text", "text": "last"}]},
        ],
        file_of,
    )
    assert said.system == ["one", "two"]
    assert said.history == [
        {"role": "user", "content": ["[file a.txt]", "first"], "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "no"},
    ]
    assert said.files == [FILE]
    assert said.last == [Text("text_1", "note"), Text("text_2", "last")]
    assert said.results == {}


def test_results_at_the_end_are_found() -> None:
    """Only results after the last other message resume a run."""
    said = read(
        [
            {"role": "user", "content": "q"},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "assistant", "content": "x"},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        file_of,
    )
    assert said.results == {"b": "2", "c": "3"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [ATTACHED]},
        {"role": "system", "content": [ATTACHED]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_part_of_another_role_is_refused(message: Any) -> None:
    with pytest.raises(ApiError) as error:
        read([message], file_of)
    assert error.value.param == "messages.0.content.0.type"
