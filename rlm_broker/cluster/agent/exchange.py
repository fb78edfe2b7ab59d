"""Requests of one run to the orchestrator, and the answers to them."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import (
    Ask,
    FromBroker,
    Judge,
    Judged,
    Leave,
    Reply,
    ReplyText,
    Retried,
    ToolReply,
    UseTool,
)
from rlm_broker.errors import ProtocolViolation

Answer = TypeVar("Answer", Reply, ToolReply, Judged)
Told = Callable[[ReplyText | Retried], None]


class Exchange:
    """Sends the requests of one run, and gives each answer to the request of its number.

    Args:
        link: Link to the orchestrator, which all runs of the node share.
        run: Number of the run on the link.
    """

    def __init__(self, link: Link[FromBroker], run: int) -> None:
        self.run = run
        self._link = link
        self._last = 0
        self._waiting: dict[int, asyncio.Future[Reply | ToolReply | Judged]] = {}
        self._told: dict[int, Told] = {}

    def number(self) -> int:
        """Return the number of a new request."""
        self._last += 1
        return self._last

    async def asked(self, request: Ask | UseTool | Judge, wanted: type[Answer], told: Told | None = None) -> Answer:
        """Send a request, and wait for its answer. Cancelling it tells the orchestrator that no one waits.

        Args:
            request: Request with a number of this exchange.
            wanted: Class of the answer.
            told: Called with what comes before the answer.

        Raises:
            LinkLost: The link has ended.
            FrameTooLarge: The request is larger than a message may be.
            ProtocolViolation: The answer is of another class.
        """
        number = request.call
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        if told is not None:
            self._told[number] = told
        try:
            await self._link.send(request)
            answer = await future
        except asyncio.CancelledError:
            self._link.post(Leave(self.run, number))
            raise
        finally:
            del self._waiting[number]
            self._told.pop(number, None)
        if not isinstance(answer, wanted):
            raise ProtocolViolation(f"the orchestrator answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    def take(self, message: Reply | ToolReply | Judged | ReplyText | Retried) -> None:
        """Give a message to the request of its number. One that does not wait any more gets none."""
        if isinstance(message, ReplyText | Retried):
            if (told := self._told.get(message.call)) is not None:
                told(message)
        elif (future := self._waiting.get(message.call)) is not None and not future.done():
            future.set_result(message)
