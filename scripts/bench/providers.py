"""Sub-calls: calls a second to an OpenAI-compatible server on loopback, through each client."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp

from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.results import ChatMessage
from scripts.bench.measure import Effort, by_turns, many
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Check, Row, Side, side

AT_ONCE = 32
REQUEST = LMRequest((ChatMessage("user", "hello"),))
BODY = {"model": "test", "messages": [{"role": "user", "content": "hello"}]}


def through_litellm(effort: Effort) -> list[Row]:
    """The client that reaches every provider."""
    return _row(
        "sub-calls to a loopback OpenAI-compatible server, through litellm",
        lambda url: LiteLLMClient("openai/test", api_base=url, api_key="none"),
        200,
        effort,
        lambda rate, litellm, _bare: [rate.at_least_times(0.9, litellm)],
    )


def direct(effort: Effort) -> list[Row]:
    """The client that speaks the protocol itself."""
    return _row(
        "sub-calls to a loopback OpenAI-compatible server, direct client",
        lambda url: OpenAICompatibleClient(url, "test"),
        2_000,
        effort,
        lambda rate, litellm, bare: [rate.at_least_times(5, litellm), rate.at_least_times(0.6, bare)],
    )


def _row(
    what: str,
    client_of: Callable[[str], Client],
    calls: int,
    effort: Effort,
    checks: Callable[[Side, Side, Side], list[Check]],
) -> list[Row]:
    with subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        try:
            with Peer("litellm", "litellm_calls.py", None, url) as litellm:
                ours, http, theirs = by_turns(
                    effort.times(5),
                    lambda: [asyncio.run(_client_rate(client_of(url), calls))],
                    lambda: [asyncio.run(_http_rate(url, 2_000))],
                    lambda: litellm.samples("calls"),
                )
        finally:
            server.kill()
    rate, peer, bare = side(OURS, "/s", ours), litellm.side("/s", theirs), side("aiohttp alone", "/s", http)
    return [Row(what, rate, (bare, peer), checks(rate, peer, bare), f"{AT_ONCE} at a time")]


async def _client_rate(client: Client, calls: int) -> float:
    try:
        await client.complete(REQUEST)
        return await many(calls, AT_ONCE, lambda: client.complete(REQUEST))
    finally:
        await client.aclose()


async def _http_rate(url: str, calls: int) -> float:
    async with aiohttp.ClientSession() as session:

        async def call() -> str:
            async with session.post(f"{url}/chat/completions", json=BODY) as response:
                reply = await response.json()
                return str(reply["choices"][0]["message"]["content"])

        await call()
        return await many(calls, AT_ONCE, call)


# -- the server, in a process of its own: fast enough not to be what is measured ---------------------------------------


_COMPLETION: dict[str, Any] = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "test",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_PAYLOAD = json.dumps(_COMPLETION).encode()
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_PAYLOAD),
    _PAYLOAD,
)


class _Server(asyncio.Protocol):
    """Says the same to every request, without looking at more of it than its length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._got = b""

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (head := self._got.find(b"\r\n\r\n")) >= 0:
            length = self._got[:head].lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            end = head + 4 + int(length or 0)
            if len(self._got) < end:
                return
            self._got = self._got[end:]
            self._transport.write(_REPLY)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
