"""State of a server: for load balancers whether it can take requests, and for the viewer its runs.

In the viewer a key sees its own runs, and with the right `watch` all keys' runs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Scope

from rlm_broker import RLM, LiveSource, RlmBrokerError, RunStatus, live_app, trace_line
from rlm_broker.serve.bodies import WholeBodies
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.runs import HostedRun, HostedRuns
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.settings import Right
from rlm_broker.watch.board import BOARD

PROBE_TIMEOUT_S: Final = 10.0
"""Seconds that a probe has to start a REPL and run a block."""
PROBE_EVERY_S: Final = 5.0
"""Seconds the outcome of a probe holds, so that many probes do not load the machine."""


class Health:
    """State of the server for load balancers.

    Attributes:
        is_draining: Whether the server is about to end.
    """

    def __init__(self, rlm: RLM) -> None:
        self._rlm = rlm
        self._probing = asyncio.Lock()
        self._probed_at = float("-inf")
        self._problem: str | None = None
        self.is_draining = False

    def routes(self) -> list[Route]:
        """Return the routes `/health` and `/ready`."""
        return [Route("/health", self._health), Route("/ready", self._ready)]

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        why = "the server is about to end" if self.is_draining else await self._probed()
        if why is not None:
            return JSONResponse({"status": "unavailable", "reason": why}, 503)
        return JSONResponse({"status": "ready"})

    async def _probed(self) -> str | None:
        """Return why no REPL can be started, or None."""
        async with self._probing:
            if time.monotonic() - self._probed_at >= PROBE_EVERY_S:
                self._problem = await self._probe()
                self._probed_at = time.monotonic()
            return self._problem

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._rlm.sandbox.repl() as repl:
                block = await repl.aexecute("print(6 * 7)")
        except TimeoutError:
            return f"no REPL could be started within {PROBE_TIMEOUT_S:g} seconds"
        except RlmBrokerError:
            return "no REPL could be started"
        return None if block.stdout == "42\n" else "a REPL gave a wrong answer"


MOST_STOP_BYTES: Final = 4_096
MOST_STOP_VALUES: Final = 16
"""Bytes and JSON values of a request to stop a run."""
PATH = "/viewer"
"""Path of the viewer. The page itself shows no run, so it needs no key; its data does."""


class KeysRuns:
    """The runs that one key may see, as a source of the viewer."""

    def __init__(self, runs: HostedRuns, key: ServerKey) -> None:
        self._runs = runs
        self._key = key

    async def runs(self) -> Sequence[RunStatus]:
        """Return the runs of the key, or of all keys if it may watch them."""
        return [status_of(hosted) for hosted in self._seen("watch")]

    async def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a run, each as a line of a trace, until it ends.

        Raises:
            LookupError: The key sees no such run.
        """
        for found in self._seen("watch", run):
            async for event in found.run.events(after):
                yield trace_line(event)
            return
        raise LookupError(run)

    async def stop(self, run: str, now: bool) -> bool:
        """Stop a run of the key, or of another key if it may stop those; return whether there was one."""
        found = self._seen("stop", run)
        for hosted in found:
            hosted.stop(now=now)
        return bool(found)

    def _seen(self, right: Right, id: str | None = None) -> list[HostedRun]:
        seen = self._runs.all() if right in self._key.rights else self._runs.of(self._key.owner)
        return [hosted for hosted in seen if id in (None, hosted.id)]


def viewer_routes(parts: Parts) -> list[BaseRoute]:
    """Return the routes of the viewer. The server's own address leads a browser there."""

    async def root(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}{PATH}/")

    viewer = viewer_app(lambda scope: KeysRuns(parts.runs, scope[KEY]), parts.settings.stall_s)
    return [Route("/", root), Mount(PATH, viewer)]


def viewer_app(source: LiveSource | Callable[[Scope], LiveSource], stall_s: float) -> ASGIApp:
    """Return the viewer of these runs with bounds for bodies, to be put behind a `Guard`."""
    return WholeBodies(live_app(source), MOST_STOP_BYTES, stall_s, MOST_STOP_VALUES)


def status_of(hosted: HostedRun) -> RunStatus:
    """Return what is reported of a run."""
    ended = hosted.progress.ended
    how = ended.kind if ended is not None else "cancelled"
    state = how if hosted.state == "ended" else hosted.state
    times = hosted.created_at, hosted.ended_at
    return BOARD.run_status(hosted.id, hosted.progress, hosted.task, state, times, hosted.owner.name)
