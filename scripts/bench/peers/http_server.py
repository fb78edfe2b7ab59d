"""A server on loopback: the argument says which. It is sent words, and answers with its address, its memory or figures.

`service` is ours. `memfd` is a bare ASGI application that writes each body into a memfd, which is the least that an
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

import uvicorn

from rlm_broker.rlm import RLM
from rlm_broker.service.app import Service

BLOCK = "x = 1"
AT_ONCE = 4


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
        self.service = Service(RLM("offline")) if kind == "service" else None
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
        assert self.loop is not None
        work = {"execute": self._execute, "round_trip": self._round_trip}[word]
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result()

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

    def _parts(self) -> Any:
        assert self.service is not None
        return self.service._parts


if __name__ == "__main__":
    served = _Served(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(served.answer(line.strip())), flush=True)
    served.server.should_exit = True
    served.thread.join()
