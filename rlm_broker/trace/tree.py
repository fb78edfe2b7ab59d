"""A trace file as text: the tree of its runs, with the work, the time and the cost of each."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlm_broker.errors import ConfigurationError

TEXT_CHARS = 60
"""Characters of a question or an answer that are shown; longer text is cut."""


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
    ended: str = "did not end"


def tree(path: Path) -> list[str]:
    """Return lines that show the runs of a trace, each child below its parent. Several trees follow one another.

    Raises:
        ConfigurationError: The file cannot be read, or is not a trace.
    """
    trees: dict[str, dict[str, _Run]] = {}
    named = ""
    for event in _events(path):
        # Older traces name no trees: each root run begins one.
        if "tree" not in event and event["event"] == "run_started" and event["depth"] == 0:
            named = f"{len(trees)}"
        runs = trees.setdefault(str(event.get("tree", named)), {})
        try:
            _take(runs.setdefault(str(event["run"]), _Run(str(event["run"]))), event)
        except (TypeError, ValueError, AttributeError):
            raise ConfigurationError(f"{path} is not a trace: malformed {event['event']!s:.40} event") from None
    if not trees:
        raise ConfigurationError(f"{path} is not a trace: it is empty")
    try:
        return [line for runs in trees.values() for line in _drawn(runs)]
    except ValueError:
        raise ConfigurationError(f"{path} is not a trace: a run's name must be like 1 or 1.2") from None


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number > 1 and not line.endswith(b"\n"):  # the process was killed while it wrote this line
                    break
                event = json.loads(line)  # unlike msgspec, it reads lone surrogates
                if not isinstance(event, dict) or not {"event", "run", "depth"} <= event.keys():
                    raise ConfigurationError(f"{path} is not a trace: line {number} is not an event of a run")
                yield event
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a trace: line {number}: {error}") from None


def _take(run: _Run, event: dict[str, Any]) -> None:
    match event["event"]:
        case "run_started":
            run.question, run.model = str(event.get("question") or ""), str(event.get("model"))
        case "iteration_started":
            run.turns = int(event.get("number", 0))
        case "block_ended":
            run.blocks[str(event.get("outcome", {}).get("status"))] += 1
        case "call_ended":
            usage = event.get("usage", {})
            run.calls += 1
            run.tokens += usage.get("total_input_tokens", 0) + usage.get("total_output_tokens", 0)
            cost = usage.get("total_cost")
            run.cost_usd = None if cost is None or run.cost_usd is None else run.cost_usd + cost
        case "run_ended":
            said = event.get("error") or event.get("response") or ""
            what = "failed" if event.get("error") else "answered"
            run.ended = f"{what} in {event.get('duration_s', 0):.2f} s: {_short(str(said))}"


def _drawn(runs: dict[str, _Run]) -> list[str]:
    lines = []
    for run in sorted(runs.values(), key=lambda each: [int(part) for part in each.name.split(".")]):
        indent = "  " * run.name.count(".")
        blocks = ", ".join(f"{count} {status}" for status, count in run.blocks.items()) or "none"
        cost = "cost unknown" if run.cost_usd is None else f"${run.cost_usd:.4f}"
        lines += [
            f"{indent}{run.name} [{run.model}] {_short(run.question) or '(no question)'}",
            f"{indent}  turns {run.turns}, blocks {blocks}, calls {run.calls}, tokens {run.tokens:,}, {cost}",
            f"{indent}  {run.ended}",
        ]
    return lines


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS else f"{line[:TEXT_CHARS]}..."
