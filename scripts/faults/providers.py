"""Faults of providers: a real HTTP server on loopback, which answers well until the phase has come."""

import contextlib
import functools
import gzip
import http.server
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.models.model import Model
from rlm_broker.results import ChatMessage
from scripts.faults.stage import Script, Stage

ENDLESS_S = 30.0
"""Time in seconds after which an endless answer ends all the same, if its reader has not left."""
BOMB_BYTES = 1 << 30
Misbehave = Callable[["_Request"], None]
NOT_TEXT = b'{"choices": [{"message": {"content": {"a": 1}}}], "usage": {"prompt_tokens": "many"}}'
"""A completion whose fields are of other kinds."""
SLOW_DOWN = b'{"error": {"message": "slow down"}}'


class _Request(http.server.BaseHTTPRequestHandler):
    """One request, answered by the stage's script, or at the phase by the fault."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = tuple(ChatMessage(each["role"], each["content"]) for each in asked["messages"])
        text = self.server.text(messages)
        if text is None:
            self.close_connection = True
            self.server.misbehave(self)
        else:
            self.reply(200, completion(text))

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole answer."""
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"content-type": "application/json", "content-length": str(len(body)), **named}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no line."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, stage: Stage, misbehave: Misbehave) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.misbehave = misbehave
        self._stage = stage
        self._script = Script(stage)
        self._has_come = False

    def text(self, messages: tuple[ChatMessage, ...]) -> str | None:
        """The answer; None for one that the fault takes the place of."""
        is_loop = messages[0].role == "system"
        asked = LMRequest(messages, is_loop=is_loop)
        text, is_at_gate = self._script.said(asked)
        return None if is_at_gate and self._stage.is_armed else text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left."""


def misbehaves(how: Misbehave) -> Callable[[Stage], None]:
    """Have the stage's model at a server that misbehaves from the phase on."""

    def prepare(stage: Stage) -> None:
        server = _Server(stage, how)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = Model(name="script", base_url=f"http://127.0.0.1:{server.server_address[1]}/v1", max_retries=1)
        stage.model = model
        stage.limits = stage.limits.replace(call_timeout_s=3.0)

        def end() -> None:
            server.shutdown()
            server.server_close()

        stage.at_end.append(end)

    return prepare


def completion(text: str) -> bytes:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    return json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


# -- how -----------------------------------------------------------------------------------------------------------


def reset(request: _Request) -> None:
    """Reset the connection."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def stall(request: _Request) -> None:
    """Send the head and half of the body, and then stall."""
    body = completion("answered")
    request.send_response(200)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    request.wfile.write(body[: len(body) // 2])
    request.wfile.flush()
    request.connection.settimeout(ENDLESS_S)
    request.connection.recv(1)


def endless(request: _Request) -> None:
    """Send body without an end."""
    request.send_response(200)
    request.send_header("content-type", "application/json")
    request.send_header("connection", "close")
    request.end_headers()
    until = time.monotonic() + ENDLESS_S
    while time.monotonic() < until:
        request.wfile.write(b" " * 65_536)
        time.sleep(0.001)


def endless_head(request: _Request) -> None:
    """Send headers without an end."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    until = time.monotonic() + ENDLESS_S
    while time.monotonic() < until:
        request.wfile.write(b"x-more: " + b"x" * 4096 + b"\r\n")


def replies(status: int, body: bytes | Callable[[], bytes] = b"", **headers: str) -> Misbehave:
    """Send a whole answer of this kind."""

    def answer(request: _Request) -> None:
        request.reply(status, body if isinstance(body, bytes) else body(), **headers)

    return answer


@functools.cache
def bomb() -> bytes:
    """Return a megabyte that is a gigabyte."""
    return gzip.compress(bytes(BOMB_BYTES // 64), 9) * 64  # a gzip file may have several members


@contextlib.contextmanager
def serve_slowly(pause_s: float = 0.15) -> Iterator[int]:
    """Serve runs of three turns, each of which takes a while; yield the port."""

    class Slow(_Request):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn = sum(each["role"] == "assistant" for each in asked["messages"])
            time.sleep(pause_s)
            code = "print(len(context), flush=True)\nimport time\ntime.sleep(0.1)"
            self.reply(200, completion("FINAL(done)" if turn == 2 else f"So far {turn}.\n```repl\n{code}\n```"))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
