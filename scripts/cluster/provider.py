"""A provider of a model that plays a fixed part, and counts what it is asked and what it is paid for.

    python -m scripts.cluster.provider DELAY_S HELD_AFTER

It speaks OpenAI's chat completions on a free port of loopback, which it prints. `GET /counts` has the counts. After
`HELD_AFTER` answers it gives no further one, so that a fault meets runs that wait, however slow the machine is.
`GET /held` is answered then, and `GET /go_on` ends it.
"""

import asyncio
import json
import sys
import time
from typing import Any

from aiohttp import web

TURNS = (
    "```repl\nnumber = int(context.split()[-1])\nprint(llm_query(f'say something about item {number}'))\n```",
    "```repl\ntotal = sum(range(number + 1))\nprint(total)\n```",
    "```repl\nFINAL(str(total))\n```",
)
"""Replies of a root run, one a turn. Each run has a context and a question of its own, so no two calls are alike."""
AFTER_A_KILL = "```repl\nFINAL(str(sum(range(int(context.split()[-1]) + 1))))\n```"
"""Reply to an observation that a REPL was killed: code that needs no variable but the context."""
CALLS_PER_RUN = len(TURNS) + 1


def item(number: int) -> str:
    """Return the line of an item."""
    return json.dumps({"id": str(number), "question": question_of(number), "context": f"item {number}"})


def question_of(number: int) -> str:
    """Return the question of an item."""
    return f"What is the sum of all numbers up to that of item {number}?"


def answer_of(number: int) -> str:
    """Return the answer that an item must have."""
    return str(number * (number + 1) // 2)


class Provider:
    """Answers each call after a delay. A caller that has left by then gets none."""

    def __init__(self, delay_s: float, held_after: int) -> None:
        self._delay_s = delay_s
        self._held_after = held_after
        self._holds, self._goes_on = asyncio.Event(), asyncio.Event()
        self._answered = dict[str, float]()
        self._again = list[float]()
        self._asked = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one call."""
        self._asked += 1
        body = await request.json()
        await asyncio.sleep(self._delay_s)
        if self._paid >= self._held_after:
            self._holds.set()
            await self._goes_on.wait()
        if request.transport is None or request.transport.is_closing():
            return web.Response()
        key = json.dumps(body["messages"])
        if key in self._answered:
            self._again.append(self._answered[key])
        self._answered[key] = time.monotonic()
        return web.json_response(_completion(_reply(body["messages"])))

    async def counts(self, _request: web.Request) -> web.StreamResponse:
        """Return what was asked and paid, and for each call that was paid again when it was answered before."""
        return web.json_response({"asked": self._asked, "paid": self._paid, "again": self._again})

    async def held(self, _request: web.Request) -> web.StreamResponse:
        """Return when a call is held."""
        await self._holds.wait()
        return web.Response()

    async def go_on(self, _request: web.Request) -> web.StreamResponse:
        """Hold no call any more."""
        self._goes_on.set()
        return web.Response()

    @property
    def _paid(self) -> int:
        return len(self._answered) + len(self._again)


def _reply(messages: list[dict[str, Any]]) -> str:
    spoken = sum(message["role"] == "assistant" for message in messages)
    is_query = len(messages) == 1 and str(messages[0]["content"]).startswith("say something")
    if is_query:
        return "something"
    said = str(messages[-1]["content"])
    lost = "was lost" in said or "was killed" in said or "NameError" in said
    return AFTER_A_KILL if lost else TURNS[min(spoken, len(TURNS) - 1)]


def _completion(text: str) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "counted",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


async def _serve(delay_s: float, held_after: int) -> None:
    provider = Provider(delay_s, held_after)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", provider.complete)
    app.router.add_get("/counts", provider.counts)
    app.router.add_get("/held", provider.held)
    app.router.add_get("/go_on", provider.go_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), int(sys.argv[2])))
