"""`/v1/containers/{id}/files`: files in the scratch folder of a container, which is the current folder of its code.

The path "/mnt/data/NAME", as OpenAI has it, stands for the file NAME in that folder. An id is the path itself, encoded,
so that files which code makes have ids as well, and none has to be remembered.
"""

import base64
import os
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker.context.found_files import printable
from rlm_broker.errors import ConfigurationError, FileRefused
from rlm_broker.hosting.files import UploadedFile
from rlm_broker.hosting.repls import HeldRepl
from rlm_broker.sandbox.files import MAX_ENTRIES
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.service.bodies import parsed, validated
from rlm_broker.service.contents import Content
from rlm_broker.service.errors import ApiError, not_found
from rlm_broker.service.files.multipart import FILE, Form, is_form, received
from rlm_broker.service.paging import Page, listed, page_of
from rlm_broker.service.parts import Parts
from rlm_broker.service.sandboxes.blocks import files_of, put
from rlm_broker.service.sandboxes.containers import container_of

ID_PREFIX: Final = "cfile_"
DATA_FOLDER: Final = "/mnt/data/"
MOST_FOLDERS: Final = 256
"""Folders of a container that a list goes into. Code can make thousands, and each is a question to its sandbox."""


class FileById(BaseModel):
    """An uploaded file that is put into a container."""

    model_config = ConfigDict(extra="forbid")

    file_id: str


class _File:
    """A file in a container.

    Attributes:
        path: Its path below the scratch folder; bytes that are not UTF-8 are lone surrogates.
        size_bytes: Its bytes.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes


def routes(parts: Parts) -> list[Route]:
    """Return the routes of containers' files."""
    served = _ContainerFiles(parts)
    all_of_them = "/v1/containers/{id}/files"
    one = f"{all_of_them}/{{file}}"
    return [
        Route(all_of_them, served.created, methods=["POST"]),
        Route(all_of_them, served.list, methods=["GET"]),
        Route(one, served.one, methods=["GET"]),
        Route(one, served.deleted, methods=["DELETE"]),
        Route(f"{one}/content", served.content, methods=["GET"]),
    ]


class _ContainerFiles:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def created(self, request: Request) -> Response:
        held, settings = container_of(self._parts, request), self._parts.settings
        if not is_form(request):
            asked, _ = await parsed(request, FileById, settings.body_bytes, settings.stall_s)
            return await self._put(held, files_of(self._parts, held.owner, [asked.file_id], "file_id")[0])
        with self._parts.files.receiving(held.owner) as upload:
            form = await received(request, upload.write, settings.file_bytes, settings.stall_s)
            if form.filename is None:
                return await self._put(held, self._by_id(held, form))
            if form.fields:
                name = next(iter(form.fields))
                raise ApiError(400, f"the form has a field {name[:80]!r} beside its file", param=name[:80])
            async with self._parts.repls.used(held.owner, held.id):
                await held.repl.files.awrite(form.filename, Path(f"/proc/self/fd/{upload.fileno()}"))
            return self._made(held, _File(form.filename, upload.size_bytes))

    async def list(self, request: Request) -> Response:
        held, page = container_of(self._parts, request), page_of(request, Page)
        async with self._parts.repls.used(held.owner, held.id):
            files = await _all_files(held.repl)
        held.given.intersection_update(file.path for file in files)
        return JSONResponse(listed(files, page, lambda file: self._shape(held, file)))

    async def one(self, request: Request) -> Response:
        held = container_of(self._parts, request)
        fd, file = await self._opened(held, request)
        os.close(fd)
        return JSONResponse(self._shape(held, file))

    async def content(self, request: Request) -> ASGIApp:
        fd, file = await self._opened(container_of(self._parts, request), request)
        return Content(fd, file.size_bytes)

    async def deleted(self, request: Request) -> Response:
        held, id = container_of(self._parts, request), request.path_params["file"]
        path = _path_of(id)
        async with self._parts.repls.used(held.owner, held.id):
            try:
                await held.repl.files.aremove(path)
            except (ConfigurationError, FileRefused):
                raise not_found("file", id[:200], "file_id") from None
        held.given.discard(path)
        return JSONResponse({"id": id, "object": "container.file.deleted", "deleted": True})

    async def _put(self, held: HeldRepl, file: UploadedFile) -> Response:
        async with self._parts.repls.used(held.owner, held.id):
            await put(held.repl, file)
        return self._made(held, _File(file.name, file.size_bytes))

    def _by_id(self, held: HeldRepl, form: Form) -> UploadedFile:
        if not form.fields:
            raise ApiError(400, f"the form has no file: send it as {FILE!r}, with a filename, or file_id", param=FILE)
        asked = validated(form.fields, FileById)
        return files_of(self._parts, held.owner, [asked.file_id], "file_id")[0]

    def _made(self, held: HeldRepl, file: _File) -> Response:
        held.given.add(file.path)
        return JSONResponse(self._shape(held, file))

    async def _opened(self, held: HeldRepl, request: Request) -> tuple[int, _File]:
        """Return a descriptor of a file, which the caller closes, and the file."""
        id = request.path_params["file"]
        path = _path_of(id)
        async with self._parts.repls.used(held.owner, held.id):
            try:
                opened = await held.repl.files.aopen(path)
            except (ConfigurationError, FileRefused):
                raise not_found("file", id[:200], "file_id") from None
        with opened:
            return os.dup(opened.fileno()), _File(path, os.fstat(opened.fileno()).st_size)

    def _shape(self, held: HeldRepl, file: _File) -> dict[str, Any]:
        return {
            "id": _id_of(file.path),
            "object": "container.file",
            "bytes": file.size_bytes,
            "container_id": held.id,
            "created_at": int(held.created_at),
            "path": DATA_FOLDER + printable(file.path),
            "source": "user" if file.path in held.given else "assistant",
        }


async def _all_files(repl: SandboxedRepl) -> list[_File]:
    """Return all files in the scratch folder and in its folders.

    Raises:
        ApiError: 400: there are too many.
    """
    files: list[_File] = []
    folders, seen = [""], 0
    for folder in folders:
        seen += 1
        if seen > MOST_FOLDERS or len(files) > MAX_ENTRIES:
            sentence = f"there are more than {MAX_ENTRIES:,} files or {MOST_FOLDERS} folders: list them by code"
            raise ApiError(400, sentence, code="too_large")
        try:
            entries = await repl.files.alist(folder or ".")
        except FileRefused:
            if not folder:
                raise
            continue  # code has removed it meanwhile
        files += [_File(folder + entry.name, entry.size_bytes) for entry in entries if entry.kind == "file"]
        folders += [f"{folder}{entry.name}/" for entry in entries if entry.kind == "folder"]
    return files


def _id_of(path: str) -> str:
    return ID_PREFIX + base64.urlsafe_b64encode(os.fsencode(path)).decode().rstrip("=")


def _path_of(id: str) -> str:
    """Return the path in an id.

    Raises:
        ApiError: 404: this is no id.
    """
    encoded = id.removeprefix(ID_PREFIX)
    try:
        path = os.fsdecode(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except ValueError:
        path = ""
    if not path or _id_of(path) != id:
        raise not_found("file", id[:200], "file_id")
    return path
