"""Forms in pieces of all sizes: the file is passed on, the fields are bounded, and what is no form is refused."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.uploads import Form, file_name, received

BOUNDARY = "simple"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(head: str, data: bytes) -> bytes:
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def read(body: bytes, size: int = 7, content_type: str = TYPE, *, is_cut: bool = False) -> tuple[Form, bytes]:
    async def pieces() -> AsyncIterator[dict[str, Any]]:
        for start in range(0, len(body), size):
            yield {"type": "http.request", "body": body[start : start + size], "more_body": True}
        yield {"type": "http.disconnect"} if is_cut else {"type": "http.request", "body": b"", "more_body": False}

    messages, got = pieces(), bytearray()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type.encode())]}
    request = Request(scope, lambda: anext(messages))
    return await received(request, got.extend, 1 << 20, 10), bytes(got)


@given(st.binary(max_size=200).map(lambda data: data.replace(b"simple", b"")), st.integers(1, 300))
async def test_file_arrives_as_it_is_in_any_pieces(data: bytes, size: int) -> None:
    whole, got = await read(form(part('name="a[b]"', b"1"), part('name="file"; filename="x"', data)), size)
    assert (got, whole.filename, whole.nested()) == (data, "x", {"a": {"b": "1"}})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\a.txt", "a.txt"),
        ("a\0b\nc\x1b[0m\u202e", "a_b_c_[0m_"),
        ("..", "file"),
        ("", "file"),
        ("x" * 255, "x" * 255),
        ("\ud800", "_"),
        ("ä b.txt", "ä b.txt"),
    ],
)
def test_name_leads_nowhere_and_steers_nothing(given: str, name: str) -> None:
    assert file_name(given) == name


def test_longer_name_than_a_file_system_takes() -> None:
    for name in ("x" * 300, "ä" * 128):
        with pytest.raises(ApiError, match="more than 255 bytes"):
            file_name(name)


FILE = part('name="file"; filename="x"', b"data")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"not a form", "no valid form"),
        (form(FILE)[:-6], "cut off"),
        (form(FILE, FILE), "several files"),
        (form(part('name="image"; filename="x"', b"")), "name it 'file'"),
        (form(part('filename="x"', b"")), "no name"),
        (form(part('name="a"', b"1"), part('name="a"', b"2")), "twice"),
        (form(part('name="a"', b"\xff")), "not UTF-8"),
        (form(part('name="a"', b"x" * 70_000)), "65,536 bytes"),
        (form(*(part(f'name="{number}"', b"") for number in range(40))), "more than 32 fields"),
        (form(part('name="file"; filename="x"', b"x" * (2 << 20))), "more than"),
        (form(part(f'name="{"n" * 100_000}"', b"")), "no valid form|65,536 bytes"),
    ],
)
async def test_what_is_no_such_form_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=why):
        await read(body, 5_000)


async def test_other_types_of_body_are_refused() -> None:
    for content_type in ("application/json", "multipart/form-data", "multipart/mixed; boundary=simple"):
        with pytest.raises(ApiError, match="the body is no form"):
            await read(form(FILE), content_type=content_type)


async def test_client_that_leaves_ends_the_reading() -> None:
    with pytest.raises(ClientDisconnect):
        await read(FILE, is_cut=True)
