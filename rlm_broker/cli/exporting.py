"""Traces in the formats of other programs: what `trace export` offers."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rlm_broker.errors import ConfigurationError
from rlm_broker.trace.chrome import chrome_events
from rlm_broker.trace.otlp import otlp_lines
from rlm_broker.trace.tree import lines
from rlm_broker.trace.visualizer import visualizer_lines


def export_trace(trace: Path, name: str, out: Path | None) -> Iterator[str]:
    """Write a trace to the new file `out`, or yield its lines if there is none.

    Raises:
        ConfigurationError: The trace cannot be read, or the file exists or cannot be written.
    """
    exported = FORMATS[name](trace)
    if out is None:
        yield from exported
        return
    first = next(exported)  # a file that is no trace makes no file
    try:
        with out.open("x", encoding="utf-8", errors="backslashreplace") as file:
            try:
                file.write(f"{first}\n")
                file.writelines(f"{line}\n" for line in exported)
            except BaseException:
                out.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise ConfigurationError(f"{out} exists: remove it, or write to another file") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror}") from None


def _of_lines(export: Callable[[Iterator[dict[str, Any]]], Iterator[str]]) -> Callable[[Path], Iterator[str]]:
    """Return an export of a file, made of one that takes the lines of a trace as plain values."""

    def exported(trace: Path) -> Iterator[str]:
        events = lines(trace)
        first = next(events, None)
        if first is None:
            raise ConfigurationError(f"{trace} is not a trace: it is empty")
        try:
            yield from export(chain([first], events))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
            raise ConfigurationError(f"{trace} is not a trace: malformed event: {error!s:.200}") from None

    return exported


FORMATS: dict[str, Callable[[Path], Iterator[str]]] = {
    "chrome": _of_lines(chrome_events),
    "otlp": otlp_lines,
    "rlm": _of_lines(visualizer_lines),
}
"""Name of a format -> function from a trace file to the lines of the export."""
