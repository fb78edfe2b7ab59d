"""Answers that further attempts of a question take again: those that came, and those that are still under way.

An answer is found by the digest of what was asked. Equal requests are told apart by their order alone. A request that
was under way when its attempt was abandoned goes on, and the next attempt that asks the same joins it. One that ends
before it is joined is an answer like others, and one that fails leaves no trace.
"""

import asyncio
from collections import Counter, defaultdict
from typing import Generic, TypeVar

from rlm_broker.concurrency.deadline import to_its_end

T = TypeVar("T")


class Answered(Generic[T]):
    """Answers to the requests of one question, over all of its attempts. Lives on one event loop."""

    def __init__(self) -> None:
        self._answers = defaultdict[bytes, list[T]](list)
        self._under_way = defaultdict[bytes, list[asyncio.Task[T]]](list)
        """Requests of abandoned attempts, by their digest."""

    def add(self, key: bytes, answer: T) -> None:
        """Keep an answer for further attempts."""
        self._answers[key].append(answer)

    def answer(self, key: bytes, number: int) -> T | None:
        """Return the answer to the request of that number, from 0; None if there is none yet."""
        answers = self._answers.get(key, ())
        return answers[number] if number < len(answers) else None

    def join(self, key: bytes) -> "asyncio.Task[T] | None":
        """Return a request that an abandoned attempt has left under way; None if there is none."""
        left = self._under_way.get(key)
        return left.pop(0) if left else None

    def leave(self, key: bytes, request: "asyncio.Task[T]") -> None:
        """Keep a request that is under way for a further attempt to join."""
        self._under_way[key].append(request)
        request.add_done_callback(lambda _: self._forget(key, request))

    async def aclose(self) -> None:
        """End the requests of abandoned attempts, which no further attempt will join."""
        left = [request for requests in self._under_way.values() for request in requests]
        self._under_way.clear()
        for request in left:
            request.cancel()
        if left:
            await to_its_end(lambda: _ended(left))

    def _forget(self, key: bytes, request: "asyncio.Task[T]") -> None:
        left = self._under_way.get(key, [])
        if request in left:
            left.remove(request)
        if not left:
            self._under_way.pop(key, None)


class Asking(Generic[T]):
    """The requests of one attempt.

    Attributes:
        is_abandoned: Whether requests that are cancelled go on, for the next attempt to join.
    """

    def __init__(self, answered: Answered[T]) -> None:
        self.is_abandoned = False
        self._answered = answered
        self._asked = Counter[bytes]()

    def number(self, key: bytes) -> int:
        """Return how many such requests the attempt has made before, and count this one."""
        number = self._asked[key]
        self._asked[key] += 1
        return number

    async def ended(self, key: bytes, request: "asyncio.Task[T]") -> T:
        """Wait for the answer to a request. If the wait is cancelled, the request ends too, or is left under way."""
        request.add_done_callback(_read)
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            if request.done():
                raise
            if self.is_abandoned:
                self._answered.leave(key, request)
            else:
                request.cancel()
                await to_its_end(lambda: _ended([request]))
            raise


async def _ended(requests: "list[asyncio.Task[T]]") -> None:
    await asyncio.wait(requests)


def _read(request: "asyncio.Task[T]") -> None:
    """Read the error of a request, so that asyncio does not report it where no attempt waits for it any more."""
    if not request.cancelled():
        request.exception()
