"""A form with one file in it, read as it comes: the file goes on piece by piece, and is never in memory as a whole."""

from collections.abc import Callable
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from rlm_broker.service.bodies import chunks_of
from rlm_broker.service.errors import ApiError

FILE: Final = "file"
"""Name of the part that holds the file, as OpenAI's clients send it."""
FORM: Final = "multipart/form-data"
MAX_FIELDS_BYTES: Final = 1 << 16
"""Bytes of all headers and values of fields together."""
MAX_FIELDS: Final = 32
"""Fields of a form."""
MAX_NAME_BYTES: Final = 255
"""Bytes of a file's name in UTF-8. No file system takes a longer one."""


class Form:
    """Fields of a form, and the name of its file.

    Attributes:
        fields: Its fields, text by name.
        filename: Name of its file; None if it has none.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    def nested(self) -> dict[str, Any]:
        """Return the fields with those such as "expires_after[seconds]" as a dict of their own."""
        made: dict[str, Any] = {}
        for name, value in self.fields.items():
            outer, bracket, inner = name.partition("[")
            if bracket and inner.endswith("]"):
                within = made.setdefault(outer, {})
                if isinstance(within, dict):
                    within[inner[:-1]] = value
                    continue
            made[name] = value
        return made


def is_form(request: Request) -> bool:
    """Whether the body of a request is a form with parts."""
    return request.headers.get("content-type", "").lower().startswith(FORM)


async def received(request: Request, take: Callable[[bytes], None], most_bytes: int, stall_s: float) -> Form:
    """Read a form to its end.

    Args:
        request: The request.
        take: Called with each piece of the file. An error that it raises ends the reading.
        most_bytes: Bytes of the file. The whole body may have a little more.
        stall_s: Seconds without a byte after which the body is given up.

    Raises:
        ApiError: 400: this is no form, it is cut off, or it has several files or too many fields. Also as for
            `chunks_of`.
        ClientDisconnect: The client has left.
    """
    boundary = parse_options_header(request.headers.get("content-type"))[1].get(b"boundary")
    if not is_form(request) or not boundary:
        raise ApiError(400, f"the body is no form: send {FORM}", code="not_a_form")
    reading = _Reading(take)
    try:
        parser = MultipartParser(boundary, reading.callbacks())  # type: ignore[arg-type]
        async for piece in chunks_of(request, most_bytes + 2 * MAX_FIELDS_BYTES, stall_s):
            parser.write(piece)
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the body is no valid form: {str(error)[:200]}", code="not_a_form") from None
    if not reading.is_whole:
        raise ApiError(400, "the body is cut off: it ends before its last boundary", code="not_a_form")
    return reading.form


class _Reading:
    """Functions that the parser calls with each piece of the form."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.form = Form()
        self.is_whole = False
        self._take = take
        self._left_bytes = MAX_FIELDS_BYTES
        self._parts = 0
        self._header = self._value = self._disposition = self._text = b""
        self._name = ""
        self._is_file = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._form_end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise ApiError(400, f"the form has more than {MAX_FIELDS} fields", code="too_large")
        self._disposition = self._text = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._spend(end - start)
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._spend(end - start)
        self._value += data[start:end]

    def _spend(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise ApiError(400, f"the fields of the form have more than {MAX_FIELDS_BYTES:,} bytes", code="too_large")

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        options = parse_options_header(self._disposition)[1]
        if b"name" not in options:
            raise ApiError(400, "a part of the form has no name", code="not_a_form")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if not self._is_file:
            return
        if self._name != FILE:
            raise ApiError(400, f"the form has a file {self._name[:80]!r}: name it {FILE!r}", param=self._name[:80])
        if self.form.filename is not None:
            raise ApiError(400, "the form has several files: send each by a request of its own", param=FILE)
        self.form.filename = file_name(options[b"filename"].decode("utf-8", "replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._take(data[start:end])  # the very object, if it is a piece as a whole
            return
        self._spend(end - start)
        self._text += data[start:end]

    def _end(self) -> None:
        if self._is_file:
            return
        if self._name in self.form.fields:
            raise ApiError(400, f"the form has the field {self._name[:80]!r} twice", param=self._name[:80])
        try:
            self.form.fields[self._name] = self._text.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"the field {self._name[:80]!r} is not UTF-8", param=self._name[:80]) from None

    def _form_end(self) -> None:
        self.is_whole = True


def file_name(given: str) -> str:
    """Return the name of a file, without the folders before it, and with "_" for what cannot be shown.

    Raises:
        ApiError: 400: it is too long.
    """
    last = given.replace("\\", "/").rpartition("/")[2]
    name = "".join(each if each.isprintable() else "_" for each in last)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ApiError(400, f"the name of the file has more than {MAX_NAME_BYTES} bytes", code="too_large", param=FILE)
    return FILE if name in ("", ".", "..") else name
