"""Responses that are kept, and pages of their input."""

import asyncio
import weakref
from typing import Any

import pytest

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.responses import store
from rlm_broker.serve.responses.resource import Resource
from rlm_broker.serve.responses.store import Made, ResponseEvents, Responses, input_page

ALICE, BOB = Owner("alice"), Owner("bob")


class _Run:
    """A stand-in for a run: the store does not look at it."""


def made(number: int, *, ended_at: float | None = 1e12, given_bytes: int = 0) -> Made:
    run: Any = weakref.ref(_Run())
    resource = Resource(f"resp_{number}", "m", {})
    return Made(ALICE, resource, ResponseEvents(), run, (), (), given_bytes, True, ended_at=ended_at)


async def test_response_is_known_to_its_owner_alone() -> None:
    responses = Responses(keep_s=60)
    responses.add(made(1))
    assert responses.get(ALICE, "resp_1").resource.id == "resp_1"
    for owner, id in ((BOB, "resp_1"), (ALICE, "resp_2")):
        with pytest.raises(ApiError, match="there is no response") as refused:
            responses.get(owner, id, "response_id")
        assert (refused.value.status, refused.value.param) == (404, "response_id")


async def test_old_response_is_forgotten() -> None:
    """An ended response goes after its time; one that goes on stays."""
    responses = Responses(keep_s=60)
    responses.add(made(1, ended_at=1.0))
    responses.add(made(2, ended_at=None))
    with pytest.raises(ApiError):
        responses.get(ALICE, "resp_1")
    assert responses.get(ALICE, "resp_2")


async def test_oldest_responses_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_KEPT", 2)
    monkeypatch.setattr(store, "MOST_KEPT_BYTES", 100)
    responses = Responses(keep_s=60)
    for number in range(4):
        responses.add(made(number, given_bytes=10))
    assert responses.get(ALICE, "resp_2")
    with pytest.raises(ApiError):
        responses.get(ALICE, "resp_1")
    responses.add(made(4, given_bytes=95))
    assert responses.get(ALICE, "resp_4")
    with pytest.raises(ApiError):
        responses.get(ALICE, "resp_3")


async def test_made_waits_for_its_repl() -> None:
    one = made(1)
    await one.returned()
    given_back = asyncio.Event()
    one.returning = asyncio.create_task(_waited(given_back))
    waiting = asyncio.create_task(one.returned())
    await asyncio.sleep(0)
    assert not waiting.done()
    given_back.set()
    await waiting


async def _waited(event: asyncio.Event) -> None:
    await event.wait()


def test_page_of_input_items() -> None:
    items = {f"msg_{number}": {"id": f"msg_{number}"} for number in range(5)}
    first = input_page(items, after=None, limit=2, is_ascending=True)
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (["msg_0", "msg_1"], True)
    rest = input_page(items, after="msg_1", limit=3, is_ascending=True)
    assert (rest["first_id"], rest["last_id"], rest["has_more"]) == ("msg_2", "msg_4", False)
    down = input_page(items, after="msg_4", limit=1, is_ascending=False)
    assert [item["id"] for item in down["data"]] == ["msg_3"]
    with pytest.raises(ApiError, match="no input item"):
        input_page(items, after="msg_9", limit=1, is_ascending=False)
