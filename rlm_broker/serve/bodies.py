"""Requests: their bodies, bounded, with a deadline and typed, and lists in pages."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm_broker.serve.errors import ApiError
from rlm_broker.values.validation import first_complaint
from sandbox_worker.wire.counts import has_longer_number_than, has_more_values_than

T = TypeVar("T", bound=BaseModel)

MOST_VALUES: Final = 1 << 17
"""JSON values of one body. Two bytes can become a list of 64 bytes, so they are counted before they are decoded."""
MOST_DIGITS: Final = 100
"""Digits of a number in a body of `WholeBodies`: its application may write it into errors."""
MOST_KEY_CHARS = 255
"""Characters of an idempotency key."""
LARGE_BYTES: Final = 1 << 18
"""Bytes of a body from which on a thread reads it. To read 60 MB takes a second."""
_reader = ThreadPoolExecutor(1, "rlm-broker-bodies")
"""One thread reads one large body at a time: the decoder holds the interpreter's lock for 0.2 s with 60 MB."""


async def chunks_of(request: Request, most_bytes: int, stall_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body.

    Args:
        request: The request.
        most_bytes: Bytes beyond which the body is refused.
        stall_s: Seconds without a piece until it is given up.

    Raises:
        ApiError: 413, 408, or 400 for a wrong header.
        ClientDisconnect: The client has left.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    pieces, read = aiter(request.stream()), 0
    while True:
        try:
            async with asyncio.timeout(stall_s):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise ApiError(408, f"the body stalled: no byte came for {stall_s:g} seconds", code="stalled") from None
        if piece is None:
            return
        read += len(piece)
        if read > most_bytes:
            raise _too_large(most_bytes)
        if piece:
            yield piece


async def body_of(request: Request, most_bytes: int, stall_s: float) -> bytes:
    """Return a whole body. Arguments and errors are as for `chunks_of`."""
    return b"".join([piece async for piece in chunks_of(request, most_bytes, stall_s)])


class WholeBodies:
    """An ASGI application that gets each body as one message, once its bounds have held. Others are answered here.

    Args:
        app: Application behind it. It may decode the body on the loop.
        most_bytes, stall_s: As for `chunks_of`.
        most_values: JSON values of one body.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, stall_s: float, most_values: int) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._stall_s = stall_s
        self._most_values = most_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body, or answer it with an error."""
        try:
            body = await body_of(Request(scope, receive), self._most_bytes, self._stall_s)
            require_few_values(body, self._most_values)
            if has_longer_number_than(MOST_DIGITS, body):
                raise ApiError(413, f"the body has a number of more than {MOST_DIGITS} digits", code="too_large")
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, received, send)


def require_few_values(body: bytes, most: int = MOST_VALUES) -> None:
    """Refuse JSON of too many values, before it is decoded.

    Raises:
        ApiError: 413.
    """
    if has_more_values_than(most, body):
        raise ApiError(413, f"the body has more than {most:,} JSON values: upload them as a file", code="too_large")


async def parsed(request: Request, kind: type[T], most_bytes: int, stall_s: float) -> tuple[T, bytes]:
    """Return a JSON body as a model, and its bytes. A large one is read in a thread, beside other requests.

    Raises:
        ApiError: 400: the body is empty, no JSON, not UTF-8, or a field is wrong; `param` names it. Also as for
            `chunks_of`.
    """
    body = await body_of(request, most_bytes, stall_s)
    if len(body) < LARGE_BYTES:
        return _decoded(body, kind), body
    return await asyncio.get_running_loop().run_in_executor(_reader, _decoded, body, kind), body


def _decoded(body: bytes, kind: type[T]) -> T:
    if not body.strip():
        raise ApiError(400, "the body is empty: send a JSON object", code="empty")
    require_few_values(body)
    try:
        value: Any = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        try:
            body.decode()
        except UnicodeDecodeError as wrong:
            said = f"the body is not UTF-8: {wrong.reason} at byte {wrong.start:,}"
            raise ApiError(400, said, code="not_utf8") from None
        raise ApiError(400, f"the body is not valid JSON: {error}", code="not_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return validated(value, kind)


def validated(value: Any, kind: type[T], within: str = "") -> T:
    """Return plain values as a model.

    Args:
        value: The values.
        kind: The model.
        within: Place of the values in the request, for example "rlm", for errors.

    Raises:
        ApiError: 400: a field is wrong; `param` names it.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        place, said = first_complaint(error, "the body", within=within, known=kind.model_fields)
        raise ApiError(400, said, param=place or None) from None


def repeat_of(request: Request, body: bytes) -> tuple[str, str] | None:
    """Return the key under which a request joins the run it has begun before, and a digest of the request.

    Raises:
        ApiError: 400: the key is too long.
    """
    key = request.headers.get("idempotency-key")
    if not key:
        return None
    if len(key) > MOST_KEY_CHARS:
        raise ApiError(400, f"Idempotency-Key has more than {MOST_KEY_CHARS} characters", param="Idempotency-Key")
    return key, hashlib.sha256(request.url.path.encode() + b"\0" + body).hexdigest()


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {most_bytes:,} bytes: upload it as a file", code="too_large")


class Page(BaseModel):
    """Query of a list.

    Attributes:
        after: Id of the last item of the page before.
        limit: Items of the page.
        order: "asc" begins with the oldest, "desc" with the newest.
    """

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


P = TypeVar("P", bound=Page)


def page_of(request: Request, kind: type[P]) -> P:
    """Return the query of a request.

    Raises:
        ApiError: 400: a parameter is unknown or wrong.
    """
    return validated(dict(request.query_params), kind)


def listed(items: Sequence[Any], page: Page, shape: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return one page of items.

    Raises:
        ApiError: 404: there is no item `after`.
    """
    shapes = [shape(item) for item in items]
    if page.order == "desc":
        shapes.reverse()
    if page.after is not None:
        places = [place for place, each in enumerate(shapes) if each["id"] == page.after]
        if not places:
            raise ApiError(404, f"there is no {page.after[:200]!r} in this list", code="not_found", param="after")
        shapes = shapes[places[0] + 1 :]
    data = shapes[: page.limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(shapes) > len(data)}
