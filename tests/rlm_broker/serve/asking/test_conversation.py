"""The rules by which a conversation is divided into context and question."""

import base64
from typing import Any

import pytest

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import InlineFile, Material, Text
from rlm_broker.serve.questions.conversation import divided, inline_file
from rlm_broker.serve.questions.options import RlmOptions

ASK, NOTE, LONG = Text("text_2", "Which?"), Text("text_1", "note"), Text("text", "x" * 100)
FILE, OTHER = InlineFile("a.txt", b"a"), InlineFile("b.txt", b"b")


def parted(*last: Material, earlier: tuple[Material, ...] = (), has_context: bool = False, **options: Any) -> Any:
    made = divided(
        last, earlier, RlmOptions(**options), inline_chars=50, has_context=has_context, param="messages.0.content"
    )
    return list(made.materials), made.question


@pytest.mark.parametrize(
    ("last", "more", "materials", "question"),
    [
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
    ],
)
def test_structure_decides_what_is_context(last: Any, more: Any, materials: Any, question: Any) -> None:
    assert parted(*last, **more) == (materials, question)


@pytest.mark.parametrize(
    ("last", "more", "why", "param"),
    [
        ([FILE], {}, "has no text", "messages.0.content"),
        ([Text("text", " \n")], {}, "is empty", "messages.0.content"),
        ([FILE, LONG], {}, "more than inline_chars = 50", "messages.0.content"),
        ([LONG], {"has_context": True}, "more than inline_chars = 50", "messages.0.content"),
        ([LONG], {"context": "c"}, "more than inline_chars = 50", "messages.0.content"),
        ([FILE], {"question": "x" * 51}, "more than inline_chars = 50", "rlm.question"),
        ([FILE], {"question": ""}, "is empty", "rlm.question"),
        ([NOTE, ASK], {"context": "c"}, "give one", "rlm.context"),
        ([ASK], {"context": "c", "has_context": True}, "give one", "rlm.context"),
    ],
)
def test_unclear_structure_is_refused(last: Any, more: Any, why: str, param: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        parted(*last, **more)
    assert (error.value.status, error.value.param) == (400, param)


def test_inline_file_is_decoded() -> None:
    """A file within a request is base64, alone or as a data URL, whose type names a file that has no name."""
    data = base64.b64encode(b"%PDF").decode()
    assert inline_file(data, "x.pdf", "p") == InlineFile("x.pdf", b"%PDF")
    assert inline_file(f"data:application/pdf;base64,{data}", None, "p") == InlineFile("file.pdf", b"%PDF")
    assert inline_file(f"data:text/plain;charset=utf-8;base64,{data}", None, "p") == InlineFile("file", b"%PDF")


@pytest.mark.parametrize(
    ("data", "name", "why"),
    [
        ("https://a.b/c.pdf", "c.pdf", "nothing is fetched"),
        ("FILE:///etc/passwd", "c.pdf", "nothing is fetched"),
        ("not base64", "c", "base64"),
        ("data:text/plain,hello", "c", "base64"),
        (7, "c", "base64"),
        ("aGVsbG8=", 7, "filename"),
    ],
)
def test_wrong_inline_file_is_refused(data: Any, name: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        inline_file(data, name, "here")


def test_many_files_are_compared_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is compared with an equal one at most, and not with all others."""
    compared = 0
    equal = InlineFile.__eq__

    def counting(one: InlineFile, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(InlineFile, "__eq__", counting)
    files = [InlineFile(f"{number}.txt", b"x") for number in range(300)]
    again = [InlineFile(f"{number}.txt", b"x") for number in range(300)]
    materials, _ = parted(ASK, earlier=(*files, *again))
    assert [each.name for each in materials] == [each.name for each in files]
    assert compared < 4 * len(files)
