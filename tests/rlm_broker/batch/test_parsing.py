"""Items from mappings and lines of JSON, and sentences about wrong ones."""

import dataclasses
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.batch.feed import MOST_ID_CHARS, digest_of, item_of, items_of_lines
from rlm_broker.batch.items import BatchItem
from rlm_broker.context.store import Encoded, Paths
from rlm_broker.errors import ConfigurationError

GOOD: dict[str, Any] = {"id": "a", "question": "q?", "context": "text"}


def test_mapping_becomes_an_item() -> None:
    assert item_of(GOOD, "item 1") == BatchItem("a", "text", "q?")
    assert item_of({"id": 7, "path": "x/y.txt", "metadata": {"k": [1]}}, "item 1") == BatchItem(
        "7", Path("x/y.txt"), None, {"k": [1]}
    )
    item = BatchItem("a", {"any": 1})
    assert item_of(item, "item 1") is item


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"questoin": "x"}, "item 3 has an unknown key 'questoin'; did you mean question?"),
        ({"id": None}, "the id of item 3 must be text or a whole number, not NoneType"),
        ({"id": True}, "the id of item 3 must be text or a whole number, not bool"),
        ({"id": " "}, "the id of item 3 is empty: give each item one of its own"),
        ({"id": "x" * (MOST_ID_CHARS + 1)}, f"the id of item 3 has more than {MOST_ID_CHARS} characters"),
        ({"path": "p"}, "item 3 (id 'a') has both a context and a path: give one of them"),
        ({"question": 5}, "item 3 (id 'a'): the question must be text or None, not int"),
        ({"question": ""}, "item 3 (id 'a'): the question is empty"),
        ({"metadata": [1]}, "the metadata of item 3 (id 'a') must be a dict, not list"),
        ({"metadata": {"f": object()}}, "the metadata of item 3 (id 'a') must be JSON values"),
    ],
)
def test_wrong_mapping_is_refused_in_a_sentence(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        item_of({**GOOD, **changed}, "item 3")
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize("missing", ["id", "context"])
def test_missing_key_is_refused(missing: str) -> None:
    given = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(ConfigurationError, match=r"has no id|has neither a context nor a path"):
        item_of(given, "item 1")
    with pytest.raises(ConfigurationError, match="item 1 must be a BatchItem or a dict, not str"):
        item_of("text", "item 1")


def test_lines_are_counted_with_the_empty_ones() -> None:
    lines = b'\xef\xbb\xbf{"id":"a","context":"x"}\n\n{"id":"b","context":{"k":"\\ud800"}}\n{"id":"c"}\n'
    items = items_of_lines(io.BytesIO(lines), "in.jsonl")
    assert next(items) == BatchItem("a", "x")
    assert next(items) == BatchItem("b", {"k": "\ud800"})
    with pytest.raises(ConfigurationError, match=r"line 4 of in.jsonl \(id 'c'\) has neither a context nor a path"):
        next(items)


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b"[" * 5_000, b'{"id":"a"} x'])
def test_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"line 1 of in\.jsonl is not a JSON object: "):
        list(items_of_lines([line], "in.jsonl"))


def test_digest_tells_questions_and_contexts_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    contexts = [
        "one",
        ["one"],
        {"a": "one"},
        file,
        tmp_path,
        Paths([file, tmp_path]),
        Encoded(file, "cp1252"),
        "\ud800",
    ]
    items = [BatchItem("a", context) for context in contexts]
    items += [BatchItem("a", "one", "q?"), BatchItem("a", "oneq?"), BatchItem("a", object())]
    digests = [digest_of(item) for item in items]
    assert len(set(digests)) == len(items)
    assert digests == [digest_of(dataclasses.replace(item, id="b", metadata={"m": 1})) for item in items]
    assert digest_of(BatchItem("a", tmp_path / "missing")) != digest_of(BatchItem("a", tmp_path / "gone"))


def test_digest_of_a_path_has_names_sizes_and_times(tmp_path: Path) -> None:
    """An input that is moved with its files is the same; one of them that was changed makes it another."""
    folder = tmp_path / "in"
    folder.mkdir()
    files = [folder / "a.txt", folder / "b.txt"]

    def digests(root: Path) -> list[bytes]:
        contexts = (root / "a.txt", root, root / "*.txt", Paths([root]), Encoded(root / "a.txt"))
        return [digest_of(BatchItem("a", context), root) for context in contexts]

    def written() -> None:
        for file in files:
            file.write_text("one")
            os.utime(file, (1, 1))

    written()
    before = digests(folder)
    assert len(set(before)) == 4  # a folder is the same as `Paths` of it
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert digests(moved) == before
    assert digest_of(BatchItem("a", moved)) != digest_of(BatchItem("a", folder))
    for size, seconds, name in ((5, 1, "a.txt"), (3, 2, "a.txt"), (3, 1, "c.txt")):
        files[0].write_text("x" * size)
        os.utime(files[0], (seconds, seconds))
        files[0].rename(folder / name)
        assert not set(digests(folder)) & set(before)
        (folder / name).unlink()
        written()
    assert digests(folder) == before
    files[1].unlink()
    assert [now == then for now, then in zip(digests(folder), before, strict=True)] == [True, False, False, False, True]
