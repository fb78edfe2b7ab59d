"""`POST /v1/execute`: one block in a REPL of its own, which is ready before the request comes and ends with it."""

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker.sandbox.blocks.block_result import OnOutput
from rlm_broker.service.bodies import parsed
from rlm_broker.service.guard import key_of
from rlm_broker.service.parts import Parts
from rlm_broker.service.sandboxes.blocks import BlockRequest, ReplRequest, answer, executed, files_of, opened


class ExecuteRequest(BlockRequest, ReplRequest):
    """A block, and the REPL that it runs in.

    Attributes:
        files: Ids of uploaded files, which code finds in its current folder by their names.
    """

    files: tuple[str, ...] = ()


def routes(parts: Parts) -> list[Route]:
    """Return the route of one-shot execution."""

    async def execute(request: Request) -> ASGIApp:
        key = key_of(request)
        key.require("execute")
        settings = parts.settings
        asked, _ = await parsed(request, ExecuteRequest, settings.body_bytes, settings.stall_s)
        servers = parts.rlm.sandbox.limits
        asked.require_within(servers)
        limits = asked.own_limits(servers)
        files = files_of(parts, key.owner, asked.files, "files")

        async def work(on_output: OnOutput | None) -> str:
            async with parts.places.place(key.owner), opened(parts, key.owner, asked, files, limits) as repl:
                repl.kills_when_cancelled = True
                return await executed(repl, asked, on_output)

        return answer(asked.stream, work, settings.heartbeat_s)

    return [Route("/v1/execute", execute, methods=["POST"])]
