"""A broker for tests of what stands before it: its calls wait until the test lets them go on."""

import asyncio
from collections.abc import Hashable
from typing import Any

from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.routing import Routing
from rlm_broker.results import Call, ChatMessage
from rlm_broker.usage import Usage

CLIENT = ScriptedClient([])


class Provider:
    """A broker whose calls wait until the test lets them go on.

    Attributes:
        asked: Texts of the requests, in the order in which they were sent.
        cancelled: Those that were cancelled.
    """

    def __init__(self) -> None:
        self.routing = Routing(CLIENT)
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.answers = asyncio.Event()
        self.error: Exception | None = None

    async def complete(
        self,
        client: Client,  # noqa: ARG002
        request: LMRequest,
        timeout_s: float | None = None,  # noqa: ARG002
        *,
        session: Hashable = None,  # noqa: ARG002
        on_retry: Any = None,  # noqa: ARG002
    ) -> Call:
        text = str(request.messages[-1].content)
        self.asked.append(text)
        number = len(self.asked)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        if self.error is not None:
            raise self.error
        if request.on_text is not None:
            request.on_text(f"{text} {number}")
        return Call("m", f"{text} {number}", Usage(1, 10, 1, 0.5), 0.1)


def request(text: str, **more: Any) -> LMRequest:
    return LMRequest((ChatMessage("user", text),), **more)
