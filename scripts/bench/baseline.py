"""The baseline: what each row costs in floors of its own run, and which rows cost more than it.

    .venv/bin/python -m scripts.bench spawn round_trip --write-baseline

Such a ratio holds on a busy machine better than a time, since both sides take turns. It wanders nevertheless: a row is
slower when its ratio is worse by more than `NOISE`, and by more than its samples or its floor's spread in either run.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.row import Curve, Row, Side

FILE = Path(__file__).with_name("baseline.json")
NOISE = 0.25
"""Share by which the ratios of two runs of the same code may differ, however little the samples spread."""
FEW, SPREAD_OF_FEW = 5, 0.5
"""Fewer samples do not show how they spread: they count as if by this share of their median."""
WIDEST = 1.0
"""Ratios of samples that spread wider are not compared."""

Measured = Mapping[str, Sequence[Row | Curve]]


def write(measured: Measured, machine: Mapping[str, Any]) -> None:
    """Replace what the file says of these measurements."""
    facts = {key: machine[key] for key in ("machine", "load_average", "python")}
    new = {name: {**facts, "costs": costs} for name, results in measured.items() if (costs := _costs(results))}
    FILE.write_text(json.dumps(_read() | new, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def slower(measured: Measured) -> list[str]:
    """Return a line for each row that is worse than the baseline, by the first floor that both know."""
    lines, baseline = [], _read()
    for name, results in measured.items():
        known = baseline.get(name, {"costs": {}})["costs"]
        for what, costs in _costs(results).items():
            for floor in [floor for floor in costs if floor in known.get(what, {})][:1]:
                now, then = costs[floor], known[what][floor]
                tolerance = max(NOISE, now["spread"], then["spread"])
                if now["cost"] > then["cost"] * (1 + tolerance):
                    ratios = f"{now['cost']:.2g} x {floor}, was {then['cost']:.2g} x"
                    lines.append(f"{name}: {what}: {ratios} (more than {tolerance:.0%} worse)")
    return lines


def _read() -> dict[str, Any]:
    """Return measurement → its costs, and the machine that had them."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def _costs(results: Sequence[Row | Curve]) -> dict[str, dict[str, dict[str, float]]]:
    """Return row → floor → `cost`, the row's median in floors, and `spread`. Less is better, also of rates."""
    rows = [result for result in results if isinstance(result, Row)]
    return {row.what: costs for row in rows if (costs := dict(_ratios(row)))}


def _ratios(row: Row) -> Iterator[tuple[str, dict[str, float]]]:
    for other in row.others:
        times, spread = row.ours.times(other), max(_spread(row.ours), _spread(other))
        if times and spread <= WIDEST:
            cost = 1 / times if other.unit == "/s" else times
            yield other.name, {"cost": round(cost, 4), "spread": round(spread, 2)}


def _spread(measured: Side) -> float:
    """Return the distance of the quartiles from each other, as a share of the median."""
    if len(measured.samples) < FEW:
        return SPREAD_OF_FEW
    low, median, high = statistics.quantiles(measured.samples)
    return (high - low) / median if median else WIDEST + 1
