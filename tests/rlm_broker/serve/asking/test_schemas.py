"""JSON Schemas of clients: whose turn their checks take, and what a request may have of them."""

import asyncio
import threading

import pytest

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner
from rlm_broker.serve.questions import schemas
from rlm_broker.serve.questions.schemas import Room, checked_in_turn, safe_schema
from tests.support.waiting import WAIT_S


async def test_key_with_many_checks_that_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key is not, and the first one is not when its checks are done."""
    monkeypatch.setattr(schemas, "MOST_WAITING", 3)
    eve, ann, goes_on = Owner("eve"), Owner("ann"), threading.Event()

    async def checked(owner: Owner) -> bool:
        return await checked_in_turn(owner, lambda: goes_on.wait(WAIT_S))

    begun = [asyncio.create_task(checked(eve)) for _ in range(2 + 3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="3 requests of this key wait"):
        await checked(eve)
    honest = asyncio.create_task(checked(ann))
    await asyncio.sleep(0)
    goes_on.set()
    assert all(await asyncio.gather(*begun, honest))
    assert await checked(eve)


async def test_schema_belongs_to_its_key() -> None:
    """Later checks by it take the turns of the key, and its error names the place in the request."""
    made = await checked_in_turn(Owner("eve"), lambda: safe_schema({}, "here"))
    assert made.checked.whose == "eve"
    with pytest.raises(ApiError, match="here is not a JSON Schema") as error:
        safe_schema({"type": "nothing"}, "here")
    assert (error.value.status, error.value.param) == (400, "here")


def test_schemas_share_the_room_of_their_request() -> None:
    room = Room("tools")
    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(450)}}
    for _ in range(5):
        safe_schema(schema, "tools.0", room)
    with pytest.raises(ApiError, match="the tools have more than 100,000 characters, or 5,000 parts"):
        safe_schema(schema, "tools.0", room)
