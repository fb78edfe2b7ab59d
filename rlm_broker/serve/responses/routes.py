"""`/v1/responses`: runs as responses, begun or resumed, reported while they go on, and kept.

Theory of operation
-------------------
The task of each response follows its run and puts it into `ResponseEvents`. Clients follow these, so a response in
the background needs no client, and a later one sees the same as the first one.

A stored response keeps its REPL (`LastingRepl`), so that the next response of the conversation finds its variables. If
that REPL is gone, or has gone on with another response, the next one begins with a new REPL: its context is made of the
files and long texts of the whole conversation, as if the client had sent all of it. In both cases code finds the
earlier messages in a variable, and `rlm.repl` says whether the variables are there.
"""

import asyncio
import contextlib
import secrets
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, NonNegativeInt
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker import RunCancelled
from rlm_broker.serve.bodies import Page, listed, page_of, repeat_of, validated
from rlm_broker.serve.errors import ApiError, api_error_of
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.runs import Repeat
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.questions.conversation import EARLIER, read
from rlm_broker.serve.questions.request import MOST_ITEMS
from rlm_broker.serve.questions.runs import BEGINNING, RUN_HEADER, Asked, Following, RunOutcome, Since
from rlm_broker.serve.replies import EventStream, SlowJson
from rlm_broker.serve.responses.bodies import OUTPUTS, Resource, ResponseRequest, repeated
from rlm_broker.serve.responses.events import Teller
from rlm_broker.serve.responses.store import LastingRepl, Made, ResponseEvents, Responses

PATH: Final = "/v1/responses"
ID_BYTES: Final = 16
"""Random bytes of the unguessable id of a response."""
MOST_CONVERSATION_BYTES: Final = 1 << 27
"""Bytes of all requests and answers of one conversation; a further request is refused."""


class _Retrieving(BaseModel):
    """Query of a request for a response. `include` and `include_obfuscation` are accepted without effect."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    stream: bool = False
    starting_after: NonNegativeInt | None = None


class _Listing(Page):
    """Query of a request for input items. `include` is accepted without effect."""

    model_config = ConfigDict(extra="ignore")


class ResponseRoutes:
    """Routes of responses. Use it as an async context manager: all responses have ended when it is left."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._responses = Responses(parts.settings.keep_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ResponseRoutes":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until all responses have been reported. Their runs have ended, or end meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

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
        owner = key_of(request).require("run")
        asked, body = await self._parts.parsed(request, ResponseRequest)
        made = await self._made(owner, asked, len(body), repeat_of(request, body))
        headers = {RUN_HEADER: made.resource.rlm["run"]}
        if asked.background and not asked.stream:
            return JSONResponse(made.resource.body(), headers=headers)
        if asked.stream:
            return self._followed(made, -1)

        late = lambda _: made.resource.body()  # noqa: E731 - its status is "failed"
        return _following(made, SlowJson(lambda: _whole(made, headers), self._parts.settings.heartbeat_s, late))

    async def _retrieve(self, request: Request) -> Any:
        made = self._known(request)
        query = validated(dict(request.query_params), _Retrieving)
        if not query.stream:
            return JSONResponse(made.resource.body())
        after = -1 if query.starting_after is None else query.starting_after
        made.journal.require(after)
        return self._followed(made, after)

    async def _delete(self, request: Request) -> Any:
        made = self._known(request)
        await _cancelled(made)
        self._responses.forget(made)
        if made.repl is not None and made.repl.last == made.resource.id:
            await made.repl.close()
        return JSONResponse({"id": made.resource.id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Any:
        made = self._known(request)
        await _cancelled(made)
        return JSONResponse(made.resource.body())

    async def _list(self, request: Request) -> Any:
        made = self._known(request)
        shown = ("message", "function_call", "function_call_output")
        items = [item for item in made.given if item["type"] in shown]
        return JSONResponse(listed(items, page_of(request, _Listing), dict))

    def _known(self, request: Request) -> Made:
        owner = key_of(request).require("run")
        return self._responses.get(owner, request.path_params["id"], "response_id")

    def _followed(self, made: Made, after: int) -> ASGIApp:
        headers = {RUN_HEADER: made.resource.rlm["run"]}
        return _following(made, EventStream(made.journal.follow(after), self._parts.settings.heartbeat_s, headers))

    # -- what a request asks for -------------------------------------------------------------------------------------

    async def _made(self, owner: Owner, request: ResponseRequest, size: int, repeat: Repeat | None) -> Made:
        """Return the response to a request; its run goes on.

        The caller joins its run before it awaits anything else; see `Asking.begin`.

        Args:
            owner: Owner of the response.
            request: The request.
            size: Bytes of its body.
            repeat: As for `Asking.begin`.

        Raises:
            ApiError: The request cannot be used.
            Busy, MoneySpent, NotAllowed, UnknownHandle: As for `Asking.begin`.
        """
        request.require_supported()
        parts = self._parts
        model = parts.models.named(owner, request.model)
        before = self._before(owner, request, size)
        id = f"resp_{secrets.token_hex(ID_BYTES)}"
        given = list(request.items(id, lambda item, at: self._responses.item(owner, item, at)))
        earlier = () if before is None else before.conversation
        if len(earlier) + len(given) > MOST_ITEMS:
            raise _too_large(f"{MOST_ITEMS:,} items")
        size += 0 if before is None else before.bytes
        items = [*((item, EARLIER) for item in earlier), *given]
        said = read(items, lambda id, at: parts.file(owner, id, at), parts.settings.inline_chars)

        def new(asked: Asked) -> Made:
            resource = Resource(id, request.model, repeated(request), rlm={"run": asked.hosted.id})
            its = tuple(item for item, _ in given)
            return Made(owner, resource, ResponseEvents(), weakref.ref(asked), its, earlier, size, request.is_stored)

        if (asked := parts.asking.resumed(owner, said, "input")) is not None:
            made = new(asked)
            if isinstance(first := asked.about, Made):  # a chat completion may have begun the run
                made.repl, made.returning = first.repl, first.returning
            return self._begun(made, asked, request, asked.since)
        _require_no_open_call(before)
        said.files += [parts.file(owner, id, at) for id, at in request.file_ids()]
        said.system[:0] = [request.instructions] if request.instructions else []
        async with contextlib.AsyncExitStack() as lending:
            repl, is_new = (None, True) if model.is_plain else await self._repl(owner, before, request, lending)
            files = [*said.before, *said.files] if is_new else said.files
            lasting: Any = {
                "repl": None if repl is None else repl.persistent,
                "outlives_s": None if request.background else 0.0,
            }
            asked = await parts.asking.begin(owner, request, said, model, files, **lasting, repeat=repeat)
            if isinstance(known := asked.about, Made):  # the same request was sent before
                return known
            made = new(asked)
            if repl is not None:
                made.repl, repl.run = repl, asked.hosted.id
                made.returning = self._started(_returned(asked, repl, lending.pop_all()))
                made.resource.rlm["repl"] = "new" if is_new else "kept"
        asked.about = made
        return self._begun(made, asked, request, BEGINNING)

    def _before(self, owner: Owner, request: ResponseRequest, size: int) -> Made | None:
        if request.previous_response_id is None:
            return None
        made = self._responses.get(owner, request.previous_response_id, "previous_response_id")
        if made.bytes + size > MOST_CONVERSATION_BYTES:
            raise _too_large(f"{MOST_CONVERSATION_BYTES:,} bytes")
        if not made.resource.is_ended:
            said = f"the response {made.resource.id!r} goes on: wait for its end, or cancel it"
            raise ApiError(400, said, code="in_progress", param="previous_response_id")
        return made

    async def _repl(
        self, owner: Owner, before: Made | None, request: ResponseRequest, lending: contextlib.AsyncExitStack
    ) -> tuple[LastingRepl | None, bool]:
        """Return the REPL for a run, and whether it is a new one. None is one of the run's own."""
        repl = None if before is None else before.repl
        if before is not None and repl is not None and repl.last == before.resource.id and repl.is_held:
            repl.last = None  # claimed: another response after the same one gets a REPL of its own
            lending.callback(_unclaimed, repl, before.resource.id)
            await lending.enter_async_context(repl.lent())
            return repl, False
        if not request.is_stored:
            return None, True
        parts = self._parts
        made = LastingRepl(parts.rlm, parts.repls, owner, parts.settings.container_idle_s)
        await lending.enter_async_context(made.lent())
        return made, True

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def _begun(self, made: Made, asked: Asked, request: ResponseRequest, since: Since) -> Made:
        """Begin to report a response, and keep it."""
        if made.repl is not None:
            made.repl.last = made.resource.id
        if request.background:
            asked.hosted.outlive(None)
        if made.is_stored:
            self._responses.add(made)
        container = None
        if request.code_tool() is not None:
            container = f"cntr_{asked.hosted.id}" if made.repl is None else made.repl.id
        logs = OUTPUTS in (request.include or ())
        teller = Teller(made.resource, made.journal, container=container, tells_logs=logs, since=since)
        is_full = self._parts.runs.running >= self._parts.settings.max_runs
        teller.begin(is_queued=bool(request.background) or (is_full and asked.hosted.state == "queued"))
        self._started(self._follow(made, asked, teller, since))
        return made

    async def _follow(self, made: Made, asked: Asked, teller: Teller, since: Since) -> None:
        """Follow the run of a response, and report it until it ends, or waits for the client."""
        try:
            async for step in asked.steps(since):
                if not isinstance(step, RunOutcome):
                    teller.tell(step)
                    continue
                if asked.hosted.run.is_done:
                    await made.returned()
                teller.ended(step, asked.told(step))
        except Exception as error:  # noqa: BLE001 - each becomes the end of the response
            await made.returned()
            made.error, made.is_paid = error, asked.hosted.is_paid
            teller.failed(error, asked.hosted.usage)
        finally:
            self._responses.end(made)
            made.ended.set()

    def _started(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _too_large(what: str) -> ApiError:
    said = f"the conversation has more than {what}: begin a new one, with files"
    return ApiError(413, said, code="too_large", param="previous_response_id")


def _unclaimed(repl: LastingRepl, last: str) -> None:
    """Leave the REPL to its response, if no later one has begun."""
    if repl.last is None:
        repl.last = last


async def _returned(asked: Asked, repl: LastingRepl, lending: contextlib.AsyncExitStack) -> None:
    """Give the REPL back when its run has ended. The REPL of a cancelled run, or of one whose client has left, ends."""
    try:
        await asked.hosted.completion()
    except RunCancelled:
        repl.is_over = True
    except Exception:  # noqa: BLE001, S110 - the response tells it
        pass
    await lending.aclose()


def _require_no_open_call(before: Made | None) -> None:
    """Refuse to leave calls of functions without results, while the run waits for them."""
    if before is None or not before.is_suspended:
        return
    call = next((item["call_id"] for item in before.resource.output if item["type"] == "function_call"), None)
    if call is not None:
        said = f"the call {call!r} waits for its result: send a function_call_output, or cancel the response"
        raise ApiError(400, said, param="input")


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
