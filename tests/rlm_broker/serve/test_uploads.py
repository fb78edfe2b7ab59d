"""`/v1/files` as OpenAI's own client uses it; forms in pieces; and that nothing is left of an upload that fails."""

import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.settings import ServeSettings
from rlm_broker.serve.uploads import PIECE_BYTES, Content, file_name, received
from tests.support.asgi_server import http_server
from tests.support.fds import memfds
from tests.support.service import Served, serving
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until_now

# -- forms -----------------------------------------------------------------------------------------------------------

BOUNDARY = "simple"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(head: str, data: bytes) -> bytes:
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part('name="file"; filename="x"', b"data")


async def read(
    body: bytes, size: int = 7, content_type: str = TYPE, *, is_cut: bool = False
) -> tuple[dict[str, str], str | None, bytes]:
    async def pieces() -> AsyncIterator[dict[str, Any]]:
        for start in range(0, len(body), size):
            yield {"type": "http.request", "body": body[start : start + size], "more_body": True}
        yield {"type": "http.disconnect"} if is_cut else {"type": "http.request", "body": b"", "more_body": False}

    messages, got = pieces(), bytearray()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type.encode())]}
    return *await received(Request(scope, lambda: anext(messages)), got.extend, 1 << 20, 10), bytes(got)


@given(st.binary(max_size=200).map(lambda data: data.replace(b"simple", b"")), st.integers(1, 300))
async def test_file_arrives_as_it_is_in_any_pieces(data: bytes, size: int) -> None:
    body = form(part('name="a[b]"', b"1"), part('name="file"; filename="x"', data))
    assert await read(body, size) == ({"a[b]": "1"}, "x", data)


async def test_what_is_no_such_form_is_refused() -> None:
    for body, why in (
        (b"not a form", "no valid form"),
        (form(FILE)[:-6], "cut off"),
        (form(FILE, FILE), "Too many files"),
        (form(part('name="image"; filename="x"', b"")), "name it 'file'"),
        (form(part('filename="x"', b"")), '"name" must be provided'),
        (form(part('name="a"', b"x" * 70_000)), "maximum size of 64KB"),
        (form(*(part(f'name="{number}"', b"") for number in range(40))), "Maximum number of fields is 32"),
        (form(part('name="file"; filename="x"', b"x" * (2 << 20))), "more than"),
        (form(part(f'name="{"n" * 100_000}"', b"")), "no valid form"),
    ):
        with pytest.raises(ApiError, match=why):
            await read(body, 5_000)
    for content_type in ("application/json", "multipart/form-data", "multipart/mixed; boundary=simple"):
        with pytest.raises(ApiError, match="the body is no"):
            await read(form(FILE), content_type=content_type)
    with pytest.raises(ClientDisconnect):
        await read(FILE, is_cut=True)


def test_name_leads_nowhere_and_steers_nothing() -> None:
    for given_name, name in (
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\a.txt", "a.txt"),
        ("a\0b\nc\x1b[0m\u202e", "a_b_c_[0m_"),
        ("..", "file"),
        ("", "file"),
        ("x" * 255, "x" * 255),
        ("\ud800", "_"),
        ("ä b.txt", "ä b.txt"),
    ):
        assert file_name(given_name) == name
    for long in ("x" * 300, "ä" * 128):
        with pytest.raises(ApiError, match="more than 255 bytes"):
            file_name(long)


# -- the content of a file -------------------------------------------------------------------------------------------

SIZE_BYTES = 1 << 30
NAME = "content-of-a-test"
RESET = struct.pack("ii", 1, 0)


class Application:
    """Answers each request with a file of zeros that takes no memory, and counts what is sent."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.sent_bytes = 0
        self.ended = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            self.sent_bytes += len(message.get("body", b""))
            await send(message)

        if scope["type"] == "http":
            fd = os.memfd_create(NAME)
            os.truncate(fd, self.size_bytes)
            try:
                await Content(fd, self.size_bytes)(scope, receive, counted)
            finally:
                self.ended.set()


def test_content_arrives_whole() -> None:
    size_bytes = 2 * PIECE_BYTES + 1
    with http_server(Application(size_bytes)) as server:
        assert httpx.get(server.url).content == bytes(size_bytes)


def test_client_that_leaves_ends_reading(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the file is neither read nor sent: it would keep the loop, and log a line for each piece."""
    before = memfds(NAME)
    with http_server(application := Application(SIZE_BYTES)) as server:
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        assert application.ended.wait(WAIT_S)
        assert application.sent_bytes < SIZE_BYTES // 8
    assert memfds(NAME) == before
    assert "socket.send()" not in caplog.text


# -- the routes ------------------------------------------------------------------------------------------------------

SETTINGS = ServeSettings(file_bytes=100_000, files_bytes=250_000, max_files_per_key=5, stall_s=0.3)
KEYS: dict[str, dict[str, Any]] = {"alice": {}, "bob": {}, "watcher": {"rights": ("watch",)}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(settings=SETTINGS, keys=KEYS) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The client of alice, who has no file before and after."""
    with openai.OpenAI(base_url=served.base_url, api_key=served.keys["alice"], max_retries=0) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
    assert len(served.parts.files) == 0


def test_file_lives_as_with_openai(client: openai.OpenAI) -> None:
    expires = {"anchor": "created_at", "seconds": 3_600}
    made = client.files.create(file=("../a.txt", b"hello\0\xff"), purpose="assistants", expires_after=expires)  # type: ignore[arg-type]
    assert (made.object, made.filename, made.bytes, made.purpose) == ("file", "a.txt", 7, "assistants")
    assert made.expires_at is not None
    assert made.expires_at - made.created_at in (3_600, 3_601)
    assert client.files.retrieve(made.id) == made
    content = client.files.content(made.id)
    assert content.read() == b"hello\0\xff"
    assert content.response.headers["content-disposition"] == "attachment"
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as failed:
        client.files.content(made.id)
    assert failed.value.code == "not_found"


def test_lists_come_in_pages(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=(f"{n}", b"x"), purpose="user_data").id for n in range(3)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", after=ids[0])] == ids[1:]
    assert client.files.list(limit=2).has_more
    assert not client.files.list(limit=3).has_more
    assert client.files.list(purpose="vision").data == []
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-none")


async def test_async_client_uploads_empty_and_large(served: Served, client: openai.OpenAI) -> None:
    """The content is larger than a piece of an answer."""
    for data in (b"", b"0123456789" * 10_000):
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.keys["alice"]) as other:
            made = await other.files.create(file=("a", data), purpose="user_data")
            assert (await other.files.content(made.id)).content == data
    assert len(client.files.list().data) == 2


def test_other_key_has_no_such_file(served: Served, client: openai.OpenAI) -> None:
    id = client.files.create(file=("a", b"x"), purpose="user_data").id
    with openai.OpenAI(base_url=served.base_url, api_key=served.keys["bob"]) as bob:
        assert bob.files.list().data == []
        for attempt in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(id)
    watcher = httpx.get(f"{served.base_url}/files", headers=served.headers_of("watcher"))
    assert (watcher.status_code, watcher.json()["error"]["code"]) == (403, "not_allowed")


BAD = [
    ({"data": {"purpose": "batch"}}, 400, None, "purpose"),
    ({"data": {"purpose": "user_data", "x": "1"}}, 400, None, "x"),
    ({"data": {"expires_after[seconds]": "0"}}, 400, None, "expires_after[seconds]"),
    ({"data": {"expires_after[anchor]": "now", "expires_after[seconds]": "9"}}, 400, None, "expires_after[anchor]"),
    ({"files": {"file": ("n" * 300, b"x")}}, 400, "too_large", "file"),
    ({"files": {"purpose": (None, b"user_data")}}, 400, None, "file"),
    ({"files": {"file": ("a", b"x" * 100_001)}}, 413, "too_large", None),
    ({"files": {"file": ("a", b"x" * 5_000_000)}}, 413, "too_large", None),
    ({"json": {}, "files": None}, 400, "not_a_form", None),
]


@table("given, status, code, param", BAD)
def test_bad_upload_is_refused_and_leaves_nothing(
    served: Served, client: openai.OpenAI, given: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    before = memfds("upload")
    sent = {"files": {"file": ("a", b"x")}} | given
    answer = httpx.post(f"{served.base_url}/files", headers=served.headers_of("alice"), **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert memfds("upload") == before
    assert client.files.list().data == []


def test_bounds_of_a_key(client: openai.OpenAI) -> None:
    first = client.files.create(file=("a", b"x" * 100_000), purpose="user_data")
    client.files.create(file=("a", b"x" * 100_000), purpose="user_data")
    with pytest.raises(openai.APIStatusError, match="delete some first") as failed:
        client.files.create(file=("a", b"x" * 60_000), purpose="user_data")
    assert failed.value.status_code == 413
    client.files.delete(first.id)
    for _ in range(4):
        client.files.create(file=("a", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="this key has 5 files"):
        client.files.create(file=("a", b"x"), purpose="user_data")


def begun(served: Served) -> socket.socket:
    """Return a connection on which an upload has begun, and of whose body a part has come."""
    connection = socket.create_connection(("127.0.0.1", served.port))
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.keys['alice']}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 90000\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    connection.sendall(head.encode() + b"x" * 10_000)
    return connection


def test_stalled_upload_is_given_up(served: Served, client: openai.OpenAI) -> None:
    before = memfds("upload")
    with begun(served) as connection:
        answer = HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert answer.status == 408
    assert (error["code"], "0.3 seconds" in error["message"]) == ("stalled", True)
    assert memfds("upload") == before
    assert client.files.list().data == []


def test_client_that_leaves_while_it_uploads(served: Served, client: openai.OpenAI) -> None:
    before = memfds("upload")
    connections = [begun(served) for _ in range(3)]
    until_now(lambda: memfds("upload") == before + 3)
    for connection in connections:
        connection.close()
    until_now(lambda: memfds("upload") == before)
    assert client.files.list().data == []
    client.files.create(file=("a", b"x" * 100_000), purpose="user_data")  # the key's bounds are free again
