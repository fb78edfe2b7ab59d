"""A trace file as text: the tree of its runs, with the work, the time and the cost of each."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import BlockEnded, BlockStarted, CallEnded, Event, IterationStarted, RunEnded, RunStarted
from rlm_broker.events.story import Story
from rlm_broker.events.trace import events
from rlm_broker.values.text import label
from rlm_broker.watch.otlp import otlp_lines, write_otlp
from rlm_broker.watch.terminal import StoryPrinter
from rlm_broker.watch.viewer.page import write_page

TEXT_CHARS = 60
"""Characters of a question or an answer; longer text is cut."""
_OPEN = "not ended"
"""Word for blocks without an end in the trace: their run was ended with them."""


@dataclass(slots=True)
class _Run:
    """One run of a trace."""

    name: str
    tree: str
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
    branch_of: str = ""
    after_turn: int = 0


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
        require_kind("path", path, str, os.PathLike)
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
        found = _runs(self._path)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(run.tree for run in found), 1)}
        return [line for run in found for line in _drawn(run, numbers)]

    def runs(self) -> list[dict[str, Any]]:
        """Return the same as plain values: for each run its name, question, model, calls, tokens, cost and end.

        `duration_s` is None for a run that did not end, and `cost_usd` where a price is not known.

        Example:
            ```python
            print(sum(run["calls"] for run in Trace("run.jsonl").runs()))
            ```
        """
        return [{each.name: getattr(run, each.name) for each in fields(run)} for run in _runs(self._path)]

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

    def otlp(self) -> Iterator[str]:
        """Yield the trace as lines of one OTLP/JSON document, as OpenTelemetry's collectors read it.

        Example:
            ```python
            document = "\\n".join(Trace("run.jsonl").otlp())
            ```
        """
        return otlp_lines(self._path)

    def write_otlp(self, out: str | os.PathLike[str]) -> None:
        """Write the same document to a new file.

        Example:
            ```python
            Trace("run.jsonl").write_otlp("run.otlp.json")
            ```

        Raises:
            ConfigurationError: The file exists, or cannot be written.
        """
        write_otlp(self._path, Path(out))


def _runs(path: Path) -> list[_Run]:
    """Return the runs of a trace, children below their parents, one tree after the other."""
    trees: dict[str, dict[str, _Run]] = {}
    for event in events(path):
        _take(trees.setdefault(event.tree, {}).setdefault(event.run, _Run(event.run, event.tree)), event)
    if not trees:
        raise ConfigurationError(f"{path} is not a trace: it is empty")
    try:
        return [run for runs in trees.values() for run in sorted(runs.values(), key=_place)]
    except ValueError:
        raise ConfigurationError(f"{path} is not a trace: a run's name must be like 1 or 1.2") from None


def _take(run: _Run, event: Event) -> None:
    match event:
        case RunStarted():
            run.question, run.model = event.question or "", event.model
            run.branch_of, run.after_turn = event.branch_of, event.after_turn
        case IterationStarted():
            run.turns = event.number
        case BlockStarted():
            run.blocks[_OPEN] = 1  # blocks of one run never overlap
        case BlockEnded():
            run.blocks.pop(_OPEN, None)
            run.blocks[event.outcome.status] += 1
        case CallEnded(usage=usage):
            run.calls += event.error is None and not event.is_remembered
            run.tokens += usage.total_input_tokens + usage.total_output_tokens
            cost = usage.total_cost
            run.cost_usd = None if cost is None or run.cost_usd is None else run.cost_usd + cost
        case RunEnded():
            run.duration_s, run.response, run.error = event.duration_s, event.response, event.error
            run.is_stopped = event.kind == "stopped"


def _place(run: _Run) -> list[int]:
    """Return a run's place in its tree, for sorting: 1.10 comes after 1.9."""
    return [int(part) for part in run.name.split(".")]


def _drawn(run: _Run, numbers: Mapping[str, int]) -> list[str]:
    """Return the lines of a run. `numbers` has the number of each tree in the trace, from 1."""
    indent = "  " * run.name.count(".")
    blocks = ", ".join(f"{count} {status}" for status, count in run.blocks.items()) or "none"
    cost = "cost unknown" if run.cost_usd is None else f"${run.cost_usd:.4f}"
    goes_on = ""
    if run.branch_of:
        before = numbers.get(run.branch_of)
        of = label(f"run {run.branch_of}", TEXT_CHARS) if before is None else f"tree {before}"
        goes_on = f"(tree {numbers[run.tree]}, after turn {run.after_turn} of {of}) "
    return [
        f"{indent}{run.name} [{run.model}] {goes_on}{label(run.question, TEXT_CHARS) or '(no question)'}",
        f"{indent}  turns {run.turns}, blocks {blocks}, calls {run.calls}, tokens {run.tokens:,}, {cost}",
        f"{indent}  {_ended(run)}",
    ]


def _ended(run: _Run) -> str:
    if run.duration_s is None:
        return "did not end"
    what = "stopped" if run.is_stopped else "failed" if run.error else "answered"
    return f"{what} in {run.duration_s:.2f} s: {label(run.error or run.response or '', TEXT_CHARS)}"
