"""Files that settings name: tools and JSON Schemas."""

import os
import re
from pathlib import Path

import pytest

from rlm_broker.cli.settings.user_files import MAX_FILE_BYTES, content, function_of, schema_of, tools_of
from rlm_broker.errors import ConfigurationError
from tests.support.tables import table

TOOLS = '''
from __future__ import annotations

import json
from dataclasses import dataclass
from math import pi

PRICES = {"lens": 40}
_SECRET = object()

@dataclass
class Item:
    name: str
    price: int

def item(name: str) -> Item:
    """What we know of an item."""
    return Item(name, PRICES[name])

async def doubled(number: int) -> int:
    return 2 * number
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tools.py"


def test_public_names_of_a_file_are_tools(file: Path) -> None:
    file.write_text(TOOLS)
    tools = tools_of(file)
    assert (tools.names, tools.values) == (["item", "doubled"], {"PRICES": {"lens": 40}})
    assert not (file.parent / "__pycache__").exists()


async def test_file_tool_arguments_follow_annotations(file: Path) -> None:
    file.write_text(TOOLS)
    tools = tools_of(file)
    answer = await tools.call("item", '{"args": ["lens"], "kwargs": {}}', 9)
    assert (answer.text, answer.error) == ('{"name":"lens","price":40}', None)
    assert "valid string" in str((await tools.call("item", '{"args": [5], "kwargs": {}}', 9)).error)


def test_a_list_of_names_decides(file: Path) -> None:
    file.write_text(f"{TOOLS}\n__all__ = ['pi', '_SECRET_NUMBER']\n_SECRET_NUMBER = 7")
    assert tools_of(file).values == {"pi": pytest.approx(3.14159), "_SECRET_NUMBER": 7}


NO_TOOLS = [
    ("x = 1\n1 / 0", "tools: FILE raised ZeroDivisionError: division by zero (line 2)"),
    ("x = 1\nx =", "tools: FILE, line 2: invalid syntax"),
    ("import sys\nsys.exit(3)", "tools: FILE raised SystemExit: 3 (line 2)"),
    ("import os\n_x = 1\nclass A: pass", "tools: FILE defines no public function or value"),
    ("__all__ = ['y']", "tools: FILE raised AttributeError: module 'rlm_broker_tools' has no attribute 'y'"),
    ("context = 1", "FILE: a tool cannot be called 'context': that name is taken in a REPL; begin other names with _"),
    ("import re\nP = re.compile('x')", "FILE: tool 'P': neither a callable nor a value that crosses: it is a Patt"),
    ("def f(x: 'Nowhere'): pass", "FILE: tool 'f': its arguments cannot be validated"),
    ("x = '\\udce9'", "tools: FILE: invalid or missing encoding declaration"),
]


@table("code, said", NO_TOOLS)
def test_file_without_tools_is_one_sentence(file: Path, code: str, said: str) -> None:
    file.write_bytes(code.replace("\\udce9", "\udce9").encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError) as refused:
        tools_of(file)
    assert str(refused.value).startswith(said.replace("FILE", str(file)))
    assert "\n" not in str(refused.value)


def test_a_schema_is_the_object_that_a_file_holds(file: Path) -> None:
    file.write_text('{"type": "integer"}')
    assert schema_of(file) == {"type": "integer"}
    for text, said in {
        "[1]": "is not a JSON Schema: it must hold a JSON object",
        "{'a': 1}": "is not JSON: Expecting property",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=re.escape(f"output_type: {file} {said}")):
            schema_of(file)


def test_file_of_unusual_size_or_kind_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MAX_FILE_BYTES + 1)
    unread = dict.fromkeys([".", "nowhere", "\0"], "cannot read")
    for name, why in {"pipe": "not a regular file", "large": "has more than", **unread}.items():
        with pytest.raises(ConfigurationError, match=f"tools: .*{why}"):
            content(tmp_path / name, "tools")


def test_function_is_found_in_file_or_module(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("BEST = 7\n\ndef reward(item, result):\n    return BEST\n")
    assert function_of(f"{tmp_path / 'rewards.py'}:reward", "score")(None, None) == 7
    assert function_of("json:dumps", "score")([1]) == "[1]"


NO_FUNCTIONS = [
    ("reward", "score: reward names no function: give FILE.py:FUNCTION or MODULE:FUNCTION"),
    (":reward", "score: :reward names no function"),
    ("nowhere.py:reward", "score: cannot read nowhere.py: No such file"),
    ("nowhere:reward", r"score: nowhere cannot be imported: ModuleNotFoundError: .*; name a file as ./FILE.py"),
    ("./wrong.py:reward", r"score: wrong.py raised ZeroDivisionError: division by zero \(line 2\)"),
    ("json:nothing", "score: json has no function 'nothing'"),
    ("json:__name__", "score: json has no function '__name__'"),
]


def test_unusable_function_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text("\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for text, said in NO_FUNCTIONS:
        with pytest.raises(ConfigurationError, match=said):
            function_of(text, "score")
