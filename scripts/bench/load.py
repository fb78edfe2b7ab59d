"""Any number of callers at one port, in a process of its own: how many requests are answered, and how long each takes.

echo '{"port": 4711, "callers": 32, "seconds": 1, "way": "one_shot"}' | python -m scripts.bench.load
"""

import asyncio
import contextlib
import json
import resource
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import PREFIX, encode_frame
from sandbox_worker.wire.messages import Hello, Ready, Result, encode

Way = Literal["session", "echo", "one_shot"]
"""A session of ours on a connection that stays; its frames without the greeting; a connection for each request."""

MAX_FRAME_BYTES = 1 << 20
PATIENCE_S = 10.0
"""Seconds to wait for replies after the last request."""
ROOM = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """Result of a load.

    Attributes:
        rate: Replies a second.
        p99: Seconds that 99 of 100 requests took at most; a lost one counts with the time that it was waited for.
        answered: Requests.
        lost: Requests that were refused, cut off, or not answered in time.
    """

    rate: float
    p99: float
    answered: int
    lost: int


async def load(port: int, callers: int, seconds: float, way: Way, tokens: Sequence[str] = ()) -> Outcome:
    """Have `callers` ask for `seconds`. Each sends its next request when it has its reply."""
    order = {"port": port, "callers": callers, "seconds": seconds, "way": way, "tokens": list(tokens)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(order).encode())
    return Outcome(**json.loads(out))


# -- in the process of the callers -----------------------------------------------------------------------------------


def frame(payload: bytes) -> bytes:
    """Return a frame: the payload behind its length."""
    return encode_frame(payload, MAX_FRAME_BYTES)


QUERY = frame(b'{"type":"query","id":"1:1","want":"llm","prompts":["hello"]}')
"""An id is free again when its reply is there, so that every request of a caller may be the same bytes."""
ONE_SHOT = frame(b'{"prompt":"hello","model":null,"depth":0}')


class _Callers:
    """All callers, on one thread."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._address = ("127.0.0.1", order["port"])
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._asked: dict[int, float] = {}
        self._got: dict[int, bytes] = {}
        self._latencies: list[float] = []
        self._begin_at = 0.0
        self._in_time = 0
        self._lost = 0
        self._order = order

    def run(self) -> Outcome:
        """Ask until the time is over, then wait for what is still open."""
        if self._order["way"] == "one_shot":
            self._begin_at = time.perf_counter()
            for _ in range(self._order["callers"]):
                self._dial()
        else:
            self._open_sessions()
            self._begin_at = time.perf_counter()
            for fd in self._sockets:
                self._ask(fd)
        while self._asked and time.perf_counter() < self._last_at + PATIENCE_S:
            for fd, events in self._poll.poll(1.0):
                if events & select.EPOLLOUT:
                    self._send_first(fd)
                elif self._has_reply(fd):
                    self._replied(fd)
        if self._order["way"] == "session":
            for caller in self._sockets.values():
                caller.sendall(frame(encode(Result(block=1, status="ok"))))
        lost = self._lost + len(self._asked)
        waited = sorted(self._latencies + [PATIENCE_S] * lost)
        rate = self._in_time / self._order["seconds"]
        return Outcome(rate, waited[int(0.99 * len(waited))], len(self._latencies), lost)

    @property
    def _last_at(self) -> float:
        return self._begin_at + float(self._order["seconds"])

    def _open_sessions(self) -> None:
        tokens = self._order["tokens"]
        for number in range(self._order["callers"]):
            caller = socket.create_connection(self._address)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[caller.fileno()] = caller
            if tokens:
                caller.sendall(frame(encode(Hello(token=tokens[number]))))
                caller.recv(ROOM)  # welcome
                caller.sendall(frame(encode(Ready(RELEASE))))
        for fd, caller in self._sockets.items():
            if tokens:
                caller.recv(ROOM)  # the block that it runs from now on
            caller.setblocking(False)
            self._poll.register(fd, select.EPOLLIN)

    def _ask(self, fd: int) -> None:
        self._asked[fd] = time.perf_counter()
        self._sockets[fd].send(QUERY)

    def _replied(self, fd: int) -> None:
        now = time.perf_counter()
        self._latencies.append(now - self._asked.pop(fd))
        self._in_time += now < self._last_at
        if self._order["way"] == "one_shot":
            self._hang_up(fd)
        elif now < self._last_at:
            self._ask(fd)

    def _has_reply(self, fd: int) -> bool:
        try:
            data = self._sockets[fd].recv(ROOM)
        except OSError:
            data = b""
        if not data:
            self._lose(fd)
            return False
        got = self._got.pop(fd, b"") + data
        if len(got) >= PREFIX.size and len(got) - PREFIX.size >= int(PREFIX.unpack_from(got)[0]):
            return True
        self._got[fd] = got
        return False

    # -- a connection for each request -------------------------------------------------------------------------------

    def _dial(self) -> None:
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        caller.setblocking(False)
        caller.connect_ex(self._address)
        self._sockets[caller.fileno()] = caller
        self._asked[caller.fileno()] = time.perf_counter()
        try:
            caller.send(ONE_SHOT)  # on loopback it is connected by now, unless the backlog is full
            self._poll.register(caller.fileno(), select.EPOLLIN)
        except OSError:
            self._poll.register(caller.fileno(), select.EPOLLOUT)

    def _send_first(self, fd: int) -> None:
        try:
            self._sockets[fd].send(ONE_SHOT)
            self._poll.modify(fd, select.EPOLLIN)
        except OSError:
            self._lose(fd)

    def _lose(self, fd: int) -> None:
        self._lost += 1
        self._asked.pop(fd, None)
        self._hang_up(fd)

    def _hang_up(self, fd: int) -> None:
        """Close a connection. A one-shot caller then opens the next one."""
        self._poll.unregister(fd)
        self._sockets.pop(fd).close()
        if self._order["way"] == "one_shot" and time.perf_counter() < self._last_at:
            self._dial()


def _main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # then a thousand callers will say so
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    outcome = _Callers(json.load(sys.stdin)).run()
    json.dump(outcome.__dict__, sys.stdout)


if __name__ == "__main__":
    _main()
