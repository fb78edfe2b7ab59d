"""The route `/mcp`: the tools of `rlm-broker mcp` over HTTP, each for keys with the right that it needs."""

import contextlib
import importlib.util
from collections.abc import AsyncIterator, MutableMapping
from typing import Any, Final

from starlette.routing import Route

from rlm_broker.serve.bodies import WholeBodies
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.owner import NotAllowed, Owner
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.settings import Right

MOST_BODY_BYTES: Final = 8 << 20
"""Bytes of one message. Files are not sent here, and the SDK decodes each message on the loop, more than once."""
MOST_VALUES: Final = 1 << 12
"""JSON values of one message. A call of a tool has a dozen."""


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[list[Route]]:
    """Serve the tools within the block, if the extra `mcp` is installed, and yield the routes."""
    if importlib.util.find_spec("mcp") is None:
        yield []
        return
    from rlm_broker.serve.mcp.http import mcp_app  # the SDK takes 0.3 s to import, and is an extra of its own

    settings = parts.settings
    app = mcp_app(parts.rlm, parts.runs, parts.repls, _owner, require=_require)
    bounded = WholeBodies(app, min(settings.body_bytes, MOST_BODY_BYTES), settings.stall_s, MOST_VALUES)
    async with app.running():
        yield [Route("/mcp", bounded)]  # a `Mount` would redirect `/mcp` to `/mcp/`, which clients do not follow


def _owner(scope: MutableMapping[str, Any]) -> Owner:
    key: ServerKey = scope[KEY]
    return key.owner


def _require(scope: MutableMapping[str, Any], right: Right) -> None:
    """Refuse a call of a tool.

    Raises:
        NotAllowed: The key lacks the right that the tool needs.
    """
    key: ServerKey = scope[KEY]
    try:
        key.require(right)
    except ApiError as error:
        raise NotAllowed(error.message) from None
