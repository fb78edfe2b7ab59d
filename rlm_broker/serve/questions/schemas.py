"""JSON Schemas that clients send, and the bounds of a request and of a key on them."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from rlm_broker.concurrency.threads import aside, waiting
from rlm_broker.errors import ConfigurationError
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner
from rlm_broker.values.json_schemas import CheckedSchema

MOST_CHARS_OF_ALL: Final = 100_000
"""Characters of all tools of a request."""
MOST_NODES_OF_ALL: Final = 5_000
"""Schemas within all tools of a request."""
MOST_WAITING: Final = 64
"""Checks of schemas of one key that wait for their turn."""
RETRY_AFTER_S: Final = 1.0
"""Seconds after which another attempt is reasonable."""
T = TypeVar("T")


class Room:
    """Room for all schemas of one request together.

    Args:
        param: Field of the request that has them.
    """

    def __init__(self, param: str) -> None:
        self._param = param
        self._chars = MOST_CHARS_OF_ALL
        self._nodes = MOST_NODES_OF_ALL

    def take(self, chars: int, nodes: int = 0) -> None:
        """Count a schema or a text.

        Raises:
            ApiError: 400: it does not fit.
        """
        self._chars -= chars
        self._nodes -= nodes
        if self._chars < 0 or self._nodes < 0:
            why = f"have more than {MOST_CHARS_OF_ALL:,} characters, or {MOST_NODES_OF_ALL:,} parts in their schemas"
            raise ApiError(400, f"the {self._param} {why}: give fewer, or simpler ones", param=self._param)


async def checked_in_turn(owner: Owner, check: Callable[[], T]) -> T:
    """Check the schemas of a request in a thread, in the turn of its owner, and return what `check` returns.

    Raises:
        Busy: Many requests of the owner wait for it already.
        ApiError: As for `safe_schema`.
    """
    if waiting(owner.name) >= MOST_WAITING:
        said = f"{MOST_WAITING} requests of this key wait for a check of their schemas: try again later"
        raise Busy(said, RETRY_AFTER_S)

    def work() -> T:
        CheckedSchema.belong_to(owner.name)  # in the thread's copy of the caller's variables
        return check()

    return await aside(work, owner.name)


def safe_schema(schema: Any, param: str, room: Room | None = None) -> CheckedSchema:
    """Return a schema of a client that can be checked in bounded time. Call it by `checked_in_turn`.

    Args:
        schema: Schema of the client.
        param: Place of the schema in the request.
        room: Room that it takes its part of, or None.

    Raises:
        ApiError: 400: it is no valid schema, too large, or has keywords that are not supported; or the room is full.
    """
    try:
        return CheckedSchema(schema, param, None if room is None else room.take)
    except ConfigurationError as error:
        raise ApiError(400, str(error), param=param) from None
