"""Usage and the sum of many; the outcome of a run as one line and as JSON."""

import dataclasses
import datetime
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker import RLM, Limits, RunFailed, ScriptedClient, ValueUnavailable
from rlm_broker.results import Block, Completion, Isolation, with_values
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.pages import of_completion
from rlm_broker.values.text import SHOWN_CHARS

USAGES = st.builds(
    Usage,
    total_calls=st.integers(0, 3),
    total_input_tokens=st.integers(0, 10**9),
    total_output_tokens=st.integers(0, 10**9),
    total_cost=st.none() | st.integers(0, 1000).map(lambda cents: cents / 128),
    stored_calls=st.integers(0, 3),
    cached_input_tokens=st.integers(0, 10**9),
)


@given(st.lists(USAGES))
def test_sum_has_a_cost_if_the_cost_of_each_call_is_known(usages: list[Usage]) -> None:
    total = sum(usages, Usage())
    for field in ("total_calls", "total_input_tokens", "total_output_tokens", "stored_calls", "cached_input_tokens"):
        assert getattr(total, field) == sum(getattr(usage, field) for usage in usages)
    costs = [usage.total_cost for usage in usages if usage.total_calls]
    if costs:
        assert total.total_cost == (None if None in costs else sum(filter(None, costs)))


class Said:
    value = (1, {2})
    problem = None


def test_block_keeps_its_values_when_pickled() -> None:
    block = with_values(Block("1", "ok", final_answer="text"), Said(), None)
    assert (block.value, block.value_problem) == ((1, {2}), None)
    assert (block.final_value, block.final_value_problem) == ("text", None)
    assert pickle.loads(pickle.dumps(block)).value == (1, {2})
    assert block == Block("1", "ok", final_answer="text")
    assert msgspec.to_builtins(block) == dataclasses.asdict(block)
    assert "value" not in dataclasses.asdict(block)


class Point(pydantic.BaseModel):
    x: float
    seen: datetime.date


class Row(msgspec.Struct):
    cells: tuple[int, ...]


@dataclasses.dataclass
class Odd:
    what: object


class Stubborn(pydantic.BaseModel):
    @pydantic.model_serializer
    def _refuse(self) -> str:
        raise RuntimeError("no")


def completion(**fields: Any) -> Completion:
    usage = UsageSummary({"m": Usage(2, 30, 4, 0.25)})
    return Completion(
        **{
            "response": "yes",
            "root_model": "m",
            "depth": 0,
            "iterations": 0,
            "execution_time": 1.5,
            "usage_summary": usage,
            **fields,
        }
    )


def test_answer_is_text_or_an_error_with_the_reason() -> None:
    assert completion(response="2").answer == "2"
    for fields, why in (({"is_stopped": True}, "was stopped"), ({"limit": "max_tokens"}, "at the limit max_tokens")):
        with pytest.raises(ValueUnavailable, match=why):
            assert completion(response=None, **fields).answer


def test_help_shows_no_address_as_a_default() -> None:
    assert " at 0x" not in str(inspect.signature(RLM.completion))


def test_what_is_left_out_of_a_context_is_said_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("Rome")
    for number in range(12):
        (tmp_path / f"{number:02}.png").write_bytes(b"\x89PNG\0\0")
    client = ScriptedClient(["FINAL(Rome)", "FINAL(Rome)"])
    ended = RLM(client, verbose=True).completion(tmp_path, "Which city?")
    names = (
        "left out: 12 (binary): 00.png, 01.png, 02.png, 03.png, 04.png, 05.png, 06.png, 07.png, 08.png, 09.png, 2 more"
    )
    assert ended.context is not None
    assert ended.context.parts == (("notes.txt", 4),)
    assert ended.context.remarks(with_names=True) == [names]
    assert names in of_completion(ended)["text/html"]
    assert f"context: {names}" in capsys.readouterr().err
    assert names.capitalize() in str(ended.messages[1].content)
    assert [record.getMessage() for record in caplog.records] == [
        "the context has not all of what was given; left out: 12 (binary)"
    ]


def test_parsed_value_becomes_json() -> None:
    cases: list[tuple[Any, Any]] = [
        (None, None),
        ({"a": (1, 2.5, True)}, {"a": [1, 2.5, True]}),
        (float("nan"), None),
        (Point(x=float("inf"), seen=datetime.date(2026, 1, 2)), {"x": None, "seen": "2026-01-02"}),
        (Row((1, 2)), {"cells": [1, 2]}),
        (Odd(Odd({"rows": [Row((3,))], 4: b"\xff"})), {"what": {"what": {"rows": [{"cells": [3]}], "4": "_w=="}}}),
        (Stubborn(), "Stubborn()"),
        (Odd, repr(Odd)),
    ]
    for parsed, shown in cases:
        done = completion(parsed=parsed)
        assert done.to_dict()["parsed"] == shown
        assert json.loads(done.to_json()) == done.to_dict()


def test_a_run_is_whole_in_its_json() -> None:
    code = "```repl\nprint('\\ud800 ä', llm_query('part'))\nFINAL(rlm_query('child'))\n```"
    replies = [code, "of the part", "FINAL(of the child)"]
    done = RLM(ScriptedClient(replies), limits=Limits(max_depth=2)).completion("text", "?")
    shown = json.loads(done.to_json())
    assert shown == done.to_dict()
    assert shown.keys() == {field.name for field in dataclasses.fields(Completion)}
    assert shown["usage_summary"] == done.usage_summary.to_dict()
    assert shown["usage_by_depth"]["1"] == done.usage_by_depth[1].to_dict()
    assert [message["role"] for message in shown["messages"]] == [message.role for message in done.messages]
    assert shown["trajectory"][0]["blocks"][0]["stdout"] == done.trajectory[0].blocks[0].stdout
    assert shown["child_traces"][0]["result_preview"] == "of the child"
    assert done.isolation is not None
    assert shown["isolation"]["level"] == done.isolation.level


def test_lone_surrogate_is_written_out_in_json() -> None:
    done = completion(response="\ud800 ä")
    assert json.loads(done.to_json().encode())["response"] == "\ud800 ä"


def test_repr_is_a_short_line() -> None:
    done = completion(response="long\n" * 1000, isolation=Isolation("strict"), parsed=["x" * 9999], limit="max_blocks")
    assert repr(done) == (
        f"Completion(response={('long' + chr(10)) * (SHOWN_CHARS // 5)!r}... [5,000 characters], root_model='m', "
        "iterations=0, usage_summary.total_cost=0.25, isolation.level='strict', limit='max_blocks')"
    )
    assert "\n" not in repr(done)


def test_failed_run_has_the_same_short_repr() -> None:
    replies = ["x" * 1000 + "\n```repl\nprint(1)\n```"] * 2
    with pytest.raises(RunFailed) as caught:
        RLM(ScriptedClient(replies), limits=Limits(max_llm_calls=1)).completion("text", "?")
    shown = repr(caught.value)
    assert shown.startswith("LimitReached('the limit max_llm_calls = 1 was reached, 1 used', partial_answer='xxx")
    assert caught.value.isolation is not None
    level = caught.value.isolation.level
    assert "[1,000 characters], root_model='scripted', iterations=1, " in shown
    assert shown.endswith(f"usage_summary.total_cost=None, isolation.level='{level}')")
    assert repr(RunFailed("before it began")) == "RunFailed('before it began')"
