"""Results of a measurement: a row of the table, or a curve of the picture. Values only."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "rlm-broker"

_PER_SI = {"s": 1.0, "ms": 1e3, "µs": 1e6, "MB": 1e-6, "GB": 1e-9, "/s": 1.0}
"""Unit of a table → value of one second, one byte or one per second in it."""


@dataclass(frozen=True)
class Check:
    """A target of a row. `met` is None if the other side of the comparison could not be measured."""

    text: str
    met: bool | None


@dataclass(frozen=True)
class Side:
    """Samples of one contender, in `unit`. If there are none, `problem` says why."""

    name: str
    unit: str
    samples: Sequence[float]
    problem: str = ""

    @property
    def median(self) -> float | None:
        """The value that is shown and compared."""
        return statistics.median(self.samples) if self.samples else None

    def quantile(self, share: float) -> float | None:
        """The sample that `share` of all samples do not exceed."""
        if not self.samples:
            return None
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def times(self, other: "Side") -> float | None:
        """Return the ratio of this median to the other's."""
        return self.median / other.median if self.median is not None and other.median else None

    def at_most(self, limit: float) -> Check:
        """The median is `limit` or less."""
        return Check(f"≤ {limit:g} {self.unit}", None if self.median is None else self.median <= limit)

    def p99_at_most(self, limit: float) -> Check:
        """99 of 100 samples are `limit` or less."""
        p99 = self.quantile(0.99)
        return Check(f"p99 ≤ {limit:g} {self.unit}", None if p99 is None else p99 <= limit)

    def at_least(self, limit: float) -> Check:
        """The median is `limit` or more."""
        return Check(f"≥ {limit:g} {self.unit}", None if self.median is None else self.median >= limit)

    def at_most_times(self, factor: float, other: "Side") -> Check:
        """The median is at most `factor` times the other's."""
        ratio = self.times(other)
        return Check(f"≤ {factor:g} x {other.name}", None if ratio is None else ratio <= factor)

    def at_least_times(self, factor: float, other: "Side") -> Check:
        """The median is at least `factor` times the other's."""
        ratio = self.times(other)
        return Check(f"≥ {factor:g} x {other.name}", None if ratio is None else ratio >= factor)


def side(name: str, unit: str, samples: Iterable[float], problem: str = "") -> Side:
    """A side from samples in seconds, bytes or per second."""
    return Side(name, unit, [sample * _PER_SI[unit] for sample in samples], problem)


@dataclass(frozen=True)
class Row:
    """One line of the table: ours, what it is to reach, and what was measured beside it in the same run."""

    what: str
    ours: Side
    others: Sequence[Side] = ()
    checks: Sequence[Check] = ()
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether all checks are met; None if none could be made and none failed."""
        known = [check.met for check in self.checks if check.met is not None]
        return all(known) if known else None

    @property
    def target(self) -> str:
        """All checks, in words."""
        return "; ".join(check.text for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "what": self.what,
            "value": self.ours.median,
            "unit": self.ours.unit,
            "target": self.target,
            "met": self.met,
            "checks": [{"text": check.text, "met": check.met} for check in self.checks],
            "samples": len(self.ours.samples),
            "quantiles": _quantiles(self.ours),
            "peers": [
                {
                    "name": other.name,
                    "value": other.median,
                    "ratio": self.ours.times(other),
                    "samples": len(other.samples),
                    "quantiles": _quantiles(other),
                    "problem": other.problem,
                }
                for other in self.others
            ],
            "note": self.note,
        }


@dataclass(frozen=True)
class Curve:
    """Growth of a figure: for each contender, points (x, y)."""

    what: str
    along: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {"what": self.what, "along": self.along, "unit": self.unit, "lines": dict(self.lines)}


def number(value: float | None, unit: str) -> str:
    """A value for people: three digits, or whole thousands."""
    if value is None:
        return "-"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}"


def _quantiles(measured: Side) -> dict[str, float | None]:
    return {name: measured.quantile(share) for name, share in (("min", 0), ("p5", 0.05), ("p95", 0.95), ("p99", 0.99))}
