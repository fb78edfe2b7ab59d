"""Clients that stand in for models."""

import asyncio

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ModelFailed
from rlm_broker.usage import Usage


class Echo(BaseClient):
    """Replies, fails and uses what the mock behind the recorded frames did."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    async def complete(self, request: LMRequest) -> LMReply:
        last = request.messages[-1].content
        if last == "boom":
            raise ModelFailed("boom")
        return LMReply(f"ok {last}", Usage(1, 10, 5, 0.01))


class Hanging(BaseClient):
    """Never replies; says when it was asked and when that was cancelled."""

    model_name = "hanging"

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


class Gate(BaseClient):
    """A model whose calls wait until the test opens the gate. It notes the questions in their order."""

    model_name = "gate"

    def __init__(self, usage: Usage | None = None) -> None:
        self.asked: list[str] = []
        self.cancelled = 0
        self.is_open = asyncio.Event()
        self._usage = usage or Usage(1, 1, 1, 0.0)

    async def complete(self, request: LMRequest) -> LMReply:
        self.asked.append(request.question or "")
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return LMReply("FINAL(yes)", self._usage)
