"""Uploads next to a bare server that writes each body into a memfd: time, and memory of the server's own."""

import time
from typing import Any

from scripts.bench.measure import Effort, by_turns, seconds
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Row, side
from scripts.bench.serving import SERVER, Connection

PIECE = b"a line of a log file that is uploaded as it is, sixty-four byte\n" * (1 << 14)
BOUNDARY = b"-" * 24 + b"bench"
HEAD = (
    b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="file"; filename="a.log"\r\n\r\n'
)
TAIL = b"\r\n--" + BOUNDARY + b"--\r\n"


def uploads(effort: Effort) -> list[Row]:
    """Compare the upload of one file of 1 GB."""
    pieces = effort.size(1_000)
    size_bytes = len(HEAD) + pieces * len(PIECE) + len(TAIL)

    def sent(address: dict[str, Any]) -> str:
        with Connection(**address) as connection:  # a new one: a server closes those that are idle for seconds
            connection.begin("/v1/files", f"multipart/form-data; boundary={BOUNDARY.decode()}", size_bytes)
            connection.send(HEAD)
            for _ in range(pieces):
                connection.send(PIECE)
            connection.send(TAIL)
            answer: dict[str, str] = connection.answer()
        return answer.get("id", "")

    with Peer(OURS, SERVER, None, "service") as server, Peer("a bare ASGI server", SERVER, None, "memfd") as bare:
        address, bare_address = server.ask("address"), bare.ask("address")

        def ours() -> list[float]:
            started = time.perf_counter()
            id = sent(address)
            taken = time.perf_counter() - started
            with Connection(**address) as connection:
                connection.delete(f"/v1/files/{id}")
            return [taken]

        server.ask("peak")
        before = server.samples("peak")[0]
        taken, floor = by_turns(effort.times(10), ours, lambda: seconds(lambda: sent(bare_address)))
        grown = [server.samples("peak")[0] - before]
    ours_side, bare_side = side(OURS, "s", taken), bare.side("s", floor)
    memory = side(OURS, "MB", grown)
    return [
        Row(f"upload of {pieces:,} MiB", ours_side, [bare_side], [ours_side.at_most_times(1.3, bare_side)]),
        Row("memory of the server that this upload adds", memory, [], [memory.at_most(32)]),
    ]
