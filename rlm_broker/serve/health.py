"""Whether the server lives, and whether it can take requests."""

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlm_broker.errors import RlmBrokerError
from rlm_broker.sandbox.sandbox import Sandbox

PROBE_TIMEOUT_S: Final = 10.0
"""Seconds that a probe has to start a REPL and run a block."""
PROBE_EVERY_S: Final = 5.0
"""Seconds for which the outcome of a probe holds, so that many probes do not load the machine."""


class Health:
    """State of the server for load balancers.

    Args:
        sandbox: Sandbox in which a probe starts a REPL.

    Attributes:
        is_draining: Whether the server is about to end.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
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
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._sandbox.repl() as repl:
                block = await repl.aexecute("print(6 * 7)")
        except TimeoutError:
            return f"no REPL could be started within {PROBE_TIMEOUT_S:g} seconds"
        except RlmBrokerError:
            return "no REPL could be started"
        return None if block.stdout == "42\n" else "a REPL gave a wrong answer"
