"""`Service`: an ASGI application that serves an `RLM` and its sandbox to OpenAI's clients."""

import contextlib
import importlib.util
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker import ConfigurationError, ContextRefused, RlmBrokerError, StoredContext, store
from rlm_broker.broker.models.registry import require_priced
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.events.event import Emit, Event
from rlm_broker.rlm import RLM
from rlm_broker.serve import metrics
from rlm_broker.serve.chat import routes as chat_routes
from rlm_broker.serve.errors import ApiError, api_error_of
from rlm_broker.serve.guard import LEFT, REQUEST_ID, Guard, Keys, key_of
from rlm_broker.serve.hosting.files import Files
from rlm_broker.serve.hosting.owner import Places
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.metrics import Metrics, metrics_of
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.request import ServedModels
from rlm_broker.serve.questions.runs import Asking
from rlm_broker.serve.responses.routes import ResponseRoutes
from rlm_broker.serve.sandboxes import blocks, containers, run_code
from rlm_broker.serve.settings import ServeSettings
from rlm_broker.serve.status import Health, viewer_routes
from rlm_broker.serve.uploads import routes as file_routes
from rlm_broker.values.validation import no_such

_log = logging.getLogger("rlm_broker")


class Service:
    """An ASGI application: an `RLM` as a model over HTTP, and its sandbox for code.

    Mount it in an application of your own, or run it by `rlm-broker serve`. It is open while it is entered as an async
    context manager, or during the lifespan of an ASGI server. All its runs and processes have ended when it is left.

    Example:
        ```python
        import contextlib
        from starlette.applications import Starlette
        from starlette.routing import Mount

        service = Service(RLM("openai/gpt-5-mini"))

        @contextlib.asynccontextmanager
        async def lifespan(app):
            async with service:
                print(service.made_key)
                yield

        app = Starlette(routes=[Mount("/rlm", service)], lifespan=lifespan)
        ```

    Args:
        rlm: `RLM` that answers. It is opened with the service, unless it is open already.
        settings: Settings; None takes the defaults.
        on_event: Called with each event of each run.

    Attributes:
        made_key: Text of the key that was made since the settings name none, else None. It has all rights.

    Raises:
        ConfigurationError: A key cannot be used.
    """

    def __init__(self, rlm: RLM, settings: ServeSettings | None = None, *, on_event: Emit | None = None) -> None:
        self._settings = settings or ServeSettings()
        self._rlm = rlm
        self._on_event = on_event
        self.made_key: str | None = None
        if self._settings.keys:
            self._keys = Keys.of(self._settings.keys)
        else:
            self._keys, self.made_key = Keys.made()
        self._open = contextlib.AsyncExitStack()
        self._app: ASGIApp = _not_open
        self._parts: Parts | None = None
        self._health: Health
        self._metrics: Metrics | None = None

    async def __aenter__(self) -> Self:
        """Open the `RLM`, read the contexts, and take requests.

        Raises:
            ConfigurationError: A context cannot be read, `usd_a_day` is set and the price of the model is not known, or
                the `RLM` was opened on another event loop.
            IsolationUnavailable, SandboxFailed, ModelFailed: The `RLM` cannot be opened.
        """
        self._health = Health(self._rlm)
        async with contextlib.AsyncExitStack() as opening:
            await opening.enter_async_context(self._rlm.borrowed())
            if self._rlm.event_loop is not None and not self._rlm.event_loop.is_here:
                raise ConfigurationError("the RLM was opened on another event loop: leave it to the service to open it")
            if any(key.usd_a_day is not None for key in self._settings.keys.values()):
                own = self._rlm.handler.routing
                await require_priced("usd_a_day", filter(None, (own.root, own.sub)))
            contexts: dict[str, StoredContext] = {}
            for name, path in self._settings.contexts.items():
                stored = await in_thread(partial(_stored, name, path), discard=StoredContext.close)
                contexts[name] = opening.enter_context(stored)
            self._parts = parts = await self._parts_of(opening, contexts)
            for name, key in self._settings.keys.items():
                for unknown in sorted(set(key.models or ()) - set(parts.models.known)):
                    raise ConfigurationError(
                        f"serve.keys.{name}.models: {no_such('model', unknown, parts.models.known)}"
                    )
            self._metrics = metrics_of(parts)
            app = Starlette(routes=await self._routes(opening, parts, self._metrics), exception_handlers=HANDLERS)
            hosts = (self._settings.host, *self._settings.hosts)
            self._app = Guard(app, self._keys, hosts, on_response=self._metrics.request)
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all runs and REPLs, and close the `RLM` if the service opened it."""
        self._app = _not_open
        if self._parts is not None:
            await self._parts.runs.drain(0)
        await self._open.aclose()
        self._parts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; open and close the service with the lifespan of a server."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._app(scope, receive, send)

    async def drain(self, drain_s: float | None = None) -> None:
        """Take no new run, let the others end, then stop them with their best answers so far.

        Example:
            ```python
            async with Service(RLM("offline")) as service:
                await service.drain(5)
            ```

        Args:
            drain_s: Seconds until they are stopped; None takes `ServeSettings.drain_s`. A second call may shorten
                the time of the first.
        """
        if self._parts is not None:
            self._health.is_draining = True
            await self._parts.runs.drain(self._settings.drain_s if drain_s is None else drain_s)

    async def _parts_of(self, opening: contextlib.AsyncExitStack, contexts: dict[str, StoredContext]) -> Parts:
        settings = self._settings
        bounds: Any = {name: getattr(settings, name) for name in ("max_runs", "max_queue", "keep_s")}
        runs = HostedRuns(self._rlm, on_event=self._take, **bounds)
        held = HeldRepls(settings.max_containers, settings.max_containers_per_key)
        repls = await opening.enter_async_context(held)
        files = opening.enter_context(Files(settings.file_bytes, settings.files_bytes, settings.max_files_per_key))
        places = Places(settings.max_executions, settings.max_queue)
        models, asking = ServedModels(self._rlm, contexts), Asking(self._rlm, runs, settings)
        return Parts(settings, self._rlm, runs, repls, files, places, models, asking)

    def _take(self, event: Event) -> None:
        """Pass an event on to the metrics, and to the callback of the caller."""
        if self._metrics is not None:
            self._metrics(event)
        if self._on_event is not None:
            self._on_event(event)

    async def _routes(self, opening: contextlib.AsyncExitStack, parts: Parts, counted: Metrics) -> list[BaseRoute]:
        responses = await opening.enter_async_context(ResponseRoutes(parts))
        routes: list[BaseRoute] = [*chat_routes(parts), *self._health.routes(), *metrics.routes(counted)]
        for of in (_model_routes, file_routes, blocks.routes, containers.routes, run_code.routes, viewer_routes):
            routes += of(parts)
        if importlib.util.find_spec("mcp") is not None:
            from rlm_broker.serve.mcp.http import mcp_routes  # the SDK takes 0.3 s to import, and is an extra

            routes += await opening.enter_async_context(mcp_routes(parts))
        return [*routes, *responses.routes()]

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.__aenter__()
        except RlmBrokerError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.__aexit__()
        await send({"type": "lifespan.shutdown.complete"})


def _stored(name: str, path: str, _stop: object) -> StoredContext:
    """Read a context of the server.

    Raises:
        ContextRefused: It cannot be read; the message names the setting.
    """
    try:
        return store(Path(path).expanduser())
    except ContextRefused as error:
        raise ContextRefused(f"serve.contexts.{name}: {error}") from None


def _model_routes(parts: Parts) -> list[Route]:
    opened_at = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": opened_at, "owned_by": "rlm-broker"}

    async def listed(request: Request) -> Response:
        names = parts.models.names(key_of(request).owner)
        return JSONResponse({"object": "list", "data": [entry(name) for name in names]})

    async def one(request: Request) -> Response:
        model = parts.models.named(key_of(request).owner, request.path_params["name"])
        return JSONResponse(entry(model.name))

    return [Route("/v1/models", listed), Route("/v1/models/{name:path}", one)]


async def _answered(_request: Request, error: Exception) -> Response:
    """Answer with the error that a route has raised."""
    if isinstance(error, HTTPException):
        said, code = {
            404: ("there is no such path", "not_found"),
            405: ("this path does not take this method", "method_not_allowed"),
        }.get(error.status_code, (error.detail, "invalid"))
        error = ApiError(error.status_code, said, code=code, headers=error.headers)
    return api_error_of(error).response()


async def _left(_request: Request, _error: Exception) -> Response:
    """End a request whose client has left while it sent the body: there is no reader of an answer."""
    return Response(status_code=LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed (%s)", request.method, request.url.path, request.scope[REQUEST_ID], exc_info=error)
    return api_error_of(error).response()


async def _not_open(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        why = ApiError(503, "the server is starting or has ended", code="not_open", kind="server_error")
        await why.response()(scope, receive, send)


HANDLERS: Any = {
    ApiError: _answered,
    RlmBrokerError: _answered,
    HTTPException: _answered,
    ClientDisconnect: _left,
    Exception: _failed,
}
