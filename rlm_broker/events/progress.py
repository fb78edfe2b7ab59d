"""The present state of one run tree, as its events show it."""

import time
from typing import Final

from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    Event,
    IterationStarted,
    ReplReady,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.usage import Tally, Usage

NAME_CHARS = 60
"""Characters of the name of a model or a tool; the rest is cut. Model code may choose names of any length."""
BEGINS: Final = ("reads the context", "")


class RunProgress:
    """Receives the events of one run tree, and knows what it does.

    Each event costs about a microsecond. Only calls, tools and blocks that go on are kept, so memory is bounded by what
    the tree does at a time. The properties may be read from another thread.

    Example:
        ```python
        progress = RunProgress()
        run = RLM("offline").start("a\\nb", "How many lines are there?", on_event=progress)
        run.result()
        print(progress.turn, progress.tokens, progress.doing)
        ```

    Attributes:
        question: Question of the root run, as its first event has it. Secrets are replaced.
        model: Name of the root model; empty before the run has begun.
        turn: Turn of the root run.
        most_turns: Limit of its turns; None is none.
        started: Number of runs, ended ones included.
        runs: Number of live runs.
        blocks: Number of blocks, ended ones included.
        ended: The event that ended the root run, or None.
        since: Unix time in seconds of the beginning of its present activity.
    """

    def __init__(self) -> None:
        self.question: str | None = None
        self.model = ""
        self.turn = 0
        self.most_turns: int | None = None
        self.started = 0
        self.runs = 0
        self.blocks = 0
        self.ended: RunEnded | None = None
        self.since = time.time()
        self._sub_model = ""
        self._tally = Tally()
        self._calls: dict[tuple[str, int], str] = {}
        self._waiting: set[tuple[str, int]] = set()
        self._batches: dict[tuple[str, int], tuple[int, int]] = {}
        self._tools: dict[tuple[str, int], str] = {}
        self._running: dict[str, int] = {}
        self._does: tuple[str, str] = BEGINS
        self._rest = "starts"

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._count(event)
        does = self._doing()
        if does != self._does:
            self._does, self.since = does, event.time

    @property
    def doing(self) -> str:
        """Activity of the tree at this moment, in a few words; empty after its end."""
        verb, name = self._does
        batches = list(self._batches.values())
        how_far = ""
        if verb == "calls" and len(batches) == 1:
            how_far = f" ({batches[0][0]:,} of {batches[0][1]:,})"
        elif verb == "calls" and (calls := len(self._calls)) > 1:
            how_far = f" ({calls:,} calls)"
        return f"{verb} {name}{how_far}".strip()

    @property
    def open_calls(self) -> int:
        """Number of open calls."""
        return len(self._calls)

    @property
    def batch(self) -> tuple[int, int] | None:
        """Ended calls and all calls of the open batches; None without a batch."""
        batches = list(self._batches.values())
        return (sum(done for done, _ in batches), sum(of for _, of in batches)) if batches else None

    @property
    def is_running(self) -> bool:
        """Whether a block runs."""
        return bool(self._running)

    @property
    def usage(self) -> Usage:
        """Usage of all ended calls of the tree."""
        return self._tally.usage

    @property
    def tokens(self) -> int:
        """Tokens of all ended calls of the tree."""
        usage = self._tally.usage
        return usage.total_input_tokens + usage.total_output_tokens

    @property
    def cost_usd(self) -> float | None:
        """Cost of the tree in US dollars; None if a price is not known."""
        usage = self._tally.usage
        return usage.total_cost if usage.total_calls else 0.0

    def _count(self, event: Event) -> None:
        match event:
            case CallStarted() | CallRetried() | CallEnded():
                self._count_call(event)
            case ToolStarted() | ToolEnded():
                self._count_tool(event)
            case BlockStarted(run=run, block=block):
                self.blocks += 1
                self._running[run] = block
            case BlockEnded(run=run):
                self._forget(run)
                self._rest = "reads the output"
            case IterationStarted(depth=0, number=number):
                self.turn = number
            case RunStarted():
                self._begin(event)
            case ReplReady():
                self._rest = "starts"
            case RunEnded():
                self._end(event)

    def _count_call(self, event: CallStarted | CallRetried | CallEnded) -> None:
        call = (event.run, event.call)
        if isinstance(event, CallRetried):
            self._waiting.add(call)
            return
        batch = (event.run, event.batch)
        if isinstance(event, CallStarted):
            model = event.requested_model or (self._sub_model if event.block else self.model)
            self._calls[call] = model[:NAME_CHARS]
            if event.batch:
                self._batches.setdefault(batch, (0, event.of))
            return
        self._calls.pop(call, None)
        self._waiting.discard(call)
        self._tally.add(event.usage)
        self._rest = "reads the reply"
        if event.batch and event.done == event.of:
            self._batches.pop(batch, None)
        elif event.batch:
            self._batches[batch] = (event.done, event.of)

    def _count_tool(self, event: ToolStarted | ToolEnded) -> None:
        if isinstance(event, ToolStarted):
            self._tools[event.run, event.call] = event.tool[:NAME_CHARS]
        else:
            self._tools.pop((event.run, event.call), None)

    def _begin(self, event: RunStarted) -> None:
        self.started += 1
        self.runs += 1
        self._rest = "starts a REPL"
        if event.depth == 0:
            self.question, self.model = event.question, event.model[:NAME_CHARS]
            limits = event.metadata.get("limits")
            most = limits.get("max_iterations") if isinstance(limits, dict) else None
            most = most[0] if isinstance(most, list | tuple) and most else most
            self.most_turns = most if isinstance(most, int) else None
            self._sub_model = str(event.metadata.get("sub_model") or event.model)[:NAME_CHARS]

    def _end(self, event: RunEnded) -> None:
        self.runs -= 1
        self._forget(event.run)
        if event.depth == 0:
            self.ended = event

    def _forget(self, run: str) -> None:
        """Drop what a run had under way: what is cancelled gets no event of its end."""
        self._running.pop(run, None)
        if self._calls or self._batches or self._tools:
            self._calls = {key: model for key, model in self._calls.items() if key[0] != run}
            self._waiting = {key for key in self._waiting if key[0] != run}
            self._batches = {key: how_far for key, how_far in self._batches.items() if key[0] != run}
            self._tools = {key: tool for key, tool in self._tools.items() if key[0] != run}

    def _doing(self) -> tuple[str, str]:
        """Return a verb and a name. They change as soon as the tree does another thing."""
        if self.ended is not None:
            return "", ""
        if self._calls:
            model = next(iter(self._calls.values()))
            is_waiting = len(self._waiting) == len(self._calls)
            return ("waits to call" if is_waiting else "calls"), model
        if self._tools:
            return "calls the tool", next(iter(self._tools.values()))
        if self._running:
            run, block = next(reversed(self._running.items()))
            return "runs block", str(block) if run.count(".") == 0 else f"{block} of run {run[:NAME_CHARS]}"
        return self._rest, ""
