"""Bodies: what cannot be read is refused with a sentence, and a stalled body is given up."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlm_broker.service.app import HANDLERS
from rlm_broker.service.bodies import MOST_VALUES, parsed
from tests.support.asgi_server import http_server


class Wanted(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int
    names: list[str] = []


async def take(request: Request) -> Response:
    wanted, body = await parsed(request, Wanted, 1_000, 0.2)
    return JSONResponse({"count": wanted.count, "bytes": len(body)})


async def take_much(request: Request) -> Response:
    wanted, _ = await parsed(request, Wanted, 1 << 20, 5)
    return JSONResponse({"count": wanted.count})


@pytest.fixture(scope="module")
def large(url: str) -> str:
    return f"{url}/large"


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


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "empty", None),
        (b" \n", 400, "empty", None),
        (b'{"count": "\xff"}', 400, "not_utf8", None),
        (b'{"count": 3', 400, "not_json", None),
        (b'{"count": NaN}', 400, "not_json", None),
        (b"[" * 900, 400, "not_json", None),
        (b"[]", 400, None, None),
        (b'{"count": "three"}', 400, None, "count"),
        (b'{"count": 3, "names": ["a", 7]}', 400, None, "names.1"),
        (b'{"count": 3, "cuont": 4}', 400, None, "cuont"),
        (b'{"count": ' + b"1" * 995 + b"}", 413, "too_large", None),
    ],
)
def test_wrong_bodies_are_refused(url: str, body: bytes, status: int, code: str | None, param: str | None) -> None:
    answer = httpx.post(url, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "the body must be a JSON object"),
        (b"{}", "count is missing"),
        (b'{"count": 3, "cuont": 4}', "there is no field 'cuont'; did you mean count?"),
        (b'{"count": 3, "\\u001b[2J": 4}', "there is no field '\\x1b[2J'"),
        (b'{"count": "three"}', "count: input should be a valid integer, unable to parse string as an integer"),
    ],
)
def test_refusals_speak_of_the_clients_fields(url: str, body: bytes, said: str) -> None:
    assert httpx.post(url, content=body).json()["error"]["message"] == said


def test_body_of_too_many_values_is_refused_before_it_is_decoded(large: str) -> None:
    answer = httpx.post(large, content=b'{"count": 3, "names": [' + b"[]," * MOST_VALUES + b"[]]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert httpx.post(large, content=b'{"count": 3, "names": ["' + b"," * MOST_VALUES + b'"]}').status_code == 200


def test_pieces_beyond_the_bound_are_refused(url: str) -> None:
    """The bound holds for a body that does not declare its length."""
    answer = httpx.post(url, content=(b" " * 100 for _ in range(11)))
    assert answer.status_code == 413


def test_stalled_body_is_given_up(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b'POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"count"')
        assert b"408" in connection.recv(4096).split(b"\r\n")[0]
