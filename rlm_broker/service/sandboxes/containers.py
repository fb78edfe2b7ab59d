"""`/v1/containers`, as OpenAI's clients use them, with two routes more: `/execute` and `/interrupt`.

A container is a live REPL: its variables and files last from one block to the next. It ends when it is deleted, when it
was idle too long, or when its key makes more of them than it may have and it is the least recently used.
"""

import contextlib
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker.hosting.owner import Owner, UnknownHandle
from rlm_broker.hosting.repls import HeldRepl
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.blocks.output import OnOutput
from rlm_broker.service.bodies import parsed
from rlm_broker.service.errors import ApiError
from rlm_broker.service.guard import key_of
from rlm_broker.service.paging import Page, listed, page_of
from rlm_broker.service.parts import Parts
from rlm_broker.service.replying import SlowJson
from rlm_broker.service.sandboxes.blocks import (
    BlockRequest,
    ReplRequest,
    answer,
    executed,
    files_of,
    opened,
    tightened,
)
from rlm_broker.values.validation import quoted

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
        expires_after: Idle time after which it ends. The server's `container_idle_s` is the most.
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
    """Return the routes of containers, without those of their files."""
    served = _Containers(parts)
    one = "/v1/containers/{id}"
    return [
        Route("/v1/containers", served.created, methods=["POST"]),
        Route("/v1/containers", served.list, methods=["GET"]),
        Route(one, served.one, methods=["GET"]),
        Route(one, served.deleted, methods=["DELETE"]),
        Route(f"{one}/execute", served.execute, methods=["POST"]),
        Route(f"{one}/interrupt", served.interrupt, methods=["POST"]),
    ]


class _Containers:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked: WeakKeyDictionary[HeldRepl, ContainerRequest] = WeakKeyDictionary()

    async def created(self, request: Request) -> ASGIApp:
        owner, settings = executing_owner(request), self._parts.settings
        asked, _ = await parsed(request, ContainerRequest, settings.body_bytes, settings.stall_s)
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
        mine = self._parts.repls.of(executing_owner(request))
        return JSONResponse(listed([each for each in mine if page.name in (None, each.name)], page, self._shape))

    async def one(self, request: Request) -> Response:
        return JSONResponse(self._shape(self._named(request)))

    async def deleted(self, request: Request) -> Response:
        held = self._named(request)
        await self._parts.repls.close(held.owner, held.id)
        return JSONResponse({"id": held.id, "object": "container.deleted", "deleted": True})

    async def interrupt(self, request: Request) -> Response:
        held = self._named(request)
        await held.repl.ainterrupt()
        return JSONResponse(self._shape(held))

    async def execute(self, request: Request) -> ASGIApp:
        held, settings = self._named(request), self._parts.settings
        asked, _ = await parsed(request, BlockRequest, settings.body_bytes, settings.stall_s)
        asked.require_within(self._parts.rlm.sandbox.limits)

        async def work(on_output: OnOutput | None) -> str:
            async with self._parts.repls.used(held.owner, held.id):
                held.repl.renew()  # a container lives on, however often its code has it killed
                return await executed(held.repl, asked, on_output)

        return answer(asked.stream, work, settings.heartbeat_s)

    def _named(self, request: Request) -> HeldRepl:
        return container_of(self._parts, request)

    async def _made(self, owner: Owner, asked: ContainerRequest, limits: ReplLimits | None, idle_s: float) -> HeldRepl:
        parts = self._parts
        files = files_of(parts, owner, asked.file_ids, "file_ids")
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


def executing_owner(request: Request) -> Owner:
    """Return the owner of a request, whose key may run code.

    Raises:
        ApiError: 403.
    """
    key = key_of(request)
    key.require("execute")
    return key.owner


def container_of(parts: Parts, request: Request) -> HeldRepl:
    """Return the container that the path of a request names.

    Raises:
        ApiError: 403.
        UnknownHandle: The key has no such container.
    """
    owner, id = executing_owner(request), request.path_params["id"]
    try:
        return parts.repls.get(owner, id)
    except UnknownHandle:
        said = f"there is no container {quoted(id)}: it was deleted, was idle too long, or never existed"
        raise UnknownHandle(said) from None
