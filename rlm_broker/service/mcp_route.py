"""The route `/mcp`: the tools of `rlm-broker mcp` over HTTP, for keys that may ask and run code."""

import contextlib
import importlib.util
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from starlette.routing import Route

from rlm_broker.hosting.owner import Owner
from rlm_broker.service.guard import KEY
from rlm_broker.service.keys import Key
from rlm_broker.service.parts import Parts


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[list[Route]]:
    """Serve the tools within the block, if the extra `mcp` is installed, and yield the routes."""
    if importlib.util.find_spec("mcp") is None:
        yield []
        return
    from rlm_broker.mcp.http import mcp_app  # the SDK takes 0.3 s to import, and is an extra of its own

    app = mcp_app(parts.rlm, parts.runs, parts.repls, _owner, max_body_bytes=parts.settings.body_bytes)
    async with app.running():
        yield [Route("/mcp", app)]  # a `Mount` would redirect `/mcp` to `/mcp/`, which clients do not follow


def _owner(scope: MutableMapping[str, Any]) -> Owner:
    """Return the owner of a request.

    Raises:
        ApiError: 403: the key may not ask, or may not run code.
    """
    key: Key = scope[KEY]
    key.require("run")
    key.require("execute")
    return key.owner
