"""`/v1/containers`, as OpenAI's clients use them, with two routes more: `/execute` and `/interrupt`; and their files.

A container is a live REPL: its variables and files last from one block to the next. It ends when it is deleted, when it
was idle too long, or when its key makes more of them than it may have and it is the least recently used.

Files of a container are those in its scratch folder, the current folder of its code. The path "/mnt/data/NAME", as
OpenAI has it, stands for the file NAME in that folder. An id is the path itself, encoded: so files made by code have
ids as well, and the server remembers none.
"""

import base64
import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker import ConfigurationError, FileRefused, OnOutput, ReplLimits, SandboxedRepl
from rlm_broker.serve.bodies import Page, listed, page_of, validated
from rlm_broker.serve.errors import ApiError, not_found
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.files import UploadedFile
from rlm_broker.serve.hosting.owner import Owner, UnknownHandle
from rlm_broker.serve.hosting.repls import HeldRepl
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.replies import SlowJson
from rlm_broker.serve.sandboxes.blocks import (
    BlockRequest,
    ReplRequest,
    answer,
    executed,
    opened,
    put,
    tightened,
)
from rlm_broker.serve.uploads import FILE, Content, is_form, received

MemoryLimit = Literal["1g", "4g", "16g", "64g"]
"""Memory of a container, in OpenAI's words."""


class Idle(BaseModel):
    """When a container ends by itself."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["last_active_at"]
    minutes: Annotated[int, Field(ge=1)]


class Network(BaseModel):
    """The network of a container: there is none."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["disabled"]


class ContainerRequest(ReplRequest):
    """A container to make.

    Attributes:
        name: Its name.
        expires_after: Idle time until it ends. The server's `container_idle_s` is the most.
        file_ids: Uploaded files, which code finds in its current folder by their names.
        memory_limit: Its memory. The server's `memory_bytes` is the most.
        network_policy: Only "disabled" is taken.
    """

    name: Annotated[str, Field(max_length=256)]
    expires_after: Idle | None = None
    file_ids: tuple[str, ...] = ()
    memory_limit: MemoryLimit | None = None
    network_policy: Network | None = None

    def own_limits(self, servers: ReplLimits) -> ReplLimits | None:
        """Return the limits of the REPL, as `ReplRequest.own_limits` does."""
        if self.memory_limit is None:
            return super().own_limits(servers)
        if "memory_bytes" in self.limits:
            raise ApiError(400, "give either memory_limit or the limit memory_bytes", param="memory_limit")
        wanted = int(self.memory_limit.removesuffix("g")) << 30
        if wanted > servers.memory_bytes:
            most = f"{servers.memory_bytes:,} bytes of this server"
            raise ApiError(400, f"memory_limit = {self.memory_limit} is above the {most}", param="memory_limit")
        return tightened(servers, {**self.limits, "memory_bytes": wanted})


class ContainersPage(Page):
    """Query of the list of containers."""

    name: str | None = None


def routes(parts: Parts) -> list[Route]:
    """Return the routes of containers and of their files."""
    containers, files = _Containers(parts), _ContainerFiles(parts)
    one = "/v1/containers/{id}"
    all_files = f"{one}/files"
    one_file = f"{all_files}/{{file}}"
    return [
        Route("/v1/containers", containers.created, methods=["POST"]),
        Route("/v1/containers", containers.list, methods=["GET"]),
        Route(one, containers.one, methods=["GET"]),
        Route(one, containers.deleted, methods=["DELETE"]),
        Route(f"{one}/execute", containers.execute, methods=["POST"]),
        Route(f"{one}/interrupt", containers.interrupt, methods=["POST"]),
        Route(all_files, files.created, methods=["POST"]),
        Route(all_files, files.list, methods=["GET"]),
        Route(one_file, files.one, methods=["GET"]),
        Route(one_file, files.deleted, methods=["DELETE"]),
        Route(f"{one_file}/content", files.content, methods=["GET"]),
    ]


class _Containers:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked: WeakKeyDictionary[HeldRepl, ContainerRequest] = WeakKeyDictionary()

    async def created(self, request: Request) -> ASGIApp:
        owner, settings = key_of(request).require("execute"), self._parts.settings
        asked, _ = await self._parts.parsed(request, ContainerRequest)
        idle_s = settings.container_idle_s
        if asked.expires_after is not None:
            if asked.expires_after.minutes * 60 > idle_s:
                sentence = f"{asked.expires_after.minutes} minutes are above the {idle_s / 60:g} of this server"
                raise ApiError(400, sentence, param="expires_after.minutes")
            idle_s = asked.expires_after.minutes * 60.0
        limits = asked.own_limits(self._parts.rlm.sandbox.limits)

        async def work() -> tuple[int, dict[str, str], Any]:
            return 200, {}, self._shape(await self._made(owner, asked, limits, idle_s))

        return SlowJson(work, settings.heartbeat_s)

    async def list(self, request: Request) -> Response:
        page = page_of(request, ContainersPage)
        mine = self._parts.repls.of(key_of(request).require("execute"))
        return JSONResponse(listed([each for each in mine if page.name in (None, each.name)], page, self._shape))

    async def one(self, request: Request) -> Response:
        return JSONResponse(self._shape(_container(self._parts, request)))

    async def deleted(self, request: Request) -> Response:
        held = _container(self._parts, request)
        await self._parts.repls.close(held.owner, held.id)
        return JSONResponse({"id": held.id, "object": "container.deleted", "deleted": True})

    async def interrupt(self, request: Request) -> Response:
        held = _container(self._parts, request)
        await held.repl.ainterrupt()
        return JSONResponse(self._shape(held))

    async def execute(self, request: Request) -> ASGIApp:
        held, settings = _container(self._parts, request), self._parts.settings
        asked, _ = await self._parts.parsed(request, BlockRequest)
        asked.require_within(self._parts.rlm.sandbox.limits)

        async def work(on_output: OnOutput | None) -> str:
            async with self._parts.repls.used(held.owner, held.id):
                held.repl.renew()  # a container lives on, however often its code has it killed
                return await executed(held.repl, asked, on_output)

        return answer(asked.stream, work, settings.heartbeat_s)

    async def _made(self, owner: Owner, asked: ContainerRequest, limits: ReplLimits | None, idle_s: float) -> HeldRepl:
        parts = self._parts
        files = parts.files_of(owner, asked.file_ids, "file_ids")
        async with parts.repls.room(owner), contextlib.AsyncExitStack() as opening:
            repl = await opening.enter_async_context(opened(parts, owner, asked, files, limits))
            close = opening.pop_all().aclose
            held = parts.repls.hold(owner, repl, close, prefix="cntr_", name=asked.name, idle_s=idle_s)
        held.given.update(file.name for file in files)
        self._asked[held] = asked
        return held

    def _shape(self, held: HeldRepl) -> dict[str, Any]:
        asked = self._asked.get(held)
        return {
            "id": held.id,
            "object": "container",
            "created_at": int(held.created_at),
            "status": "running",
            "expires_after": {"anchor": "last_active_at", "minutes": max(1, round(held.idle_s / 60))},
            "last_active_at": int(held.used_at),
            "memory_limit": None if asked is None else asked.memory_limit,
            "network_policy": {"type": "disabled"},
            "name": held.name,
            "run": held.run,
        }


def _container(parts: Parts, request: Request) -> HeldRepl:
    """Return the container in the path of a request.

    Raises:
        ApiError: 403.
        UnknownHandle: The key has no such container.
    """
    owner, id = key_of(request).require("execute"), request.path_params["id"]
    try:
        return parts.repls.get(owner, id)
    except UnknownHandle:
        said = f"there is no container {id[:100]!r}: it was deleted, was idle too long, or never existed"
        raise UnknownHandle(said) from None


ID_PREFIX: Final = "cfile_"
DATA_FOLDER: Final = "/mnt/data/"
MOST_FILES: Final = 10_000
MOST_FOLDERS: Final = 256
"""Files of a container that are listed, and folders that a list goes into. Code can make thousands, and each folder is
a question to its sandbox."""


class FileById(BaseModel):
    """An uploaded file put into a container."""

    model_config = ConfigDict(extra="forbid")

    file_id: str


class _File(NamedTuple):
    path: str
    """Path below the scratch folder; bytes that are not UTF-8 are lone surrogates."""
    size_bytes: int


class _ContainerFiles:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def created(self, request: Request) -> Response:
        held, settings = _container(self._parts, request), self._parts.settings
        if not is_form(request):
            asked, _ = await self._parts.parsed(request, FileById)
            return await self._put(held, self._parts.file(held.owner, asked.file_id, "file_id"))
        with self._parts.files.receiving(held.owner) as upload:
            form, name = await received(request, upload.write, settings.file_bytes, settings.stall_s)
            if name is None and form:
                asked = validated(form, FileById)
                return await self._put(held, self._parts.file(held.owner, asked.file_id, "file_id"))
            if name is None:
                said = f"the form has no file: send it as {FILE!r}, with a filename, or file_id"
                raise ApiError(400, said, param=FILE)
            for field in form:
                raise ApiError(400, f"the form has a field {field[:80]!r} beside its file", param=field[:80])
            async with self._parts.repls.used(held.owner, held.id):
                await held.repl.files.awrite(name, Path(f"/proc/self/fd/{upload.fileno()}"))
            return self._made(held, _File(name, upload.size_bytes))

    async def list(self, request: Request) -> Response:
        held, page = _container(self._parts, request), page_of(request, Page)
        async with self._parts.repls.used(held.owner, held.id):
            files = await _all_files(held.repl)
        held.given.intersection_update(file.path for file in files)
        return JSONResponse(listed(files, page, lambda file: self._shape(held, file)))

    async def one(self, request: Request) -> Response:
        held = _container(self._parts, request)
        fd, file = await self._opened(held, request)
        os.close(fd)
        return JSONResponse(self._shape(held, file))

    async def content(self, request: Request) -> ASGIApp:
        fd, file = await self._opened(_container(self._parts, request), request)
        return Content(fd, file.size_bytes)

    async def deleted(self, request: Request) -> Response:
        held, id = _container(self._parts, request), request.path_params["file"]
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

    def _made(self, held: HeldRepl, file: _File) -> Response:
        held.given.add(file.path)
        return JSONResponse(self._shape(held, file))

    async def _opened(self, held: HeldRepl, request: Request) -> tuple[int, _File]:
        """Return a descriptor of a file, for the caller to close, and the file."""
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
            "path": DATA_FOLDER + _shown(file.path),
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
        if seen > MOST_FOLDERS or len(files) > MOST_FILES:
            sentence = f"there are more than {MOST_FILES:,} files or {MOST_FOLDERS} folders: list them by code"
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


def _shown(path: str) -> str:
    """Return a path without bytes that are not UTF-8 and without characters that steer a terminal."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


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
