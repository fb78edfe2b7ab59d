"""Displays: pictures, tables and other rich output of model code, as in a notebook.

Names and behaviour are as in IPython: the function `display`, and the methods of objects that return their forms,
such as `_repr_png_` and `_repr_html_`.

Displays of matplotlib and PIL are as in a notebook: pictures that code shows, saves, or leaves open when a block ends.
An unchanged figure is shown once in a block, even if code shows and saves it.
"""

import binascii
import contextlib
import io
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.objects import is_a
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import MAX_DISPLAY_BYTES, MAX_DISPLAYS, MAX_DISPLAYS_BYTES, DisplayMessage
from sandbox_worker.wire.mime import PICTURE_TYPES, TEXT_TYPES, PictureType, TextType
from sandbox_worker.wire.tables import drawable

if TYPE_CHECKING:
    import logging

PLAIN_CHARS = 1 << 16
"""Maximum characters of the plain text beside other forms of an object; a longer one is left out. The block's output
has the text in any case."""
PICTURE_BYTES = (MAX_DISPLAY_BYTES - 4 * PLAIN_CHARS - 1024) // 4 * 3
"""Maximum bytes of a picture: as base64 it fits into a message, beside such a text. A larger one is left out."""
BUNDLE = "_repr_mimebundle_"
PICTURE_METHODS: tuple[tuple[PictureType, str], ...] = (("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"))
TEXT_METHODS: tuple[tuple[TextType, str], ...] = (
    ("image/svg+xml", "_repr_svg_"),
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
)
"""MIME type of a form, and the method of an object that returns this form."""
HAVE_NONE = frozenset({bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset})
"""Classes without forms of their own. Most last expressions have one of them, so their methods are not looked up."""


class Forms(NamedTuple):
    """Forms of one object, by MIME type."""

    texts: dict[TextType, str]
    pictures: dict[PictureType, bytes]


NOTHING = Forms({}, {})
"""Forms of an object that cannot be shown: `show` only counts it."""


class Displays:
    """Displays of the running block, sent to the orchestrator within the bounds of one block.

    Args:
        channel: Connection to the orchestrator.

    Attributes:
        block: Number of the block that runs, or 0.
        omitted: Number of dropped displays, since they were too large or too many.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()  # protects the counters alone; it is not held while a frame is sent
        self._count = self._bytes = 0
        self.block = 0
        self.omitted = 0

    def begin_block(self, number: int) -> None:
        """Begin a block: displays belong to it from now on."""
        global _current
        with self._lock:
            self.block = number
            self._count = self._bytes = self.omitted = 0
        _current = self

    def end_block(self) -> None:
        """End the block: displays of threads it has left are dropped from now on."""
        global _current
        _current = None
        self.block = 0

    @property
    def is_full(self) -> bool:
        """Whether the block can show no more."""
        return self._count >= MAX_DISPLAYS

    @property
    def is_here(self) -> bool:
        """Whether this is the REPL's own process. A process that model code forked cannot use the connection."""
        return os.getpid() == self._channel.owner

    def show(self, forms: Forms) -> None:
        """Send one object in these forms. Forms that are too large are left out; an object without forms is counted."""
        block = self.block
        frame = None if self.is_full else self._frame(block, forms)
        with self._lock:
            if block != self.block:
                return
            if frame is None or self.is_full or self._bytes + len(frame) > MAX_DISPLAYS_BYTES:
                self.omitted += 1
                return
            self._count += 1
            self._bytes += len(frame)
        self._channel.send_in(block, frame)

    def _frame(self, block: int, forms: Forms) -> bytes | None:
        texts, pictures = within_bounds(forms)
        if not pictures and not texts.keys() - {"text/plain"}:
            return None
        try:
            return self._channel.encode(DisplayMessage(block, texts, pictures))
        except (FrameTooLarge, MemoryError):
            return None


_current: Displays | None = None
"""Displays of the running block, or None. It is a global because packages are adapted before this process is forked."""
at_end: list[Callable[[Callable[[str], object]], None]] = []
"""Functions that are called at the end of a block, to show figures and the like that it has left open. The argument is
a function that prints a line to stderr of the block."""


def current() -> Displays | None:
    """Return the displays of the running block; None between blocks, and in a process that model code forked."""
    return _current if _current is not None and _current.is_here else None


def display(*values: object) -> None:
    """Show each object like the last expression of a block: its text, and its other forms."""
    for value in values:
        show_value(value)


def show_value(value: object) -> None:
    """Print the text of an object, and send its other forms, if it has any."""
    text = repr(value)
    print(text)
    if (forms := forms_of(value)) and (displays := current()) is not None:
        displays.show(forms._replace(texts={"text/plain": text, **forms.texts}) if len(text) <= PLAIN_CHARS else forms)


def all_forms_of(value: object) -> Forms:
    """Return the forms of an object with its text, whatever its length; without forms that are too large."""
    text, forms = repr(value), forms_of(value) or NOTHING
    return within_bounds(Forms({**forms.texts, "text/plain": text}, forms.pictures))


def within_bounds(forms: Forms) -> Forms:
    """Return the forms that are not too large for a display, and the text."""
    return Forms(
        {mime: text for mime, text in forms.texts.items() if mime == "text/plain" or len(text) <= MAX_DISPLAY_BYTES},
        {mime: data for mime, data in forms.pictures.items() if len(data) <= PICTURE_BYTES},
    )


def forms_of(value: object) -> Forms | None:
    """Return the forms of an object beside its text; None if it has none. Forms whose methods raise are left out."""
    if type(value) in HAVE_NONE:
        return None
    try:
        return _forms_of(value)
    except MemoryError:
        return NOTHING


def _forms_of(value: object) -> Forms | None:
    texts: dict[TextType, str] = {}
    pictures: dict[PictureType, bytes] = {}
    bundle = _made_by(value, BUNDLE, include=None, exclude=None)
    if isinstance(bundle, dict):
        pictures = {mime: data for mime in PICTURE_TYPES if (data := _picture(dict.get(bundle, mime))) is not None}
        texts = {mime: text for mime in TEXT_TYPES if (text := _text(dict.get(bundle, mime))) is not None}
    if not texts and not pictures:
        for picture, method in PICTURE_METHODS:
            if (data := _picture(_made_by(value, method))) is not None:
                pictures[picture] = data
                if len(data) <= PICTURE_BYTES:
                    break  # one picture is enough
        texts = {mime: text for mime, name in TEXT_METHODS if (text := _text(_made_by(value, name))) is not None}
    return Forms(texts, pictures) if texts or pictures else None


def _made_by(value: object, method: str, **given: object) -> object:
    """Return the form that a method of the object returns, without metadata; None without such a method."""
    try:
        if not hasattr(type(value), method):
            return None
        made = getattr(value, method)(**given)
        return made[0] if type(made) is tuple and len(made) == 2 else made
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a method of model code may raise any class; the text is printed in any case
        return None


def _text(made: object) -> str | None:
    return str.__str__(made) if is_a(made, str) else None


def _picture(made: object) -> bytes | None:
    """Return the bytes of a picture that a method returned, as bytes or as base64; None for any other object."""
    if is_a(made, bytes):
        return made if type(made) is bytes else memoryview(made).tobytes()
    if is_a(made, str):
        with contextlib.suppress(ValueError):
            return binascii.a2b_base64(str.__str__(made))
    return None


PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
SVG_WITHIN = 1000
"""Bytes of a file searched for the tag of an SVG picture, which may follow declarations and comments."""

_shown: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""Figure → number of the block in which it was shown last."""
_savefig: Callable[..., Any]


def adapt_matplotlib(module: ModuleType) -> None:
    """Choose a backend without a screen. The automatic choice would import every installed toolkit."""
    if not isinstance(dict.__getitem__(module.rcParams, "backend"), str):  # a str comes from `MPLBACKEND`
        module.use("agg")
    import logging  # imported here: matplotlib has it, and most REPLs need neither

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
    """Have `pyplot.show` make displays, with every backend without a window."""
    module.FigureManagerBase.show = _show_and_close


def adapt_pil(module: ModuleType) -> None:
    """Have `Image.show` make a display. The original starts a program."""

    def show(self: Any, title: str | None = None) -> None:  # noqa: ARG001 - PIL's signature
        """Display this image."""
        if (displays := current()) is not None:
            displays.show((None if displays.is_full else forms_of(drawable(self))) or NOTHING)

    module.Image.show = show


def _is_of_use(record: "logging.LogRecord") -> bool:
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
