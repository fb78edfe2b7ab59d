"""`/v1/responses`: runs as responses."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, NonNegativeInt
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker.serve.bodies import fingerprint_of, idempotency_key, parsed, validated
from rlm_broker.serve.errors import api_error_of
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.pages import Page, listed, page_of
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.runs import Following
from rlm_broker.serve.replies import EventStream, SlowJson
from rlm_broker.serve.responses.answers import Answering
from rlm_broker.serve.responses.request import ResponseRequest
from rlm_broker.serve.responses.store import Made, Responses

PATH: Final = "/v1/responses"
RUN_HEADER: Final = "x-rlm-run"
"""Header of an answer with the id of the run."""


class _Retrieving(BaseModel):
    """Query of a request for a response. `include` and `include_obfuscation` are accepted without effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    stream: bool = False
    starting_after: NonNegativeInt | None = None


class _Listing(Page):
    """Query of a request for input items. `include` is accepted without effect."""

    model_config = ConfigDict(extra="ignore")


class ResponseRoutes:
    """Routes of responses. Use it as an async context manager: all responses have ended when it is left.

    Args:
        parts: Parts of the server.
    """

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._responses = Responses(parts.settings.keep_s)
        self._answering = Answering(parts, self._responses)

    async def __aenter__(self) -> "ResponseRoutes":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._answering.settled()

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = f"{PATH}/{{id}}"
        return [
            Route(PATH, self._create, methods=["POST"]),
            Route(one, self._retrieve, methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self._cancel, methods=["POST"]),
            Route(f"{one}/input_items", self._list, methods=["GET"]),
        ]

    async def _create(self, request: Request) -> Any:
        key = key_of(request)
        key.require("run")
        asked, body = await parsed(request, ResponseRequest, self._settings.body_bytes, self._settings.stall_s)
        idempotency = idempotency_key(request), fingerprint_of(request, body)
        made = await self._answering.made(key.owner, asked, len(body), *idempotency)
        headers = {RUN_HEADER: made.resource.rlm["run"]}
        if asked.background and not asked.stream:
            return JSONResponse(made.resource.body(), headers=headers)
        if asked.stream:
            return self._followed(made, -1)

        def late(_error: Exception) -> Any:
            return made.resource.body()  # its status is "failed"

        return _following(made, SlowJson(lambda: _whole(made, headers), self._settings.heartbeat_s, late))

    async def _retrieve(self, request: Request) -> Any:
        made = self._made(request)
        query = validated(dict(request.query_params), _Retrieving)
        if not query.stream:
            return JSONResponse(made.resource.body())
        after = -1 if query.starting_after is None else query.starting_after
        made.journal.require(after)
        return self._followed(made, after)

    async def _delete(self, request: Request) -> Any:
        made = self._made(request)
        await _cancelled(made)
        self._responses.forget(made)
        if made.repl is not None and made.repl.last == made.resource.id:
            await made.repl.close()
        return JSONResponse({"id": made.resource.id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Any:
        made = self._made(request)
        await _cancelled(made)
        return JSONResponse(made.resource.body())

    async def _list(self, request: Request) -> Any:
        made = self._made(request)
        shown = ("message", "function_call", "function_call_output")
        items = [item for item in made.given if item["type"] in shown]
        return JSONResponse(listed(items, page_of(request, _Listing), dict))

    def _made(self, request: Request) -> Made:
        key = key_of(request)
        key.require("run")
        return self._responses.get(key.owner, request.path_params["id"], "response_id")

    def _followed(self, made: Made, after: int) -> ASGIApp:
        headers = {RUN_HEADER: made.resource.rlm["run"]}
        return _following(made, EventStream(made.journal.follow(after), self._settings.heartbeat_s, headers))


def _following(made: Made, response: ASGIApp) -> ASGIApp:
    """Return an answer that ends the run with its last client, unless the response has ended already."""
    asked = made.asked
    return response if asked is None or made.resource.is_ended else Following(asked, response)


async def _whole(made: Made, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], Any]:
    """Return the body of a response at its end, also if it was cancelled.

    Raises:
        ApiError: Its run has failed.
    """
    await made.ended.wait()
    if made.error is not None and made.resource.status == "failed":
        error = api_error_of(made.error, is_paid=made.is_paid)
        error.headers |= headers
        raise error
    return 200, headers, made.resource.body()


async def _cancelled(made: Made) -> None:
    """End the run of a response, if it goes on, also if it waits for the client after the end of the response."""
    if (asked := made.asked) is not None and not asked.hosted.run.is_done:
        asked.hosted.run.cancel()
        await asked.hosted.run.ended()
    await made.ended.wait()
