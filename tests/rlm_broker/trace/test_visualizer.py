"""JSON lines in the form of the reference implementation's visualizer, as its `types.ts` and `parse-logs.ts` read them."""

import json
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.trace.visualizer import visualizer_lines
from tests.support.traces import Line, Written, small


def _records(lines: list[Line]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in visualizer_lines(iter(lines))]


def test_first_line_is_about_the_run() -> None:
    metadata = _records(small().lines)[0]
    assert metadata["type"] == "metadata"
    assert (metadata["root_model"], metadata["max_depth"], metadata["max_iterations"]) == ("m", 2, 9)
    wanted = {"backend", "backend_kwargs", "environment_type", "environment_kwargs", "other_backends", "timestamp"}
    assert metadata.keys() >= wanted


def test_turns_have_blocks_and_calls() -> None:
    """A turn has its conversation, its reply and its blocks; a block its sub-calls, with tokens and seconds."""
    [_, turn] = _records(small().lines)
    assert (turn["type"], turn["iteration"], turn["response"]) == ("iteration", 1, "The reply.")
    assert turn["prompt"] == [{"role": "system", "content": "You are."}, {"role": "user", "content": "Look."}]
    assert turn["final_answer"] == "That one."
    assert turn["iteration_time"] > 0
    first, second = turn["code_blocks"]
    assert first["code"] == "print(1)"
    assert first["result"]["stdout"] == "1\n"
    assert second["result"]["stderr"] == "Traceback: it was 0"
    calls = first["result"]["rlm_calls"]
    assert [call["prompt"] for call in calls] == ["part 2", "part 3", "equal", "equal", "equal", "the child"]
    assert (calls[0]["prompt_tokens"], calls[0]["completion_tokens"], calls[0]["execution_time"]) == (100, 10, 0.1)
    assert calls[0]["usage_summary"]["model_usage_summaries"]["m"]["total_cost"] == 0.5


def test_child_run_is_a_call_with_its_turns() -> None:
    child = _records(small().lines)[1]["code_blocks"][0]["result"]["rlm_calls"][-1]
    assert child["response"] == "2"
    assert child["metadata"]["run_metadata"]["root_model"] == "m"
    assert child["metadata"]["iterations"][0]["prompt"] == [{"role": "user", "content": "in the child"}]


def test_conversation_grows_from_turn_to_turn() -> None:
    trace = Written()("run_started", question="Q", model="m")
    for number in (1, 2):
        trace("iteration_started", number=number).call(number, f"shown {number}", "", block=0)
        trace("replied", number=number, text=f"reply {number}")
    first, second = _records(trace.lines)[1:]
    assert [message["content"] for message in second["prompt"]] == ["shown 1", "reply 1", "shown 2"]
    assert first["final_answer"] is None
    assert second["iteration_time"] >= 0


def test_several_root_runs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="several root runs"):
        _records([*small().lines, *small().lines])


def test_trace_without_its_beginning_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not begin with run_started"):
        _records(small().lines[2:4])
