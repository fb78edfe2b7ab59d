"""`/v1/files`, as OpenAI's clients use it.

A form with a file is read as it comes: the file goes on piece by piece, and is never in memory as a whole. The content
of a file is read in pieces, too, while it is sent.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.serve.bodies import chunks_of, validated
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import ServerKey, key_of
from rlm_broker.serve.hosting.files import UploadedFile
from rlm_broker.serve.paging import Page, listed, page_of
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.replies import while_connected

Purpose = Literal["assistants", "user_data", "vision"]
"""Words about a file's use that are taken. They have no effect: what OpenAI does with other ones is not served."""
MAX_EXPIRY_S = 2_592_000
"""Longest time until a file is deleted by itself: 30 days, as OpenAI has it."""


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


PIECE_BYTES: Final = 1 << 18
"""Bytes that are read and sent at a time."""


class Content:
    """An answer that is the content of a file.

    Args:
        fd: Descriptor of a regular file, which is closed when the answer has ended.
        size_bytes: Bytes from its start that are sent.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the content, until it or the client ends."""
        try:
            await while_connected(receive, lambda: self._sent(send))
        finally:
            os.close(self._fd)

    async def _sent(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._size_bytes).encode()),
            (b"content-disposition", b"attachment"),  # a browser shows no page that code or another client has made
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        done = 0
        while piece := await self._read(done):
            done += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, done: int) -> bytes:
        """Return the next piece.

        A thread reads it, so that each piece takes a turn of the event loop, which may show that the client has left:
        from then on `send` returns at once. The read ends before the descriptor is closed.
        """
        size = min(PIECE_BYTES, self._size_bytes - done)
        return await to_its_end(lambda: asyncio.to_thread(os.pread, self._fd, size, done))


class Expiry(BaseModel):
    """When a file is deleted by itself."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=1, le=MAX_EXPIRY_S)]


class FileFields(BaseModel):
    """Fields of an upload, beside the file."""

    model_config = ConfigDict(extra="forbid")

    purpose: Purpose = "user_data"
    expires_after: Expiry | None = None


class FilesPage(Page):
    """Query of the list of files."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


def routes(parts: Parts) -> list[Route]:
    """Return the routes of files."""
    served = _Files(parts)
    one = "/v1/files/{id}"
    return [
        Route("/v1/files", served.created, methods=["POST"]),
        Route("/v1/files", served.list, methods=["GET"]),
        Route(one, served.one, methods=["GET"]),
        Route(one, served.deleted, methods=["DELETE"]),
        Route(f"{one}/content", served.content, methods=["GET"]),
    ]


class _Files:
    def __init__(self, parts: Parts) -> None:
        self._files = parts.files
        self._settings = parts.settings

    async def created(self, request: Request) -> Response:
        with self._files.receiving(_user(request).owner) as upload:
            form = await received(request, upload.write, self._settings.file_bytes, self._settings.stall_s)
            if form.filename is None:
                raise ApiError(400, f"the form has no file: send it as {FILE!r}, with a filename", param=FILE)
            fields = validated(form.nested(), FileFields)
            expires_s = None if fields.expires_after is None else float(fields.expires_after.seconds)
            return JSONResponse(_shape(upload.keep(form.filename, fields.purpose, expires_s)))

    async def list(self, request: Request) -> Response:
        page = page_of(request, FilesPage)
        mine = self._files.of(_user(request).owner)
        return JSONResponse(listed([each for each in mine if page.purpose in (None, each.purpose)], page, _shape))

    async def one(self, request: Request) -> Response:
        return JSONResponse(_shape(self._asked(request)))

    async def content(self, request: Request) -> ASGIApp:
        file = self._asked(request)
        return Content(file.opened(), file.size_bytes)

    async def deleted(self, request: Request) -> Response:
        file = self._asked(request)
        self._files.delete(file.owner, file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    def _asked(self, request: Request) -> UploadedFile:
        return self._files.get(_user(request).owner, request.path_params["id"])


def _user(request: Request) -> ServerKey:
    key = key_of(request)
    key.require_one_of("run", "execute")
    return key


def _shape(file: UploadedFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
