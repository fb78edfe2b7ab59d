"""MIME types of the forms in which model code can show a value: a closed set, shared by both sides."""

from typing import Literal, get_args

TextType = Literal["text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml"]
PictureType = Literal["image/png", "image/jpeg"]
MimeType = TextType | PictureType
"""MIME type of one form of a display. Forms of a `PictureType` are bytes, all others are text."""
TEXT_TYPES: tuple[TextType, ...] = get_args(TextType)
PICTURE_TYPES: tuple[PictureType, ...] = get_args(PictureType)
