"""Displays of matplotlib and PIL, as in a notebook: pictures that code shows, saves, or leaves open when a block ends.

`adapted` imports this module when code imports one of these packages. An unchanged figure is shown once in a block,
even if code shows and saves it.
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
"""Bytes of a file that are searched for the tag of an SVG picture, which may follow declarations and comments."""

DRAWN_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Modes of PIL images that PNG can store. Images of other modes are converted."""

_shown: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Figure → number of the block in which it was shown last."""
_savefig: Callable[..., Any]


def adapt_matplotlib(module: ModuleType) -> None:
    """Choose a backend without a screen. The automatic choice would import every installed toolkit."""
    if not isinstance(dict.__getitem__(module.rcParams, "backend"), str):  # a str comes from `MPLBACKEND`
        module.use("agg")
    logging.getLogger("matplotlib.font_manager").addFilter(_is_of_use)


def adapt_figure(module: ModuleType) -> None:
    """Replace methods of figures, so that showing or saving one makes a display."""
    global _savefig
    _savefig = module.Figure.savefig
    module.Figure.savefig = _save
    module.Figure.show = _show
    module.Figure._repr_png_ = _drawn_once
    at_end.append(_show_what_is_open)


def adapt_backends(module: ModuleType) -> None:
    """Have `pyplot.show` make displays, with every backend that has no window."""
    module.FigureManagerBase.show = _show_and_close


def adapt_pil(module: ModuleType) -> None:
    """Have `Image.show` make a display. The original starts a program."""

    def show(self: Any, title: str | None = None) -> None:  # noqa: ARG001 - PIL's signature
        """Display this image."""
        if (displays := current()) is not None:
            has_form = self.mode if self.mode in DRAWN_MODES else module.getmodebase(self.mode)
            forms = None if displays.is_full else forms_of(self if has_form == self.mode else self.convert(has_form))
            displays.show(forms or NOTHING)

    module.Image.show = show


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a log record is useful. Each REPL builds the font cache once, so the warning about it is not."""
    return "building the font cache" not in record.getMessage()


def _show(figure: Any, warn: bool = True) -> None:  # noqa: ARG001 - matplotlib's signature
    """Display the figure."""
    if (displays := current()) is None or _is_shown(figure, displays):
        return
    displays.show(NOTHING if displays.is_full else Forms({}, {"image/png": _drawn(figure)}))
    _have_shown(figure, displays)


def _show_and_close(manager: Any) -> None:
    """Display a figure of pyplot and close it, so that later drawing goes into a new figure."""
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
        except Exception as error:  # noqa: BLE001 - drawing may raise any class, as for a bad formula in a title
            why = "".join(traceback.format_exception_only(error))
            complain(f"a figure that was left open cannot be drawn: {why}")
        finally:
            pyplot.close(figure)


def _drawn_once(figure: Any) -> bytes | None:
    """Return the figure as a PNG picture; None if this block has shown it already."""
    displays = current()
    if displays is None or _is_shown(figure, displays):
        return None
    if displays.is_full:
        _show(figure)  # counts it as dropped
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
    if was_shown:  # saving marks the figure as changed, so mark it as shown again
        _have_shown(figure, displays)
    return done


def _saved(fname: Any, start: int, options: dict[str, Any]) -> Forms | None:
    """Return the forms of a saved figure, from its file or from memory; None if they are no known picture."""
    if type(fname) is io.BytesIO:
        return _forms(bytes(fname.getbuffer()[start:]))
    try:
        path = os.fspath(fname)
        if isinstance(path, str) and not options.get("format") and not Path(path).suffix.strip("."):
            path = f"{path.rstrip('.')}.{sys.modules['matplotlib'].rcParams['savefig.format']}"
        with open(path, "rb") as file:
            return _forms(file.read(PICTURE_BYTES + 1))  # `Displays` drops a picture of more than PICTURE_BYTES
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
    figure.stale = False  # matplotlib sets `stale` whenever the figure changes
