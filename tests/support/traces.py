"""Traces for tests: events in the form of a trace file, without a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Written:
    """Lines of a trace, one event a call: `written("run_started", question="?")`."""

    def __init__(self, tree: str = "t") -> None:
        self.lines: list[Line] = []
        self._tree = tree

    def __call__(self, event: str, run: str = "1", **fields: Any) -> "Written":
        """Add an event, 0.1 s after the one before."""
        number = len(self.lines) + 1
        head = {"n": number, "time": 1_700_000_000 + number / 10, "event": event, "run": run}
        self.lines.append({**head, "depth": run.count("."), "tree": self._tree, **fields})
        return self

    def call(self, number: int, prompt: Any, reply: str, run: str = "1", **fields: Any) -> "Written":
        """Add a call from its start to its end."""
        self("call_started", run, call=number, requested_model=None, prompt=prompt, **fields)
        return self.ended(number, reply, run)

    def ended(self, number: int, reply: str, run: str = "1", error: str | None = None) -> "Written":
        """Add the end of a call."""
        usage = {"total_calls": 1, "total_input_tokens": 100, "total_output_tokens": 10, "total_cost": 0.5}
        told = {"model": "m", "usage": usage, "duration_s": 0.1, "response": reply, "error": error}
        return self("call_ended", run, call=number, **told)

    def to(self, path: Path) -> Path:
        """Write the lines to a file, and return its path."""
        path.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines))
        return path


def small(
    question: str = "Which failed?", texts: Sequence[str] = ("The reply.", "print(1)", "1\n", "A part.")
) -> Written:
    """The trace of a run with a turn, a block, a batch, a child run, a tool and a failed block."""
    reply, code, printed, part = texts
    written = Written()
    written("run_started", question=question, model="m", metadata={"limits": {"max_depth": 2, "max_iterations": 9}})
    written("repl_ready", isolation={"level": "strict", "layers": ["seccomp"]}, duration_s=0.01)
    written("iteration_started", number=1).call(1, "Look.", reply, system="You are.", block=0)
    written("replied", number=1, text=reply, not_run=[])
    written("block_started", iteration=1, block=1, code=code)
    for number in (2, 3):
        written("call_started", call=number, prompt=f"part {number}", block=1, batch=1, of=2)
    written.ended(3, part).ended(2, part)
    for number in (4, 5, 6):
        written.call(number, "equal", part, block=1)
    written("run_started", "1.1", question="the child", model="m", metadata={}, block=1)
    written("iteration_started", "1.1", number=1).call(7, "in the child", "FINAL(2)", "1.1", block=0)
    written("run_ended", "1.1", response="2", error=None, iterations=1, duration_s=0.2, usage={}, cost_usd=0.5)
    written("tool_started", call=1, block=1, tool="lookup", arguments='{"args":[1]}')
    written("tool_ended", call=1, tool="lookup", duration_s=0.1, result="found", error=None)
    written("block_printed", block=1, stream="stdout", text=printed)
    written("block_ended", block=1, outcome={"status": "ok", "stdout": printed, "execution_time": 1.0})
    written("block_started", iteration=1, block=2, code="1 / 0")
    failed = {"status": "error", "error": "ZeroDivisionError: division by zero", "stderr": "Traceback: it was 0"}
    written("block_ended", block=2, outcome=failed)
    return written(
        "run_ended", response="That one.", error=None, iterations=1, duration_s=3.0, usage={}, kind="answered"
    )
