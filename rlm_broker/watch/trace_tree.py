"""A trace file as text: the tree of its runs, with the work, the time and the cost of each."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from rlm_broker.errors import ConfigurationError
from rlm_broker.events.event import Event
from rlm_broker.events.story import Story
from rlm_broker.events.trace import events, lines
from rlm_broker.values.text import label
from rlm_broker.watch.otlp import export
from rlm_broker.watch.terminal import StoryPrinter
from rlm_broker.watch.viewer.page import write_page

TEXT_CHARS = 60
"""Characters of a question or an answer that are shown; longer text is cut."""
_OPEN = "not ended"
"""Word for blocks that began, and have no end in the trace: their run was ended with them."""


@dataclass(slots=True)
class _Run:
    """One run, as its events in a trace describe it."""

    name: str
    question: str = ""
    model: str = "?"
    calls: int = 0
    tokens: int = 0
    cost_usd: float | None = 0.0
    blocks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    turns: int = 0
    duration_s: float | None = None
    response: str | None = None
    error: str | None = None
    is_stopped: bool = False


class Trace:
    """A trace file: its events, and what they say in other forms. Nothing is read before it is asked for.

    Example:
        ```python
        with TraceWriter("traced.jsonl") as writer:
            RLM("offline", on_event=writer).completion("a", "Which letter is it?")
        print(*Trace("traced.jsonl").tree(), sep="\\n")
        ```

    Each method raises `ConfigurationError` if the file cannot be read, or is not a trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events as they were given to `on_event`."""
        return events(self._path)

    def tree(self) -> list[str]:
        """Return the runs in three lines each: question, work and end. Children are below their parents.

        Example:
            ```python
            print(*Trace("run.jsonl").tree(), sep="\\n")
            ```
        """
        return tree(self._path)

    def runs(self) -> list[dict[str, Any]]:
        """Return the same as plain values: for each run its name, question, model, calls, tokens, cost and end.

        `duration_s` is None for a run that did not end, and `cost_usd` where a price is not known.

        Example:
            ```python
            print(sum(run["calls"] for run in Trace("run.jsonl").runs()))
            ```
        """
        return runs(self._path)

    def show(self, stream: TextIO | None = None) -> None:
        """Print all that the runs said and did, to stdout if no stream is given.

        Example:
            ```python
            Trace("run.jsonl").show()
            ```
        """
        show_event = StoryPrinter(Story("all"), sys.stdout if stream is None else stream, has_no_bound=True)
        for event in self:
            show_event(event)

    def write_page(self, out: str | os.PathLike[str]) -> tuple[str, ...]:
        """Write the trace as one page for a browser that needs no network, and return notes on what it leaves out.

        Example:
            ```python
            Trace("run.jsonl").write_page("run.html")
            ```

        Raises:
            ConfigurationError: The page cannot be written, or `out` is another file.
        """
        return write_page(self._path, Path(out)).notes

    def otlp(self, out: str | os.PathLike[str] | None = None) -> Iterator[str]:
        """Yield the trace as lines of one OTLP/JSON document, as OpenTelemetry's collectors read it.

        Example:
            ```python
            document = "\\n".join(Trace("run.jsonl").otlp())
            ```

        Args:
            out: A new file for the document. Nothing is yielded then.

        Raises:
            ConfigurationError: The file exists, or cannot be written.
        """
        return export(self._path, None if out is None else Path(out))


def tree(path: Path) -> list[str]:
    """Return the runs of a trace in three lines each, children below their parents, one tree after the other.

    Raises:
        ConfigurationError: The file cannot be read, or is not a trace.
    """
    return [line for run in _runs(path) for line in _drawn(run)]


def runs(path: Path) -> list[dict[str, Any]]:
    """Return the same as plain values: for each run its name, question, model, calls, tokens, cost and end.

    `duration_s` is None for a run that did not end, and `cost_usd` where a price is not known.

    Raises:
        ConfigurationError: The file cannot be read, or is not a trace.
    """
    return [{each.name: getattr(run, each.name) for each in fields(run)} for run in _runs(path)]


def _runs(path: Path) -> list[_Run]:
    trees: dict[str, dict[str, _Run]] = {}
    named = ""
    for event in lines(path):
        # Older traces name no trees: each root run begins one.
        if "tree" not in event and event["event"] == "run_started" and event["depth"] == 0:
            named = f"{len(trees)}"
        runs = trees.setdefault(str(event.get("tree", named)), {})
        try:
            _take(runs.setdefault(str(event["run"]), _Run(str(event["run"]))), event)
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            raise ConfigurationError(f"{path} is not a trace: malformed {event['event']!s:.40} event") from None
    if not trees:
        raise ConfigurationError(f"{path} is not a trace: it is empty")
    try:
        return [run for runs in trees.values() for run in sorted(runs.values(), key=_place)]
    except ValueError:
        raise ConfigurationError(f"{path} is not a trace: a run's name must be like 1 or 1.2") from None


def _take(run: _Run, event: dict[str, Any]) -> None:
    match event["event"]:
        case "run_started":
            run.question, run.model = str(event.get("question") or ""), str(event.get("model"))
        case "iteration_started":
            run.turns = int(event.get("number", 0))
        case "block_started":
            run.blocks[_OPEN] = 1  # blocks of one run never overlap
        case "block_ended":
            run.blocks.pop(_OPEN, None)
            run.blocks[str(event.get("outcome", {}).get("status"))] += 1
        case "call_ended":
            usage = event.get("usage", {})
            run.calls += event.get("error") is None
            run.tokens += usage.get("total_input_tokens", 0) + usage.get("total_output_tokens", 0)
            cost = usage.get("total_cost")
            run.cost_usd = None if cost is None or run.cost_usd is None else run.cost_usd + cost
        case "run_ended":
            run.duration_s = float(event.get("duration_s", 0))
            run.response, run.error = event.get("response"), event.get("error")
            run.is_stopped = event.get("kind") == "stopped"


def _place(run: _Run) -> list[int]:
    """Return a run's place in its tree, by which runs are sorted: 1.10 comes after 1.9."""
    return [int(part) for part in run.name.split(".")]


def _drawn(run: _Run) -> list[str]:
    indent = "  " * run.name.count(".")
    blocks = ", ".join(f"{count} {status}" for status, count in run.blocks.items()) or "none"
    cost = "cost unknown" if run.cost_usd is None else f"${run.cost_usd:.4f}"
    return [
        f"{indent}{run.name} [{run.model}] {label(run.question, TEXT_CHARS) or '(no question)'}",
        f"{indent}  turns {run.turns}, blocks {blocks}, calls {run.calls}, tokens {run.tokens:,}, {cost}",
        f"{indent}  {_ended(run)}",
    ]


def _ended(run: _Run) -> str:
    if run.duration_s is None:
        return "did not end"
    what = "stopped" if run.is_stopped else "failed" if run.error else "answered"
    return f"{what} in {run.duration_s:.2f} s: {label(str(run.error or run.response or ''), TEXT_CHARS)}"
