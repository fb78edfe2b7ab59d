"""Progress of `rlm-broker batch`: a live line with a bar on a terminal, a line each half a minute elsewhere.

`batch --status OUT` shows how far the batch of a file is, as a table or as JSON.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlm_broker.batch.progress import BatchProgress
from rlm_broker.batch.status import BatchStatus, read_status
from rlm_broker.cli.ps import seconds
from rlm_broker.cli.terminal import say
from rlm_broker.values.text import printable
from rlm_broker.values.words import counted
from rlm_broker.watch.progress_line import live_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

LINE_EACH_S = 30.0
"""Seconds between two lines where there is no terminal."""
BAR_COLUMNS = 16
"""Columns of the bar, on a terminal of at least `WIDE_COLUMNS`."""
WIDE_COLUMNS = 72
MOST_NOTES = 10
"""Failures reported as they happen. Further ones are only counted: the file of results has them all."""


class BatchLine:
    """Tells how far a batch is, from its start until it is closed.

    Args:
        progress: Returns the present progress; called on threads of this class.
    """

    def __init__(self, stream: TextIO, progress: Callable[[], BatchProgress]) -> None:
        self._stream = stream
        self._progress = progress
        self._notes = 0
        self._is_over = threading.Event()
        self._live = live_line(self, stream)
        self._thread = None if self._live else threading.Thread(target=self._print_lines, daemon=True)
        if self._thread is not None:
            self._thread.start()

    def note(self, text: str) -> None:
        """Print a line above the live line. After `MOST_NOTES` lines further ones are left out."""
        self._notes += 1
        if self._notes > MOST_NOTES + 1:
            return
        told = text if self._notes <= MOST_NOTES else "further failures are only counted here"
        if self._live is None:
            self._print(told)
        else:
            from rich.text import Text

            self._live.console.print(Text(printable(told)), soft_wrap=True)

    def close(self) -> None:
        """Remove the live line, or end the printing. A second call has no effect."""
        self._is_over.set()
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self._live.stop()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Yield the present line. rich asks for it at each refresh."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        del console
        progress = self._progress()
        line = Text(in_words(progress), no_wrap=True)
        width = options.max_width
        if progress.total is None or width < WIDE_COLUMNS:
            line.truncate(width, overflow="ellipsis")
            yield line
            return
        line.truncate(width - BAR_COLUMNS - 1, overflow="ellipsis")
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(ProgressBar(max(1, progress.total), progress.done + progress.skipped, width=BAR_COLUMNS), line)
        yield row

    def _print_lines(self) -> None:
        while not self._is_over.wait(LINE_EACH_S):
            self._print(in_words(self._progress()))

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader has gone; the batch goes on
            print(printable(line) if self._stream.isatty() else line, file=self._stream, flush=True)


def in_words(progress: BatchProgress) -> str:
    """Return the progress as one line: what changes most comes first, because a long line is cut."""
    of = "" if progress.total is None else f" of {progress.total:,}"
    parts = [f"{progress.done + progress.skipped:,}{of} done"]
    parts += [f"{seconds(progress.left_s)} left"] if progress.left_s is not None else []
    parts += [f"{progress.running:,} running", f"{progress.rate:.2g} runs/s"]
    parts += [f"{progress.failed:,} failed"] if progress.failed else []
    parts += [f"{progress.limited:,} at a limit"] if progress.limited else []
    return ", ".join([*parts, used(progress)])


def used(progress: BatchProgress) -> str:
    """Return calls, tokens and cost of this batch, and how many of its calls an earlier process has paid."""
    replayed = progress.replayed.total_calls
    told = f"{counted(replayed, 'call')} replayed" if replayed else ""
    return ", ".join(filter(None, (str(progress.usage), told)))


def show_status(out: Path, *, as_json: bool, of_shards: bool = False) -> BatchStatus:
    """Print the state of the batch that writes a file of results, and return it.

    Args:
        out: The file.
        as_json: Whether it is printed as a JSON object.
        of_shards: Whether the shards beside the file are looked at, also if the file is there.

    Raises:
        ConfigurationError: It is not such a file, or cannot be read.
    """
    status = read_status(out, of_shards=of_shards)
    if as_json:
        say(json.dumps(status.to_dict(), ensure_ascii=False))
        return status
    rows = list(_rows(status))
    width = max(len(name) for name, _ in rows)
    for name, told in rows:
        say(f"{name:{width}}  {told}")
    return status


def by_kind(numbers: Mapping[str, int]) -> str:
    """Return the sum of numbers, with its parts by kind if there are any: `3 (provider 2, sandbox 1)`."""
    parts = ", ".join(f"{kind} {number:,}" for kind, number in sorted(numbers.items()))
    return f"{sum(numbers.values()):,}{f' ({parts})' if parts else ''}"


def _rows(status: BatchStatus) -> Iterator[tuple[str, str]]:
    yield "process", "none works on it now" if status.process is None else f"{status.process} works on it now"
    if status.shards is not None:
        yield "shards", f"{status.shards[0]:,} of {status.shards[1]:,}"
    if status.cut_bytes:
        yield "cut", f"{status.cut_bytes:,} bytes of results were removed by another program: put the file back"
    yield "done", counted(status.done, "item")
    yield "answered", f"{status.answered:,}"
    yield "limited", by_kind(status.limited)
    yield "failed", by_kind(status.failed)
    calls = f" ({status.unfinished_usage})" if status.unfinished else ""
    yield "unfinished", f"{status.unfinished:,} with paid calls{calls}"
    yield "time", seconds(status.seconds)
    total = status.usage.total
    yield "used", str(total)
    models = status.usage.model_usage_summaries
    for model, usage in models.items() if len(models) > 1 else ():
        yield f"  {model}", str(usage)
    if status.replayed.total_calls:
        yield "replayed", str(status.replayed)
