"""A server on loopback: the argument says which. It is sent words, and answers with its address, its memory or figures.

`service`, `runs` and `hanging` are ours: with the model "offline", with one that answers in one turn, and with one that
never answers. `memfd` is a bare ASGI application that writes each body into a memfd, which is the least that an
upload can cost.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.rlm import RLM
from rlm_broker.serve.app import Service
from rlm_broker.usage import Usage

BLOCK = "x = 1"
AT_ONCE = 4
RUNS_AT_ONCE = 16
RUNS_EACH = 5
CONTEXT = "some context"


class OneTurn:
    """Answers in one turn, by a block that looks at the context."""

    model_name = "one-turn"

    def __init__(self) -> None:
        self.replied_at = 0.0

    async def complete(self, request: LMRequest) -> LMReply:
        """Reply with the block."""
        del request
        self.replied_at = time.time()
        return LMReply("```repl\nFINAL(str(len(context)))\n```", Usage(total_calls=1))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


class Hanging(OneTurn):
    """Never replies."""

    model_name = "hanging"

    async def complete(self, request: LMRequest) -> LMReply:
        """Wait until the call is cancelled."""
        del request
        await asyncio.Event().wait()
        raise AssertionError


MODELS: dict[str, Callable[[], Any]] = {"service": lambda: "offline", "runs": OneTurn, "hanging": Hanging}


async def to_memfd(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
    """Write a body into a memfd, and drop it."""
    if scope["type"] != "http":
        await receive()
        await send({"type": f"{scope['type']}.startup.complete"})
        await receive()
        await send({"type": f"{scope['type']}.shutdown.complete"})
        return
    fd = os.memfd_create("body")
    more = True
    while more:
        message = await receive()
        os.write(fd, message.get("body", b""))
        more = message.get("more_body", False)
    os.close(fd)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


class _Server(uvicorn.Server):
    """Handles no signal, since a thread gets none."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Served:
    """The server in a thread, and what it can be asked."""

    def __init__(self, kind: str) -> None:
        self.model: Any = MODELS[kind]() if kind in MODELS else None
        self.service = None if self.model is None else Service(RLM(self.model))
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on its own sockets alone
        config = uvicorn.Config(self.service or to_memfd, log_config=None, access_log=False)
        self.server = _Server(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve([self.listening])

    def answer(self, word: str) -> object:
        if word == "address":
            key = self.service.made_key if self.service is not None else ""
            return {"port": self.listening.getsockname()[1], "key": key}
        if word == "peak":
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            return [int(peak[1]) * 1024.0 if peak else 0.0]
        if word == "replied":
            return [self.model.replied_at]
        if word == "rss":
            return [float(psutil.Process().memory_info().rss)]
        assert self.loop is not None
        works = {
            "execute": self._execute,
            "round_trip": self._round_trip,
            "runs": self._runs,
            "running": self._running,
            "gone": self._gone,
        }
        return asyncio.run_coroutine_threadsafe(works[word](), self.loop).result()

    async def _execute(self) -> list[float]:
        """Measure one-shot blocks per second, in this process."""
        parts = self._parts()

        async def one() -> None:
            for _ in range(25):
                async with parts.rlm.sandbox.repl() as repl:
                    await repl.aexecute(BLOCK)

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        return [25 * AT_ONCE / (time.perf_counter() - started)]

    async def _round_trip(self) -> list[float]:
        """Time blocks of a live REPL, in this process."""
        taken = []
        async with self._parts().rlm.sandbox.repl() as repl:
            for _ in range(50):
                started = time.perf_counter()
                await repl.aexecute(BLOCK)
                taken.append(time.perf_counter() - started)
        return taken

    async def _runs(self) -> list[float]:
        """Measure one-turn runs per second, in this process."""
        parts = self._parts()

        async def some() -> None:
            for _ in range(RUNS_EACH):
                completion = await parts.rlm.acompletion(CONTEXT, "How long is it?")
                assert completion.response == str(len(CONTEXT))

        started = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(RUNS_AT_ONCE)))
        return [RUNS_EACH * RUNS_AT_ONCE / (time.perf_counter() - started)]

    async def _running(self) -> list[float]:
        """Wait until a run has asked its model."""
        parts = self._parts()
        while not any(hosted.is_paid for hosted in parts.runs.all() if hosted.state == "running"):
            await asyncio.sleep(0.0005)
        return []

    async def _gone(self) -> list[float]:
        """Return the Unix time at which no run is left."""
        parts = self._parts()
        while parts.runs.running:
            await asyncio.sleep(0.0005)
        return [max(hosted.ended_at or 0.0 for hosted in parts.runs.all())]

    def _parts(self) -> Any:
        assert self.service is not None
        return self.service._parts


if __name__ == "__main__":
    served = _Served(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(served.answer(line.strip())), flush=True)
    served.server.should_exit = True
    served.thread.join()
