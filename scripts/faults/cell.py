"""A fault in a phase, and its result. Values only."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Phase = Literal[
    "starting", "idle", "block running", "query in flight", "batch half done", "child two deep", "closing", "-"
]
"""Phase of a run in which the fault comes; "-" for a fault of something else, such as a file."""

STARTING: Final = "starting"
IDLE: Final = "idle"
BLOCK: Final = "block running"
QUERY: Final = "query in flight"
BATCH: Final = "batch half done"
DEEP: Final = "child two deep"
CLOSING: Final = "closing"

PHASES: Final[tuple[Phase, ...]] = (STARTING, IDLE, BLOCK, QUERY, BATCH, DEEP, CLOSING)
WORKING: Final[tuple[Phase, ...]] = (IDLE, BLOCK, QUERY, BATCH, DEEP)
"""Phases in which a REPL exists whose variables could be lost."""

ANSWER: Final = "answer"
VARIABLES: Final = "variables"
RESULT: Final = "result of the block"
NEXT_RUN: Final = "next run"
Losses = Mapping[Phase, frozenset[str]]


@dataclass
class Report:
    """Result of one fault in one phase.

    Attributes:
        told: The caller's answer or error, in one line.
        is_sensible: Whether that names the cause in one sentence, or is the answer.
        lost: Things that should be there afterwards and are not.
        left: Things that should not be there afterwards and are: processes, descriptors, tasks, folders, mounts.
    """

    told: str = ""
    is_sensible: bool = False
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Leave it for the engine, which reads it when this process has ended."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Report | None":
        """The report of a process that has ended; None if it came to none."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return cls(**found)


Scene = Callable[[Path], Report]
"""Plays one fault in one phase in a process of its own, in an empty folder."""


@dataclass(frozen=True)
class Cell:
    """One fault in one phase.

    Attributes:
        may_lose: Losses that this fault causes by its nature. All else must still be there.
        dies: The signal that ends the playing process, where the fault is its death.
        stops: The playing process is stopped, and the engine lets it go on.
        leaves_folder: A folder may be left that the next start removes; after a death that is so by its nature.
        is_quick: It belongs to the short form.
        needs: Why it cannot be played on this machine; empty if it can.
    """

    fault: str
    phase: Phase
    scene: Scene
    may_lose: frozenset[str] = frozenset()
    dies: int | None = None
    stops: bool = False
    leaves_folder: bool = False
    is_quick: bool = False
    needs: str = ""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.fault if self.phase == "-" else f"{self.fault}, {self.phase}"


@dataclass(frozen=True)
class Result:
    """A cell that was played.

    Attributes:
        problems: Why it is not as it must be; empty if it is.
        seconds: Seconds from its start until all expected ends have come.
    """

    cell: Cell
    report: Report
    problems: Sequence[str]
    seconds: float


def judged(cell: Cell, report: Report, seconds: float) -> Result:
    """Compare the report of a cell with its allowed results."""
    problems = []
    if lost := [each for each in report.lost if each not in cell.may_lose]:
        problems.append(f"lost: {', '.join(lost)}")
    if report.left:
        problems.append(f"left: {', '.join(report.left)}")
    if not report.is_sensible:
        problems.append("told nothing sensible")
    return Result(cell, report, problems, seconds)
