"""Traces in the formats of other programs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlm_broker.errors import ConfigurationError
from rlm_broker.trace.chrome import chrome_events
from rlm_broker.trace.tree import lines
from rlm_broker.trace.visualizer import visualizer_lines

Export = Callable[[Iterator[dict[str, Any]]], Iterator[str]]
"""Takes the lines of a trace, and yields the lines of the export."""
FORMATS: dict[str, Export] = {"chrome": chrome_events, "rlm": visualizer_lines}
"""Formats by the names that `trace export` gives them."""


def export_trace(trace: Path, name: str, out: Path | None) -> Iterator[str]:
    """Write a trace to the new file `out`, or yield its lines if there is none.

    Raises:
        ConfigurationError: The trace cannot be read, or the file exists or cannot be written.
    """
    exported = _exported(trace, FORMATS[name])
    if out is None:
        yield from exported
        return
    try:
        first = next(exported)  # a file that is no trace makes no file
        with out.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{first}\n")
            file.writelines(f"{line}\n" for line in exported)
    except FileExistsError:
        raise ConfigurationError(f"{out} exists: remove it, or write to another file") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror}") from None


def _exported(trace: Path, export: Export) -> Iterator[str]:
    try:
        yield from export(lines(trace))
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigurationError(f"{trace} is not a trace: malformed event: {error!s:.200}") from None
