"""matplotlib and PIL as in a notebook: what they show, save or leave open at the end of a block becomes a display.

Imported when one of them is, see `adapted`. A figure that has not changed since is shown once in a block, however many
ways code takes to show it.
"""

import io
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sandbox_worker.repl.displays import NOTHING, PICTURE_BYTES, Displays, Forms, at_end, current, forms_of

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
SVG_WITHIN = 1000
"""Bytes within which the element of an SVG picture begins, after declarations and comments."""

DRAWN_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Modes of images of PIL that PNG has."""

_shown: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Figure → the block in which it was shown last."""
_savefig: Callable[..., Any]


def adapt_matplotlib(module: ModuleType) -> None:
    """Draw without a screen from the start: what looks for one imports every toolkit that is installed."""
    if not isinstance(dict.__getitem__(module.rcParams, "backend"), str):  # else `MPLBACKEND` names one
        module.use("agg")
    logging.getLogger("matplotlib.font_manager").addFilter(_is_of_use)


def adapt_figure(module: ModuleType) -> None:
    """Have figures shown by their own methods."""
    global _savefig
    _savefig = module.Figure.savefig
    module.Figure.savefig = _save
    module.Figure.show = _show
    module.Figure._repr_png_ = _drawn_once
    at_end.append(_show_what_is_open)


def adapt_backends(module: ModuleType) -> None:
    """Have `pyplot.show` show, with each backend that has no window."""
    module.FigureManagerBase.show = _show_and_close


def adapt_pil(module: ModuleType) -> None:
    """Show a picture in place of starting a program for it."""

    def show(self: Any, title: str | None = None) -> None:  # noqa: ARG001 - PIL's signature
        """Display this image."""
        if (displays := current()) is not None:
            has_form = self.mode if self.mode in DRAWN_MODES else module.getmodebase(self.mode)
            forms = None if displays.is_full else forms_of(self if has_form == self.mode else self.convert(has_form))
            displays.show(forms or NOTHING)

    module.Image.show = show


def _is_of_use(record: logging.LogRecord) -> bool:
    """Leave out that the list of fonts is being made: it is made once for each REPL."""
    return "building the font cache" not in record.getMessage()


def _show(figure: Any, warn: bool = True) -> None:  # noqa: ARG001 - matplotlib's signature
    """Display the figure."""
    if (displays := current()) is None or _is_shown(figure, displays):
        return
    displays.show(NOTHING if displays.is_full else Forms({}, {"image/png": _drawn(figure)}))
    _have_shown(figure, displays)


def _show_and_close(manager: Any) -> None:
    """Display a figure of pyplot's, and close it: what is drawn next goes into another one."""
    figure = manager.canvas.figure
    _show(figure)
    sys.modules["matplotlib.pyplot"].close(figure)


def _show_what_is_open(complain: Callable[[str], object]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        try:
            _show(figure)
        except Exception as error:  # noqa: BLE001 - such as for a formula in its title that cannot be read
            why = "".join(traceback.format_exception_only(error))
            complain(f"a figure that was left open cannot be drawn: {why}")
        finally:
            pyplot.close(figure)


def _drawn_once(figure: Any) -> bytes | None:
    """The figure as a PNG picture; None if this block has shown it."""
    displays = current()
    if displays is None or _is_shown(figure, displays):
        return None
    if displays.is_full:
        _show(figure)  # it is counted
        return None
    data = _drawn(figure)
    _have_shown(figure, displays)
    return data


def _drawn(figure: Any) -> bytes:
    file = io.BytesIO()
    _savefig(figure, file, format="png", dpi="figure", bbox_inches="tight")
    return file.getvalue()


def _save(figure: Any, fname: Any, **options: Any) -> Any:
    displays = current()
    was_shown = displays is not None and _is_shown(figure, displays)
    start = fname.tell() if type(fname) is io.BytesIO else 0
    done = _savefig(figure, fname, **options)
    if displays is None:
        return done
    if not was_shown and (forms := _saved(fname, start, options)):
        displays.show(forms)
        was_shown = True
    if was_shown:  # to save it counts as a change
        _have_shown(figure, displays)
    return done


def _saved(fname: Any, start: int, options: dict[str, Any]) -> Forms | None:
    """What was saved, if it is a picture that can be shown, in a file or in memory."""
    if type(fname) is io.BytesIO:
        return _forms(bytes(fname.getbuffer()[start:]))
    try:
        path = os.fspath(fname)
        if isinstance(path, str) and not options.get("format") and not Path(path).suffix.strip("."):
            path = f"{path.rstrip('.')}.{sys.modules['matplotlib'].rcParams['savefig.format']}"
        with open(path, "rb") as file:
            return _forms(file.read(PICTURE_BYTES + 1))  # more is not shown
    except (TypeError, OSError):
        return None


def _forms(data: bytes) -> Forms | None:
    if data.startswith(PNG):
        return Forms({}, {"image/png": data})
    if data.startswith(JPEG):
        return Forms({}, {"image/jpeg": data})
    if b"<svg" in data[:SVG_WITHIN]:
        return Forms({"image/svg+xml": data.decode("utf-8", "replace")}, {})
    return None


def _is_shown(figure: Any, displays: Displays) -> bool:
    return _shown.get(figure) == displays.block and not figure.stale


def _have_shown(figure: Any, displays: Displays) -> None:
    _shown[figure] = displays.block
    figure.stale = False  # matplotlib sets it when anything in the figure changes
