"""A trace as Chrome trace events, which Perfetto opens: a track for each run, and further ones for parallel calls."""

import heapq
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox_worker.wire.text_json import written_out

ARGUMENT_CHARS = 2_000
"""Characters of a text among a slice's arguments. Perfetto shows them as one line."""
NAME_CHARS = 80


@dataclass(slots=True)
class _Slice:
    """A slice that goes on."""

    name: str
    kind: str
    track: int
    start: int
    arguments: dict[str, Any]


@dataclass(slots=True)
class _Run:
    """The tracks of one run."""

    track: int
    order: int
    lanes: int = 0
    free: list[int] = field(default_factory=list)
    """Further tracks on which no call is."""
    turn: str = ""


def chrome_events(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a JSON object in the trace event format.

    Each run has a track with its turns, and in these the calls of its own loop and its blocks. Calls of code and tools
    are on further tracks of the run: those at the same time on different ones. A run tree is a process.

    Args:
        events: Lines of a trace.
    """
    trees: dict[str, _Tree] = {}
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    separator = ""
    for event in events:
        tree = trees.get(name := str(event.get("tree", "")))
        made = []
        if tree is None:
            tree = trees[name] = _Tree(len(trees) + 1)
            made.append(tree.named("process_name", 0, {"name": f"run tree {name}".strip()}))
        for each in [*made, *tree.take(event)]:
            yield f"{separator}{each}"
            separator = ","
    for tree in trees.values():
        for each in tree.rest():
            yield f"{separator}{each}"
            separator = ","
    yield "]}"


class _Tree:
    """Makes the trace events of one run tree."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._begin: float | None = None
        self._now = 0
        self._tracks = 0
        self._runs: dict[str, _Run] = {}
        self._open: dict[str, _Slice] = {}

    def take(self, event: dict[str, Any]) -> Iterator[str]:
        """Yield the trace events that follow from an event."""
        time = float(event.get("time") or 0)
        self._begin = time if self._begin is None else self._begin
        self._now = max(self._now, round((time - self._begin) * 1e6))  # slices of a track must nest
        name = str(event["run"])
        if name not in self._runs:
            yield from self._new_run(name)
        run = self._runs[name]
        match event["event"]:
            case "run_started":
                title = f"run {name}: {_short(event.get('question') or '')}"
                self._start(name, title, "run", run.track, model=event.get("model"), question=event.get("question"))
            case "iteration_started":
                yield from self._end(run.turn)
                run.turn = f"{name}/t{event['number']}"
                self._start(run.turn, f"turn {event['number']}", "turn", run.track)
            case "block_started":
                key = f"{name}/b{event['block']}"
                self._start(key, f"block {event['block']}", "block", run.track, code=event.get("code"))
            case "block_ended":
                yield from self._end(f"{name}/b{event['block']}", **_of_block(event.get("outcome") or {}))
            case "call_started" | "tool_started":
                yield from self._call_started(run, name, event)
            case "call_ended" | "tool_ended":
                yield from self._call_ended(run, name, event)
            case "run_ended":
                yield from self._end(run.turn)
                told = ("kind", "limit", "iterations", "cost_usd", "response", "error")
                yield from self._end(name, **{key: event.get(key) for key in told})

    def rest(self) -> Iterator[str]:
        """Yield the slices that did not end, the inner ones first."""
        for key in reversed(list(self._open)):
            yield from self._end(key, did_not_end=True)

    def named(self, what: str, track: int, arguments: dict[str, Any]) -> str:
        """Return a trace event that gives a track or a process its name or place."""
        return _line({"ph": "M", "name": what, "pid": self._number, "tid": track, "args": arguments})

    def _new_run(self, name: str) -> Iterator[str]:
        run = self._runs[name] = _Run(0, len(self._runs))
        run.track = yield from self._new_track(run, f"run {name}")

    def _new_track(self, run: _Run, name: str) -> Generator[str, None, int]:
        self._tracks += 1
        yield self.named("thread_name", self._tracks, {"name": name})
        place = run.order * 1_000 + min(run.lanes, 999)
        yield self.named("thread_sort_index", self._tracks, {"sort_index": place})
        return self._tracks

    def _call_started(self, run: _Run, name: str, event: dict[str, Any]) -> Iterator[str]:
        is_tool = event["event"] == "tool_started"
        key = f"{name}/{'f' if is_tool else 'c'}{event['call']}"
        if is_tool:
            told = {"arguments": event.get("arguments")}
            title, kind = str(event.get("tool")), "tool"
        else:
            told = {"prompt": event.get("prompt"), "batch": event.get("batch") or None}
            title, kind = str(event.get("requested_model") or "call"), "call"
        if not event.get("block"):
            self._start(key, "model", "model", run.track, **told)
            return
        if not run.free:
            run.lanes += 1
            run.free.append((yield from self._new_track(run, f"run {name}, calls {run.lanes}")))
        self._start(key, title, kind, heapq.heappop(run.free), **told)

    def _call_ended(self, run: _Run, name: str, event: dict[str, Any]) -> Iterator[str]:
        key = f"{name}/{'f' if event['event'] == 'tool_ended' else 'c'}{event['call']}"
        usage = event.get("usage") or {}
        told = {
            "model": event.get("model"),
            "input_tokens": usage.get("total_input_tokens"),
            "output_tokens": usage.get("total_output_tokens"),
            "cost_usd": usage.get("total_cost"),
            "from_store": usage.get("stored_calls") or None,
            "response": event.get("response"),
            "result": event.get("result"),
            "error": event.get("error"),
        }
        slice_ = self._open.get(key)
        if slice_ and slice_.kind in ("model", "call") and event.get("model"):
            slice_.name = str(event["model"])
        if slice_ and slice_.track != run.track:
            heapq.heappush(run.free, slice_.track)
        yield from self._end(key, **told)

    def _start(self, key: str, name: str, kind: str, track: int, **arguments: Any) -> None:
        self._open[key] = _Slice(name, kind, track, self._now, arguments)

    def _end(self, key: str, **arguments: Any) -> Iterator[str]:
        if (ended := self._open.pop(key, None)) is None:
            return
        told = {name: _argument(value) for name, value in {**ended.arguments, **arguments}.items() if value is not None}
        yield _line(
            {
                "ph": "X",
                "name": ended.name[: 2 * NAME_CHARS],
                "cat": ended.kind,
                "pid": self._number,
                "tid": ended.track,
                "ts": ended.start,
                "dur": self._now - ended.start,
                "args": told,
            }
        )


def _of_block(outcome: dict[str, Any]) -> dict[str, Any]:
    return {name: outcome.get(name) for name in ("status", "stdout", "stderr", "error", "limit", "final_answer")}


def _argument(value: Any) -> Any:
    if isinstance(value, str | list | dict):
        text = value if isinstance(value, str) else json.dumps(value)
        cut = f"... [{len(text):,} characters]" if len(text) > ARGUMENT_CHARS else ""
        return f"{text[:ARGUMENT_CHARS]}{cut}"
    return value


def _short(text: Any) -> str:
    line = " ".join(str(text)[: 4 * NAME_CHARS].split())
    return line if len(line) <= NAME_CHARS else f"{line[:NAME_CHARS]}..."


def _line(event: dict[str, Any]) -> str:
    return written_out(json.dumps(event, ensure_ascii=False, allow_nan=False))
