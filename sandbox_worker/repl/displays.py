"""What model code shows beside text, as a notebook would: each thing in the forms that it has of itself.

The names are those of IPython: `display`, and the methods `_repr_png_`, `_repr_html_` and others that objects have.
"""

import binascii
import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.classes import is_a
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import MAX_DISPLAY_BYTES, MAX_DISPLAYS, MAX_DISPLAYS_BYTES, Display
from sandbox_worker.wire.mime import PICTURE_TYPES, TEXT_TYPES, PictureType, TextType

PLAIN_CHARS = 1 << 16
"""Longest text beside other forms of an object. It is in the block's output in any case."""
PICTURE_BYTES = (MAX_DISPLAY_BYTES - 4 * PLAIN_CHARS - 1024) // 4 * 3
"""Bytes of the largest picture that fits into a message, as base64 beside such a text."""
BUNDLE = "_repr_mimebundle_"
PICTURE_METHODS: tuple[tuple[PictureType, str], ...] = (("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"))
TEXT_METHODS: tuple[tuple[TextType, str], ...] = (
    ("image/svg+xml", "_repr_svg_"),
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
)
"""Form, and the method of an object that makes it."""
HAVE_NONE = frozenset({bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset})
"""Classes of most values of last expressions, so that these need not be asked for each form."""


class Forms(NamedTuple):
    """One thing in the forms that it has, by MIME type."""

    texts: dict[TextType, str]
    pictures: dict[PictureType, bytes]


NOTHING = Forms({}, {})
"""In the place of what cannot be shown any more. It is counted."""


class Displays:
    """Sends what the running block shows, within the bounds of one block.

    Attributes:
        block: Number of the block that runs, or 0.
        omitted: Displays of the block that were too large, or too many.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._owner = os.getpid()
        self._lock = threading.RLock()  # of the numbers alone: to send a frame may take long
        self._count = self._bytes = 0
        self.block = 0
        self.omitted = 0

    def begin_block(self, number: int) -> None:
        """From here on displays belong to this block."""
        global _current
        with self._lock:
            self.block = number
            self._count = self._bytes = self.omitted = 0
        _current = self

    def end_block(self) -> None:
        """What threads show from here on is lost."""
        global _current
        _current = None
        self.block = 0

    @property
    def is_full(self) -> bool:
        """Whether the block can show no more."""
        return self._count >= MAX_DISPLAYS

    @property
    def is_here(self) -> bool:
        """Whether this is the REPL's own process: a forked one cannot use the connection."""
        return os.getpid() == self._owner

    def show(self, forms: Forms) -> None:
        """Send one thing in these forms. A form that is too large is left out, and a thing without any is counted."""
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
        texts = {mime: text for mime, text in forms.texts.items() if len(text) <= MAX_DISPLAY_BYTES}
        pictures = {mime: data for mime, data in forms.pictures.items() if len(data) <= PICTURE_BYTES}
        if not pictures and not texts.keys() - {"text/plain"}:
            return None
        try:
            return self._channel.encode(Display(block, texts, pictures))
        except (FrameTooLarge, MemoryError):
            return None


_current: Displays | None = None
"""Of the block that runs: modules that were adapted before this process was forked find it here."""
at_end: list[Callable[[Callable[[str], object]], None]] = []
"""Called at the end of a block, to show what it has left open, each with what takes a complaint."""


def current() -> Displays | None:
    """Return what shows things now; None between two blocks and in a process that model code has forked."""
    return _current if _current is not None and _current.is_here else None


def display(*values: object) -> None:
    """Show each object as the last expression of a block is shown: its text, and the other forms that it has."""
    for value in values:
        show_value(value)


def show_value(value: object) -> None:
    """Print the text of an object, and show its other forms, if it has any."""
    text = repr(value)
    print(text)
    if (forms := forms_of(value)) and (displays := current()) is not None:
        displays.show(forms._replace(texts={"text/plain": text, **forms.texts}) if len(text) <= PLAIN_CHARS else forms)


def forms_of(value: object) -> Forms | None:
    """Return the forms that an object has of itself, beside its text. What fails in it is left out."""
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
                    break  # one is enough
        texts = {mime: text for mime, name in TEXT_METHODS if (text := _text(_made_by(value, name))) is not None}
    return Forms(texts, pictures) if texts or pictures else None


def _made_by(value: object, method: str, **given: object) -> object:
    """Return what a method of the object's class returns, without the metadata beside it; None if there is none."""
    try:
        if not hasattr(type(value), method):
            return None
        made = getattr(value, method)(**given)
        return made[0] if type(made) is tuple and len(made) == 2 else made
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it is the model's: it may raise anything, and its text was printed
        return None


def _text(made: object) -> str | None:
    return str.__str__(made) if is_a(made, str) else None


def _picture(made: object) -> bytes | None:
    """Return the bytes of a picture, which may come as base64."""
    if is_a(made, bytes):
        return made if type(made) is bytes else memoryview(made).tobytes()
    if is_a(made, str):
        with contextlib.suppress(ValueError):
            return binascii.a2b_base64(str.__str__(made))
    return None
