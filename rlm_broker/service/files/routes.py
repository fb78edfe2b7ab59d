"""`/v1/files`, as OpenAI's clients use it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker.hosting.files import UploadedFile
from rlm_broker.service.bodies import validated
from rlm_broker.service.contents import Content
from rlm_broker.service.errors import ApiError
from rlm_broker.service.files.multipart import FILE, received
from rlm_broker.service.guard import key_of
from rlm_broker.service.keys import Key
from rlm_broker.service.paging import Page, listed, page_of
from rlm_broker.service.parts import Parts

Purpose = Literal["assistants", "user_data", "vision"]
"""Words about a file's use that are taken. They have no effect: what OpenAI does with other ones is not served."""
MAX_EXPIRY_S = 2_592_000
"""Longest time until a file is deleted by itself: 30 days, as OpenAI has it."""


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


def _user(request: Request) -> Key:
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
