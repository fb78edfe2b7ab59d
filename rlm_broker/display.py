"""What model code has shown beside its text: pictures and tables, each in one or more forms."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_worker.wire.mime import MimeType

RENDERED: tuple[MimeType, ...] = ("image/png", "image/jpeg", "text/plain")
"""Forms that a notebook may show by itself: nothing in them is run, and nothing is loaded."""
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_WIDTH, PNG_HEIGHT = slice(16, 20), slice(20, 24)


@dataclass(frozen=True, slots=True, repr=False)
class Display:
    """One thing that model code has shown: a picture, or an object that has a form of its own, such as a table.

    What it holds is the code's own word: nothing but types and sizes was checked. HTML and SVG may hold scripts, and
    addresses to load from: show them in a frame without rights (`<iframe sandbox>`), or not at all.

    Attributes:
        data: MIME type → the thing in this form: bytes for `image/png` and `image/jpeg`; text for `text/plain`,
            `text/html`, `text/markdown`, `text/latex` and `image/svg+xml`.
    """

    data: Mapping[MimeType, str | bytes] = field(hash=False)

    def __repr__(self) -> str:
        return f"Display({'; '.join(f'{mime}{_extent(data)}' for mime, data in self.data.items())})"

    @property
    def sizes(self) -> dict[MimeType, int]:
        """MIME type → bytes of a picture, or characters of a text."""
        return {mime: len(data) for mime, data in self.data.items()}

    def to_dict(self) -> dict[str, str]:
        """All forms as Jupyter and JSON have them: MIME type → text, or base64 of a picture's bytes."""
        return {
            mime: data if isinstance(data, str) else base64.b64encode(data).decode() for mime, data in self.data.items()
        }

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        """What a notebook shows: the picture, or text. HTML and SVG of model code do not go into its page."""
        forms = self.to_dict()
        return {"text/plain": repr(self)} | {mime: forms[mime] for mime in RENDERED if mime in forms}


def picture_in(display: Display) -> str | None:
    """Return a short description of the picture that a display holds; None if it holds none."""
    pictures = (f"{mime}{_pixels(data)}" for mime, data in display.data.items() if mime.startswith("image/"))
    return next(pictures, None)


def _extent(data: str | bytes) -> str:
    unit = "characters" if isinstance(data, str) else "bytes"
    return f"{_pixels(data)}, {len(data):,} {unit}"


def _pixels(data: str | bytes) -> str:
    """Width and height of a PNG picture, as it says."""
    if isinstance(data, str) or not data.startswith(PNG_START) or len(data) < PNG_HEIGHT.stop:
        return ""
    return f", {int.from_bytes(data[PNG_WIDTH])} x {int.from_bytes(data[PNG_HEIGHT])}"
