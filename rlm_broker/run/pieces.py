"""The calls that a batch needs: equal prompts are sent once, unless the query wants samples."""

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from rlm_broker.clients.base import CallId
from rlm_broker.run.asking import prompt_key
from sandbox_worker.wire.messages import Query

KEYS_IN_A_ROW = 512
"""Prompts of a batch that are compared before the event loop runs other tasks. Large prompts count several times."""

Piece = tuple[int, int, CallId]
"""One call of a batch: the index of its prompt, the number of its sample, and its id."""


class Batch(msgspec.Struct):
    """Progress of the calls of one batch.

    Attributes:
        number: Number among the batches of its tree, from 1.
        of: Calls that it makes in all.
        done: Calls that have ended.
    """

    number: int
    of: int
    done: int = 0


class Turns:
    """Decides after which of many prompts the event loop runs other tasks."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def is_due(self, size: int) -> bool:
        """Count a prompt of `size` bytes or characters, and once more for each 4,096 of them; return whether to yield
        now."""
        self._in_a_row += 1 + (size >> 12)
        if self._in_a_row < KEYS_IN_A_ROW:
            return False
        self._in_a_row = 0
        return True


async def pieces_of(query: Query, new_id: Callable[[], CallId]) -> tuple[list[Piece], list[int]]:
    """Return the calls that a batch needs, and for each prompt the place of its call among them."""
    todo: list[Piece] = []
    asked: list[int] = []
    places: dict[tuple[str | bytes, int], int] = {}
    seen = Counter[str | bytes]()
    turns = Turns()
    for index in range(len(query.prompts)):
        key, size = prompt_key(query.prompts, index)
        each = (key, seen[key] if query.samples else 0)
        seen[key] += 1
        if each not in places:
            places[each] = len(todo)
            todo.append((index, each[1], new_id()))
        asked.append(places[each])
        if turns.is_due(size):
            await asyncio.sleep(0)
    return todo, asked
