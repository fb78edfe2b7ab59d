"""`/v1/files`, as OpenAI's clients use it.

A form with a file is read as it comes: the file goes on piece by piece, and is never in memory as a whole. The content
of a file is read in pieces, too, while it is sent.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker.serve.bodies import Page, chunks_of, listed, page_of, validated
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.files import UploadedFile
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.parts import Parts

Purpose = Literal["assistants", "user_data", "vision"]
"""Accepted words about a file's use. They have no effect: what OpenAI does with other ones is not served."""
MAX_EXPIRY_S = 2_592_000
"""Longest time until a file is deleted by itself: 30 days, as OpenAI has it."""
FILE: Final = "file"
"""Name of the part holding the file, as OpenAI's clients send it."""
FORM: Final = "multipart/form-data"
MAX_FIELD_BYTES: Final = 1 << 16
"""Bytes of one field."""
MAX_FIELDS: Final = 32
"""Fields of a form."""
MAX_NAME_BYTES: Final = 255
"""Bytes of a file's name in UTF-8. No file system takes a longer one."""


def is_form(request: Request) -> bool:
    """Whether the body of a request is a form with parts."""
    return request.headers.get("content-type", "").lower().startswith(FORM)


async def received(
    request: Request, take: Callable[[bytes], object], most_bytes: int, stall_s: float
) -> tuple[dict[str, str], str | None]:
    """Read a form to its end; return its fields, and the name of its file, or None if it has none.

    Args:
        request: The request.
        take: Called with each piece of the file. Its error ends the reading.
        most_bytes: Bytes of the file. The whole body may have a little more.
        stall_s: Seconds without a byte until the body is given up.

    Raises:
        ApiError: 400: this is no form, it is cut off, or it has several files or too many fields. Also as for
            `chunks_of`.
        ClientDisconnect: The client has left.
    """
    if not is_form(request):
        raise ApiError(400, f"the body is no form: send {FORM}", code="not_a_form")
    parser = _FormParser(request.headers, chunks_of(request, most_bytes + 2 * MAX_FIELD_BYTES, stall_s), take)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the body is no valid form: {error.message[:200]}", code="not_a_form") from None
    if not parser.is_whole:
        raise ApiError(400, "the body is cut off: it ends before its last boundary", code="not_a_form")
    fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    file = form.get(FILE)
    return fields, file_name(file.filename or "") if isinstance(file, UploadFile) else None


class _FormParser(MultiPartParser):
    """Starlette's parser. The file goes to its receiver piece by piece, and not into a temporary file."""

    def __init__(self, headers: Headers, pieces: AsyncGenerator[bytes, None], take: Callable[[bytes], object]) -> None:
        super().__init__(headers, pieces, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
        self.is_whole = False
        self._take = take

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is not None and part.field_name != FILE:
            name = part.field_name[:80]
            raise ApiError(400, f"the form has a file {name!r}: name it {FILE!r}", param=name)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            super().on_part_data(data, start, end)
        else:
            self._take(data[start:end])  # the very object, if it is a piece as a whole

    def on_end(self) -> None:
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
"""Bytes read and sent at a time."""


class Content(StreamingResponse):
    """An answer with the content of a file.

    Args:
        fd: Descriptor of a regular file, closed after the answer.
        size_bytes: Bytes sent from its start.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        headers = {
            "content-length": str(size_bytes),
            "content-disposition": "attachment",  # a browser shows no page made by code or by another client
            "x-content-type-options": "nosniff",
        }
        super().__init__(self._pieces(size_bytes), headers=headers, media_type="application/octet-stream")
        self._fd = fd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, until it or the client ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._fd)

    async def _pieces(self, size_bytes: int) -> AsyncIterator[bytes]:
        """Yield the content. A thread reads each piece, to notice between them if the client has left."""
        done = 0
        while piece := await run_in_threadpool(os.pread, self._fd, min(PIECE_BYTES, size_bytes - done), done):
            done += len(piece)
            yield piece


class FileFields(BaseModel):
    """Fields of an upload, beside the file.

    Attributes:
        purpose: Its use, without effect.
        anchor: From when on `seconds` are counted.
        seconds: Seconds until the file is deleted by itself.
    """

    model_config = ConfigDict(extra="forbid")

    purpose: Purpose = "user_data"
    anchor: Annotated[Literal["created_at"], Field(alias="expires_after[anchor]")] = "created_at"
    seconds: Annotated[int | None, Field(alias="expires_after[seconds]", ge=1, le=MAX_EXPIRY_S)] = None


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
        with self._files.receiving(_user(request)) as upload:
            form, name = await received(request, upload.write, self._settings.file_bytes, self._settings.stall_s)
            if name is None:
                raise ApiError(400, f"the form has no file: send it as {FILE!r}, with a filename", param=FILE)
            fields = validated(form, FileFields)
            return JSONResponse(_shape(upload.keep(name, fields.purpose, fields.seconds)))

    async def list(self, request: Request) -> Response:
        page = page_of(request, FilesPage)
        mine = self._files.of(_user(request))
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
        return self._files.get(_user(request), request.path_params["id"])


def _user(request: Request) -> Owner:
    return key_of(request).require("run", "execute")


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
