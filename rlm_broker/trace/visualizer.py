"""A trace as the JSON lines that the visualizer of the reference implementation, `rlms`, opens."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.text_json import written_out


@dataclass(slots=True)
class _Turn:
    """A turn, as far as it has come."""

    started: float
    prompt: list[dict[str, str]]
    response: str = ""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    ended: float | None = None
    answer: str | None = None


@dataclass(slots=True)
class _Run:
    """A run, as far as it has come. `place` is the list of sub-calls that its own record goes into."""

    question: str
    model: str
    started: dict[str, Any]
    place: list[dict[str, Any]]
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)


def visualizer_lines(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yield a line about the root run, and one for each of its turns. A child run stands among the calls of its block.

    Args:
        events: Lines of a trace.

    Raises:
        ConfigurationError: The trace has several root runs, which that visualizer would show as one.
    """
    runs: dict[str, _Run] = {}
    last = 0.0
    for event in events:
        name, last = str(event["run"]), float(event.get("time") or last)
        if event["event"] == "run_started":
            if "." not in name and name in runs:
                raise ConfigurationError("the trace has several root runs: the visualizer of rlms shows one at a time")
            runs[name] = _started(runs, name, event)
        elif name in runs:
            _take(runs[name], event, last)
    roots = [run for name, run in runs.items() if "." not in name]
    if not roots:
        raise ConfigurationError("the trace has no root run: it does not begin with run_started")
    yield _line({"type": "metadata", "timestamp": _when(roots[0].started.get("time")), **_metadata(roots[0])})
    for record in _iterations(roots[0], last):
        yield _line({"type": "iteration", **record})


def _started(runs: dict[str, _Run], name: str, event: dict[str, Any]) -> _Run:
    above = runs.get(name.rpartition(".")[0])
    block = above.blocks.get(event.get("block") or 0) if above else None
    place = block["result"]["rlm_calls"] if block else []
    return _Run(str(event.get("question") or ""), str(event.get("model")), event, place)


def _take(run: _Run, event: dict[str, Any], time: float) -> None:
    turn = run.turns[-1] if run.turns else None
    match event["event"]:
        case "iteration_started":
            if turn and turn.ended is None:
                turn.ended = time
            run.turns.append(_Turn(time, list(run.messages)))
        case "call_started":
            _call_started(run, turn, event)
        case "call_ended":
            _call_ended(run, event)
        case "replied" if turn:
            turn.response = str(event.get("text") or "")
            run.messages.append({"role": "assistant", "content": turn.response})
        case "block_started" if turn:
            block: dict[str, Any] = {"code": str(event.get("code") or ""), "result": _result({})}
            run.blocks[int(event["block"])] = block
            turn.blocks.append(block)
        case "block_ended" if int(event["block"]) in run.blocks:
            block, outcome = run.blocks[int(event["block"])], event.get("outcome") or {}
            block["result"] = _result(outcome, block["result"]["rlm_calls"])
            if turn and outcome.get("final_answer") is not None:
                turn.answer = str(outcome["final_answer"])
        case "run_ended":
            _run_ended(run, turn, event, time)


def _call_started(run: _Run, turn: _Turn | None, event: dict[str, Any]) -> None:
    block = run.blocks.get(event.get("block") or 0)
    if block is not None:
        call = _call(str(event.get("requested_model") or run.model), event.get("prompt"), None, None)
        run.calls[int(event["call"])] = call
        block["result"]["rlm_calls"].append(call)
        return
    if event.get("system"):
        run.messages.append({"role": "system", "content": str(event["system"])})
    run.messages.append({"role": "user", "content": _text(event.get("prompt"))})
    if turn:
        turn.prompt = list(run.messages)


def _call_ended(run: _Run, event: dict[str, Any]) -> None:
    if (call := run.calls.get(int(event["call"]))) is not None:
        model = str(event.get("model") or call["root_model"])
        call.update(_call(model, call["prompt"], event, (event.get("usage") or {})))


def _run_ended(run: _Run, turn: _Turn | None, event: dict[str, Any], time: float) -> None:
    if turn:
        turn.ended = turn.ended or time
        turn.answer = turn.answer if event.get("response") is None else str(event["response"])
    record = _call(run.model, run.question, event, None)
    record["usage_summary"] = event.get("usage") or {"model_usage_summaries": {}}
    record["metadata"] = {"run_metadata": _metadata(run), "iterations": list(_iterations(run, time))}
    run.place.append(record)


def _call(model: str, prompt: Any, ended: Mapping[str, Any] | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a sub-call. The visualizer reads `prompt_tokens`, and other readers of the format `usage_summary`."""
    ended, usage = ended or {}, usage or {}
    error = {"error": str(ended["error"])} if ended.get("error") else {}
    used = {name: usage.get(name) or 0 for name in ("total_calls", "total_input_tokens", "total_output_tokens")}
    cost = {} if usage.get("total_cost") is None else {"total_cost": usage["total_cost"]}
    return {
        "root_model": model,
        "prompt": _text(prompt),
        "response": str(ended.get("response") or ""),
        "prompt_tokens": used["total_input_tokens"],
        "completion_tokens": used["total_output_tokens"],
        "usage_summary": {"model_usage_summaries": {model: {**used, **cost}} if usage else {}},
        "execution_time": ended.get("duration_s") or 0.0,
        **error,
    }


def _result(outcome: dict[str, Any], calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "stdout": str(outcome.get("stdout") or ""),
        "stderr": str(outcome.get("stderr") or outcome.get("error") or ""),
        "locals": {},
        "execution_time": outcome.get("execution_time") or 0.0,
        "rlm_calls": [] if calls is None else calls,
        "final_answer": outcome.get("final_answer"),
    }


def _iterations(run: _Run, now: float) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(run.turns, 1):
        yield {
            "iteration": number,
            "timestamp": _when(turn.started),
            "prompt": turn.prompt,
            "response": turn.response,
            "code_blocks": turn.blocks,
            "final_answer": turn.answer if number == len(run.turns) else None,
            "iteration_time": round((turn.ended or now) - turn.started, 6),
        }


def _metadata(run: _Run) -> dict[str, Any]:
    metadata = run.started.get("metadata") or {}
    limits = metadata.get("limits") or {}
    return {
        "root_model": run.model,
        "max_depth": limits.get("max_depth"),
        "max_iterations": limits.get("max_iterations"),
        "backend": "rlm-broker",
        "backend_kwargs": {"model_name": run.model},
        "environment_type": metadata.get("isolation") or "rlm-broker",
        "environment_kwargs": {},
        "other_backends": None,
    }


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _when(time: Any) -> str:
    return datetime.fromtimestamp(float(time or 0), UTC).isoformat()


def _line(record: dict[str, Any]) -> str:
    return written_out(json.dumps(record, ensure_ascii=False, allow_nan=False))
