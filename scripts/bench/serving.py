"""The server over HTTP next to the same work in its process: one-shot blocks, and blocks of a live container."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from scripts.bench.measure import Effort, by_turns, seconds
from scripts.bench.peer import Peer
from scripts.bench.peers.http_server import AT_ONCE, BLOCK
from scripts.bench.row import OURS, Row, side

SERVER = "http_server.py"


class Connection:
    """A connection that is kept, with the least that a client can cost.

    Args:
        port: Port on loopback.
        key: Text of the key.
    """

    def __init__(self, port: int, key: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._key = key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def begin(self, path: str, content_type: str, size_bytes: int) -> None:
        """Send the head of a request, whose body follows by `send`."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {size_bytes}\r\n\r\n"
        )
        self.send(head.encode())

    def send(self, data: bytes) -> None:
        """Send a piece of a body."""
        self._socket.sendall(data)

    def answer(self) -> Any:
        """Return the JSON of an answer with status 200."""
        head, data = b"", b""
        while not (end := data.find(b"\r\n\r\n") + 4) > 3:
            data += self._received()
        head, data = data[:end].lower(), data[end:]
        assert head.startswith(b"http/1.1 200"), (head, data)
        length = int(head.partition(b"content-length:")[2].split()[0])
        while len(data) < length:
            data += self._received()
        return json.loads(data)

    def post(self, path: str, body: object) -> Any:
        """Send JSON; return the JSON of the answer."""
        data = json.dumps(body).encode()
        self.begin(path, "application/json", len(data))
        self.send(data)
        return self.answer()

    def delete(self, path: str) -> Any:
        """Delete a thing; return the JSON of the answer."""
        head = f"DELETE {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n\r\n"
        self.send(head.encode())
        return self.answer()

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """Send JSON; yield the pieces of an answer in chunks, the head with the first."""
        data = json.dumps(body).encode()
        self.begin(path, "application/json", len(data))
        self.send(data)
        return self._chunks()

    def events(self, path: str) -> Iterator[bytes]:
        """Ask for a stream of events; yield its pieces as `stream` does."""
        self.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n\r\n".encode())
        return self._chunks()

    def _chunks(self) -> Iterator[bytes]:
        end = b""
        while not end.endswith(b"0\r\n\r\n"):
            piece = self._received()
            end = (end + piece)[-5:]
            yield piece

    def _received(self) -> bytes:
        data = self._socket.recv(1 << 16)
        assert data, "the server has closed the connection"
        return data


def execute(effort: Effort) -> list[Row]:
    """Compare one-shot blocks per second over HTTP and in the server's process."""
    with Peer("in its process", SERVER, None, "service") as server, ThreadPoolExecutor(AT_ONCE) as threads:
        address = server.ask("address")

        def one(_number: int) -> None:
            with Connection(**address) as connection:
                for _ in range(25):
                    connection.post("/v1/execute", {"code": BLOCK})

        def over_http() -> list[float]:
            started = time.perf_counter()
            list(threads.map(one, range(AT_ONCE)))
            return [25 * AT_ONCE / (time.perf_counter() - started)]

        over_http()
        ours, inside = by_turns(effort.times(20), over_http, lambda: server.samples("execute"))
        taken, floor = side(OURS, "/s", ours), server.side("/s", inside)
    return [Row(f"`POST /v1/execute`, {AT_ONCE} clients", taken, [floor], [taken.at_least_times(0.9, floor)])]


def container(effort: Effort) -> list[Row]:
    """Compare the round trip of a block of a live container over HTTP and in the server's process."""
    with Peer("in its process", SERVER, None, "service") as server:
        address = server.ask("address")
        with Connection(**address) as connection:
            id = connection.post("/v1/containers", {"name": "bench"})["id"]

        def over_http() -> list[float]:
            with Connection(**address) as connection:
                path = f"/v1/containers/{id}/execute"
                return seconds(lambda: connection.post(path, {"code": BLOCK}), 50)

        over_http()
        ours, inside = by_turns(effort.times(20), over_http, lambda: server.samples("round_trip"))
        taken, floor = side(OURS, "ms", ours), server.side("ms", inside)
    above = (taken.median or 0) - (floor.median or 0)
    checks = [taken.at_most((floor.median or 0) + 2)]
    return [Row("a block of a live container over HTTP", taken, [floor], checks, f"{above:.2f} ms above")]
