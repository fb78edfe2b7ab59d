"""Contexts of children: in the message, in files or by name, at a channel that records its queries."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.child_contexts import MOST_INLINE_BYTES, PREFIX, ChildContexts
from sandbox_worker.repl.queries import Queries
from sandbox_worker.wire.encoding import MAX_NESTING
from sandbox_worker.wire.messages import Query, Reply, Slot
from sandbox_worker.wire.prompts import (
    LONG_TASK_CHARS,
    MAX_CONTEXT_NAME_CHARS,
    MAX_INLINE_BYTES,
    ChildContext,
    beginning_and_end,
)
from tests.support.tables import table

LONG = MAX_INLINE_BYTES + 1


class Text(str):
    """Subclass of `str`, as `numpy.str_` is one."""

    __slots__ = ()


class Number(float):
    """Subclass of `float`, as `numpy.float64` is one."""


class Asked:
    """Substitute for a channel: records each query, and the content of its files while the query was open."""

    def __init__(self, folder: Path, then: Callable[[], object] = lambda: None) -> None:
        self.queries: list[Query] = []
        self.files: dict[str, bytes] = {}
        self._folder = folder
        self._then = then

    def ask(self, query: Query) -> Reply:
        self.queries.append(query)
        self.files |= {path.name: path.read_bytes() for path in self._folder.iterdir() if path.name.startswith(PREFIX)}
        self._then()
        return Reply(id="1:1", slots=[Slot(text="done")] * len(query.prompts))

    @property
    def contexts(self) -> list[ChildContext]:
        """Contexts of the last query."""
        given = list(self.queries[-1].contexts)
        assert all(given)
        return cast("list[ChildContext]", given)

    def value(self, context: ChildContext) -> Any:
        if context.file is None:
            assert context.value is not None
            return json.loads(context.value)
        data = self.files[context.file]
        return json.loads(data) if context.is_json else data.decode("utf-8", "surrogatepass")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def repl(folder: Path, then: Callable[[], object] = lambda: None, **own: Any) -> tuple[Queries, Asked]:
    asked = Asked(folder, then)
    return Queries(cast("Channel", asked), lambda: None, lambda: own), asked


@table(
    "part, arrives",
    [
        ("a slice", "a slice"),
        ("", ""),
        ("é中𝄞" * 10, "é中𝄞" * 10),
        ({"a": [1, 2.5, None, True]}, {"a": [1, 2.5, None, True]}),
        ([1, "two"], [1, "two"]),
        ((1, 2), [1, 2]),
        (5, 5),
        (2**100, 2**100),
        (None, None),
        (Text("text"), "text"),
        ([Number(1.5), Text("x")], [1.5, "x"]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
)
def test_small_value_goes_in_the_message(folder: Path, part: Any, arrives: Any) -> None:
    ask, asked = repl(folder)
    assert ask.rlm_query("task", context=part) == "done"
    (context,) = asked.contexts
    assert context.file is None
    assert asked.value(context) == arrives
    assert asked.files == {}


@table(
    "part",
    [
        *("x" * LONG, "é中𝄞" * LONG, "lone \ud800", "lone \udfff and long " * LONG, "y" * 3_000_000),
        *(Text("z" * LONG), {"rows": list(range(LONG))}),
    ],
)
def test_long_part_is_a_file_during_its_query(folder: Path, part: str | dict[str, Any]) -> None:
    ask, asked = repl(folder)
    ask.rlm_query("task", context=part)
    (context,) = asked.contexts
    assert context.file
    assert context.is_json == isinstance(part, dict)
    assert len(context.file) <= MAX_CONTEXT_NAME_CHARS
    arrived = part if isinstance(part, dict) else str(part)
    assert ascii(asked.value(context)) == ascii(arrived)  # pytest could not show lone surrogates
    assert not list(folder.iterdir())


def test_own_contexts_are_named_and_not_copied(folder: Path) -> None:
    own: dict[str, Any] = {"context": "x" * LONG, "context_1": "y" * LONG}
    ask, asked = repl(folder, **own)
    names = ["context", "context_1", "context"]
    ask.rlm_query_batched(["a", "b", "c"], contexts=[own[name] for name in names])
    assert asked.contexts == [ChildContext(own=name) for name in names]
    ask.rlm_query(str(own["context"]))  # also as the task of a child
    assert asked.contexts == [ChildContext(own="context", is_task=True)]
    assert asked.queries[-1].prompts == [beginning_and_end(str(own["context"]))]
    assert asked.files == {}


def test_equal_parts_are_written_once(folder: Path) -> None:
    text, value = "x" * LONG, ["y" * LONG]
    ask, asked = repl(folder)
    ask.rlm_query_batched(["t"] * 5, contexts=[text, value, "x" * LONG, ["y" * LONG], text])
    names = [context.file for context in asked.contexts]
    assert names[0] == names[2] == names[4] != names[1] == names[3]
    assert len(asked.files) == 2


def test_long_prompt_becomes_a_context(folder: Path) -> None:
    long, short = "w" * (LONG_TASK_CHARS + 1), "w" * LONG_TASK_CHARS
    ask, asked = repl(folder)
    ask.rlm_query_batched([short, long, long])
    query = asked.queries[-1]
    assert query.prompts == [short, beginning_and_end(long), beginning_and_end(long)]
    first, second, third = query.contexts
    assert first is None
    assert second is not None
    assert second.is_task
    assert asked.value(second) == long
    assert second == third
    ask.rlm_query_batched([short, "b"])
    assert list(asked.queries[-1].contexts) == []


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(MAX_NESTING + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({1, 2}, "it has a value of class set; give text, or a list or dict of what it has"),
        (object(), "it has a value of class object"),
        (b"bytes", "it has a value of class bytes"),
        ([{"a": object}], "it has a value of class type"),
        (float("nan"), "it has the number nan, which JSON cannot express"),
        ([Number("inf")], "it has the number inf, which JSON cannot express"),
        ({1: "a"}, "it has a key that is not text"),
        ([{("a", "b"): 1}], "it has a key that is not text"),
        (["\ud800"], "it has lone surrogates, or an integer of thousands of digits"),
        ({"\ud800": 1}, "it has lone surrogates, or an integer of thousands of digits"),
        pytest.param(10**5000, "it has lone surrogates, or an integer of thousands of digits", id="digits"),
        (LOOP, f"it is nested deeper than {MAX_NESTING} levels, or contains itself"),
        (DEEP, f"it is nested deeper than {MAX_NESTING} levels, or contains itself"),
        (..., "it has a value of class ellipsis"),
    ],
)
def test_unsendable_context_is_refused_in_words(folder: Path, part: Any, why: str) -> None:
    """A context that would not arrive unchanged is refused in words."""
    ask, asked = repl(folder)
    with pytest.raises(TypeError) as refused:
        ask.rlm_query_batched(["a", "b"], contexts=["x" * LONG, part])
    said = str(refused.value)
    assert said.startswith(f"rlm_query_batched() argument 'contexts[1]' is neither text nor a plain value: {why}")
    if part is not ...:  # Ellipsis is the default of `rlm_query`, for no context
        with pytest.raises(TypeError, match=r"rlm_query\(\) argument 'context' is neither text"):
            ask.rlm_query("a", context=part)
    assert asked.queries == []
    assert not list(folder.iterdir())


@table(
    "tasks, contexts, error, said",
    [
        *((["a", "b"], ["one"] * n, ValueError, f"2 tasks and {n} contexts: give one for each") for n in (0, 1, 3)),
        *((["a"], wrong, TypeError, "takes a list of contexts") for wrong in ("text", b"bytes", {"a": "b"}, 5)),
    ],
)
def test_wrong_batch_of_contexts_is_refused(
    folder: Path, tasks: list[str], contexts: Any, error: type[Exception], said: str
) -> None:
    ask, asked = repl(folder)
    with pytest.raises(error, match=said):
        ask.rlm_query_batched(tasks, contexts=contexts)
    assert asked.queries == []


def test_full_scratch_folder_makes_answers_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no room, the answers are errors, and no file is left."""

    def write(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    ask, asked = repl(folder)
    monkeypatch.setattr(os, "write", write)
    answers = ask.rlm_query_batched(["a", "b"], contexts=["small", "x" * LONG])
    monkeypatch.undo()
    assert len(set(answers)) == 1
    assert answers[0].startswith("Error: a context could not be written to the scratch folder: No space left on device")
    assert asked.queries == []
    assert not list(folder.iterdir())


def test_interrupt_leaves_no_file(folder: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ask, asked = repl(folder, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask.rlm_query("a", context="x" * LONG)
    assert len(asked.files) == 1
    assert not list(folder.iterdir())


def test_files_of_killed_repl_are_removed(folder: Path) -> None:
    (folder / f"{PREFIX}1-0123456789abcdef").write_text("of a REPL that is gone")
    (folder / "mine").write_text("of code")
    ask, asked = repl(folder)
    ask.rlm_query("a", context="x" * LONG)
    assert [name.split("-")[1] for name in asked.files] == [f"{os.getpid()}"]
    assert list(folder.iterdir()) == [folder / "mine"]


def test_files_stay_where_the_repl_began(folder: Path) -> None:
    ask, asked = repl(folder)
    (folder / "elsewhere").mkdir()
    os.chdir("elsewhere")
    ask.rlm_query("a", context="x" * LONG)
    assert len(asked.files) == 1
    assert not list((folder / "elsewhere").iterdir())


def test_message_size_is_bounded_before_files(folder: Path) -> None:
    parts = [f"{number:05}" + "x" * (MAX_INLINE_BYTES - 100) for number in range(40)]
    ask, asked = repl(folder)
    ask.rlm_query_batched(["t"] * len(parts), contexts=parts)
    assert [asked.value(context) for context in asked.contexts] == parts
    inline = [each.value for each in asked.contexts if each.value is not None]
    assert 0 < sum(map(len, inline)) <= MOST_INLINE_BYTES
    assert len(asked.files) == len(parts) - len(inline)


def test_repl_flag_is_a_bool(folder: Path) -> None:
    ask, asked = repl(folder)
    ask.rlm_query("a", repl=False)
    ask.rlm_query_batched(["a"], repl=True)
    assert [query.repl for query in asked.queries] == [False, True]
    with pytest.raises(TypeError, match="'repl' must be bool, not int"):
        ask.rlm_query("a", repl=cast("Any", 1))


def test_own_contexts_are_looked_up_when_given(folder: Path) -> None:
    later: dict[str, Any] = {}
    with ChildContexts(lambda: later, str(folder)) as handed:
        text = "x" * 10
        assert handed.given("rlm_query", [text])[0].own is None
        later["context_1"] = text
        assert handed.given("rlm_query", [text])[0] == ChildContext(own="context_1")


def test_changed_own_context_is_sent_by_value(folder: Path) -> None:
    own: dict[str, Any] = {"context": {"a": "b" * LONG}}
    ask, asked = repl(folder, **own)
    own["context"]["more"] = "changed"
    ask.rlm_query("t", context=own["context"])
    (context,) = asked.contexts
    assert context.own is None
    assert asked.value(context) == {"a": "b" * LONG, "more": "changed"}
