"""The forms in which model code can show something: a closed set, of which both sides know nothing more."""

from typing import Literal, get_args

TextType = Literal["text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml"]
PictureType = Literal["image/png", "image/jpeg"]
MimeType = TextType | PictureType
"""MIME type of one form of a display. Those of raster pictures are bytes, the others are text."""
TEXT_TYPES: tuple[TextType, ...] = get_args(TextType)
PICTURE_TYPES: tuple[PictureType, ...] = get_args(PictureType)
