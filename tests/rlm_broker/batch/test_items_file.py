import json
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.batch import feed, items_file
from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.items_file import ItemsFile
from rlm_broker.context.store import store
from rlm_broker.errors import ConfigurationError, ContextRefused

ITEM = {"id": "a", "question": "How long?", "context": "a text"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def read(file: Path, *lines: Any, root: Path | None = None, encoding: str | None = None) -> list[BatchItem]:
    """Write the lines, check them, and return their items."""
    file.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    items = ItemsFile(file, root, encoding)
    items.check()
    found = list(items)
    assert len(items) == len(found)
    return found


def test_lines_are_items_with_their_metadata(file: Path) -> None:
    metadata = {"answer": 7, "tags": ["x"]}
    first, second = read(file, {**ITEM, "metadata": metadata}, b"\n  \n", {"id": "b", "context": {"part": ["x", 1]}})
    assert first == BatchItem("a", "a text", "How long?", metadata)
    assert second == BatchItem("b", {"part": ["x", 1]})


def test_byte_order_mark_is_skipped(file: Path) -> None:
    assert read(file, b"\xef\xbb\xbf" + json.dumps(ITEM).encode())[0].id == "a"


def test_paths_are_read_below_the_folder(file: Path) -> None:
    """A path is relative to the folder of the input. A file is a text, a glob is a dict of texts."""
    folder = file.parent / "logs"
    folder.mkdir()
    (folder / "one.log").write_bytes(b"na\xefve")
    (folder / "two.log").write_bytes(b"plain")
    one, globbed = read(
        file,
        {"id": "1", "path": "logs/one.log"},
        {"id": "2", "path": str(folder / "*.log")},
        encoding="latin-1",
    )
    with store(one.context) as text:
        assert (text.info.type_name, text.info.total_chars) == ("str", 5)
    with store(globbed.context) as texts:
        assert (texts.info.type_name, texts.info.total_chars) == ("dict", 10)


def test_another_root_is_named_by_option(file: Path) -> None:
    below = file.parent / "below"
    below.mkdir()
    (file.parent / "above.txt").write_text("above")
    with pytest.raises(ConfigurationError, match=r"line 1 of .*: \.\./above\.txt is not below .*/below: .*\(--root\)"):
        read(below / "in.jsonl", {"id": "a", "path": "../above.txt"})
    assert read(below / "in.jsonl", {"id": "a", "path": "above.txt"}, root=file.parent)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense\n", " is not a JSON object: "),
        (b"[" * 100_000, " is not a JSON object: "),
        ({"context": "x"}, " has no id"),
        ({**ITEM, "quesiton": "x"}, "has an unknown key 'quesiton'; did you mean question?"),
        ({**ITEM, "path": "x"}, "both a context and a path"),
        ({"id": "b", "context": ""}, ": the context must be a text, an object or a list, and not be empty"),
        ({"id": "b", "context": 7}, ": the context must be a text, an object or a list, and not be empty"),
        ({"id": "b", "path": "nowhere.txt"}, ": .*nowhere.txt does not exist"),
        ({"id": "b", "path": "/etc/passwd"}, ": /etc/passwd is not below "),
        ({"id": "b", "path": "id_rsa"}, ": id_rsa is likely a secret"),
        (ITEM, ": the id 'a' was given before"),
    ],
)
def test_wrong_line_is_named_before_a_run(file: Path, line: Any, said: str) -> None:
    with pytest.raises((ConfigurationError, ContextRefused), match=f"line 3 of .*in.jsonl.*{said}"):
        read(file, ITEM, b"\n", line)


def test_long_line_is_refused_before_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_file, "MOST_LINE_BYTES", 100)
    monkeypatch.setattr(feed, "MOST_LINE_BYTES", 100)
    with pytest.raises(ConfigurationError, match=r"line 2 of .* has more than 100 bytes: give the context by its path"):
        read(file, ITEM, {**ITEM, "context": "x" * 100})


@pytest.mark.parametrize(("name", "said"), [("nowhere", "No such file"), ("empty", "no item")])
def test_unusable_input_is_one_sentence(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").write_text("\n")
    items = ItemsFile(tmp_path / name)
    with pytest.raises(ConfigurationError, match=said):
        items.check()
