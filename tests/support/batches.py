"""Models and items for tests of batches."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ModelFailed
from rlm_broker.usage import Usage


class CountingModel(BaseClient):
    """Answers each call with a function of its last message, and keeps no request.

    Attributes:
        calls: Calls that were answered.
        open: Calls that are under way, by the text of their last message.
        gate: Calls wait until it is set.
        reply: Makes the reply to the text of a last message.
    """

    model_name = "counting"
    context_tokens = 100_000

    def __init__(self, reply: Callable[[str], str] = str.upper, cost: float | None = 0.25) -> None:
        self.calls: list[str] = []
        self.open: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.reply = reply
        self._cost = cost

    async def complete(self, request: LMRequest) -> LMReply:
        """Return the reply."""
        text = str(request.messages[-1].content)
        self.open.add(text)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            try:
                said = self.reply(text)
            except ValueError as error:
                raise ModelFailed(str(error)) from None
        finally:
            self.open.discard(text)
        self.calls.append(text)
        return LMReply(said, Usage(1, 10, 5, self._cost))


def items(number: int, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield items, each of which is a small text."""
    for each in range(start, start + number):
        yield {"id": f"item {each}", "question": f"question {each}?", "context": f"context {each}\n"}


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in out.read_text().splitlines()]


def comparable(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return lines by the ids of their items, without what differs from one process to another."""
    return {line["id"]: {key: line[key] for key in line if key not in ("seconds", "replayed")} for line in lines}
