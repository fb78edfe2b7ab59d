"""`rlm-broker batch --status OUT`: how far a batch is, as a table or as JSON."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlm_broker.batch.status import BatchStatus, read_status
from rlm_broker.cli.ps import seconds
from rlm_broker.cli.terminal import say
from rlm_broker.values.text import as_json as to_json
from rlm_broker.values.words import counted, spent


def show(out: Path, *, as_json: bool) -> None:
    """Print the state of the batch that writes a file of results.

    Raises:
        ConfigurationError: It is not such a file, or cannot be read.
    """
    status = read_status(out)
    if as_json:
        say(to_json(status.to_dict()))
        return
    rows = list(_rows(status))
    width = max(len(name) for name, _ in rows)
    for name, told in rows:
        say(f"{name:{width}}  {told}")


def by_kind(numbers: Mapping[str, int]) -> str:
    """Return a number, and the parts that it has if they are named: `3 (provider 2, sandbox 1)`."""
    parts = ", ".join(f"{kind} {number:,}" for kind, number in sorted(numbers.items()))
    return f"{sum(numbers.values()):,}{f' ({parts})' if parts else ''}"


def _rows(status: BatchStatus) -> Iterator[tuple[str, str]]:
    yield "process", "none works on it now" if status.process is None else f"{status.process} works on it now"
    yield "done", counted(status.done, "item")
    yield "answered", f"{status.answered:,}"
    yield "limited", by_kind(status.limited)
    yield "failed", by_kind(status.failed)
    calls = spent(status.unfinished_usage)
    yield "unfinished", f"{status.unfinished:,} with paid calls{f' ({calls})' if status.unfinished else ''}"
    yield "time", seconds(status.seconds)
    total = status.usage.total
    yield "used", spent(total)
    models = status.usage.model_usage_summaries
    for model, usage in models.items() if len(models) > 1 else ():
        yield f"  {model}", spent(usage)
    if status.replayed.total_calls:
        yield "replayed", spent(status.replayed)
