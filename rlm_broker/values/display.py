"""Displays: pictures and tables of model code beside its text, and what shows itself in a notebook."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlm_broker.values.text import printable
from sandbox_worker.wire.mime import MimeType

RENDERED: tuple[MimeType, ...] = ("image/png", "image/jpeg", "text/plain")
"""Forms for a notebook. They hold no scripts, and no addresses for a browser to load from."""
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_WIDTH, PNG_HEIGHT = slice(16, 20), slice(20, 24)
"""Places of width and height, as big-endian numbers: the first chunk of a PNG is always IHDR, and begins with them."""


@dataclass(frozen=True, slots=True, repr=False)
class Display:
    """A picture that model code has shown, or another object with a form of its own, for example a table.

    Its content is not trusted: only types and sizes were checked. HTML and SVG may hold scripts, and addresses from
    which a browser loads. Show them in a frame without rights (`<iframe sandbox>`), or do not show them.

    Example:
        ```python
        block = repl.execute("import pandas; display(pandas.DataFrame({'a': [1]}))")
        block.displays[0].data["text/html"]
        ```

    Attributes:
        data: MIME type → the display in this form: bytes for `image/png` and `image/jpeg`; text for `text/plain`,
            `text/html`, `text/markdown`, `text/latex` and `image/svg+xml`.
    """

    data: Mapping[MimeType, str | bytes] = field(hash=False)

    def __repr__(self) -> str:
        return f"Display({'; '.join(f'{mime}{_extent(data)}' for mime, data in self.data.items())})"

    @property
    def sizes(self) -> dict[MimeType, int]:
        """Sizes by MIME type: bytes of a picture, characters of a text."""
        return {mime: len(data) for mime, data in self.data.items()}

    def to_dict(self) -> dict[str, str]:
        """Return all forms as Jupyter and JSON have them: MIME type → text, or base64 of a picture's bytes.

        Example:
            ```python
            block = repl.execute("class Bold:\\n    def _repr_html_(self): return '<b>1</b>'\\nBold()")
            block.displays[0].to_dict()["text/html"]  # '<b>1</b>'
            ```
        """
        return {
            mime: data if isinstance(data, str) else base64.b64encode(data).decode() for mime, data in self.data.items()
        }

    _jsonable_ = to_dict

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        """Return what a notebook shows: the picture, or text. HTML and SVG of model code stay out of its page.

        The text is escaped, since IPython in a terminal prints it as it is.
        """
        forms = self.to_dict()
        shown: dict[str, str] = {mime: forms[mime] for mime in RENDERED if mime in forms}
        return shown | {"text/plain": printable(shown.get("text/plain", repr(self)), keep="\n\t")}


class Presentable:
    """A base of what shows itself in a notebook: as HTML, as Markdown, and as its `repr`."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        from rlm_broker.values import pages  # 10 ms, of use in a notebook alone

        return pages.of(self)


def picture_in(display: Display) -> str | None:
    """Return a short description of the picture that a display holds; None if it holds none."""
    pictures = (f"{mime}{_pixels(data)}" for mime, data in display.data.items() if mime.startswith("image/"))
    return next(pictures, None)


def _extent(data: str | bytes) -> str:
    unit = "characters" if isinstance(data, str) else "bytes"
    return f"{_pixels(data)}, {len(data):,} {unit}"


def _pixels(data: str | bytes) -> str:
    """Return width and height as a PNG picture gives them; empty for anything else."""
    if isinstance(data, str) or not data.startswith(PNG_START) or len(data) < PNG_HEIGHT.stop:
        return ""
    return f", {int.from_bytes(data[PNG_WIDTH])} x {int.from_bytes(data[PNG_HEIGHT])}"
