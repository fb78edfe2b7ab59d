"""Bodies: what cannot be read is refused with a sentence, and a stalled body is given up."""

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from rlm_broker.serve.app import HANDLERS
from rlm_broker.serve.bodies import LARGE_BYTES, MOST_VALUES, body_of, parsed, repeat_of
from rlm_broker.serve.errors import ApiError
from tests.support.asgi_server import http_server


class Wanted(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int
    names: list[str] = []
    thread: int = 0

    @model_validator(mode="after")
    def _note(self) -> "Wanted":
        self.thread = threading.get_ident()
        return self


async def take(request: Request) -> Response:
    wanted, body = await parsed(request, Wanted, 1_000, 0.2)
    return JSONResponse({"count": wanted.count, "bytes": len(body)})


async def take_much(request: Request) -> Response:
    wanted, _ = await parsed(request, Wanted, 1 << 20, 5)
    return JSONResponse({"count": wanted.count, "is_here": wanted.thread == threading.get_ident()})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = Starlette(
        routes=[Route("/", take, methods=["POST"]), Route("/large", take_much, methods=["POST"])],
        exception_handlers=HANDLERS,
    )
    with http_server(app) as server:
        yield server.url


def test_body_becomes_a_model(url: str) -> None:
    assert httpx.post(url, content=b'{"count": 3}').json() == {"count": 3, "bytes": 12}


def test_large_body_is_read_beside_the_loop(url: str) -> None:
    for size, is_here in ((LARGE_BYTES - 1, True), (LARGE_BYTES, False)):
        answer = httpx.post(f"{url}/large", content=b'{"count": 3}'.ljust(size))
        assert answer.json() == {"count": 3, "is_here": is_here}


def test_wrong_bodies_are_refused_with_a_sentence(url: str) -> None:
    for body, status, code, param, said in (
        (b"", 400, "empty", None, "the body is empty"),
        (b" \n", 400, "empty", None, "the body is empty"),
        (b'{"count": "\xff"}', 400, "not_utf8", None, "the body is not UTF-8: invalid start byte at byte 11"),
        (b'{"count": 3', 400, "not_json", None, "the body is not valid JSON"),
        (b'{"count": NaN}', 400, "not_json", None, "the body is not valid JSON"),
        (b"[" * 900, 400, "not_json", None, "the body is not valid JSON"),
        (b"[]", 400, None, None, "the body must be a JSON object"),
        (b"{}", 400, None, "count", "count is missing"),
        (b'{"count": "three"}', 400, None, "count", "count must be a whole number"),
        (b'{"count": 3, "names": ["a", 7]}', 400, None, "names.1", "names.1 must be text"),
        (b'{"count": 3, "cuont": 4}', 400, None, "cuont", "there is no field 'cuont'; did you mean count?"),
        (b'{"count": 3, "\\u001b[2J": 4}', 400, None, "\x1b[2J", "there is no field '\\x1b[2J'"),
        (b'{"count": ' + b"1" * 995 + b"}", 413, "too_large", None, "the body has more than 1,000 bytes"),
    ):
        answer = httpx.post(url, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), body
        assert error["message"].startswith(said), body


def test_bounds_are_exact(url: str) -> None:
    """Bytes are bounded with a declared length and without; the body, its number and the list count as values."""
    for size, status in ((1_000, 200), (1_001, 413)):
        body = b'{"count": 3}'.ljust(size)
        for content in (body, iter([body[:600], body[600:]])):
            answer = httpx.post(url, content=content)
            assert answer.status_code == status
    assert answer.json()["error"]["message"] == "the body has more than 1,000 bytes: upload it as a file"
    for more, status in ((0, 200), (1, 413)):
        names = b",".join([b'""'] * (MOST_VALUES - 3 + more))
        answer = httpx.post(f"{url}/large", content=b'{"count": 3, "names": [' + names + b"]}")
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "too_large"
    assert answer.json()["error"]["message"] == "the body has more than 131,072 JSON values: upload them as a file"
    text = b'{"count": 3, "names": ["' + b"," * MOST_VALUES + b'"]}'
    assert httpx.post(f"{url}/large", content=text).status_code == 200


def requested(path: str = "/", **headers: str) -> Request:
    told = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path": path, "query_string": b"", "headers": [(b"host", b"h"), *told]})


def test_repeated_request_has_a_short_key_and_the_same_path_and_body() -> None:
    key = {"idempotency_key": "k" * 255}
    asked = [("/a", b"x"), ("/a", b"y"), ("/ax", b""), ("/b", b"x")]
    made = [repeat_of(requested(path, **key), body) for path, body in asked]
    assert made[0] == repeat_of(requested("/a", other="header", **key), b"x")
    assert ({each[0] for each in made if each}, len(set(made))) == ({"k" * 255}, len(asked))
    assert repeat_of(requested(idempotency_key=""), b"") is repeat_of(requested(), b"") is None
    with pytest.raises(ApiError, match=r"^Idempotency-Key has more than 255 characters$") as refused:
        repeat_of(requested(idempotency_key="k" * 256), b"")
    assert (refused.value.status, refused.value.param) == (400, "Idempotency-Key")


async def test_header_of_the_length_is_looked_at_before_the_body() -> None:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    with pytest.raises(ApiError) as refused:
        await body_of(Request(requested(content_length="1001").scope, receive), 1_000, 5)
    assert refused.value.status == 413
    with pytest.raises(AssertionError, match="was read"):
        await body_of(Request(requested(content_length="1000").scope, receive), 1_000, 5)


def test_stalled_body_is_given_up(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b'POST / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 50\r\n\r\n{"count"'
        )
        with connection.makefile("rb") as answer:
            assert b"408" in answer.readline()
            assert b"the body stalled: no byte came for 0.2 seconds" in answer.read()
