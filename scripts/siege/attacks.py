"""Frames that a hostile REPL, or a stranger on the port, can send. Each attack goes on until its process ends.

An attack is a generator. It yields once it has done what it can: sent all, or filled the connection.
`python -m scripts.siege.attacks ATTACK PORT TOKEN` is the attacker, and prints a line at the first yield.
"""

import contextlib
import itertools
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator

from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    MAX_DISPLAY_BYTES,
    MAX_QUERY_BYTES,
    Execute,
    Hello,
    Output,
    Query,
    Ready,
    Result,
    decode_from_orchestrator,
    encode,
)

FRAME_BYTES = 64 << 20
LARGE_BYTES = MAX_QUERY_BYTES - 1000
STUCK_S = 0.5
"""Seconds after which a connection that takes no more bytes counts as full."""
WIDE = "\U0001f600"


class Full(Exception):
    """The other side reads no more."""


class Repl:
    """The connection of a REPL that does not behave. Its block is running.

    Args:
        reads: Whether it reads what it is told.
    """

    def __init__(self, port: int, token: str, *, reads: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.say(encode(Hello(token=token)), encode(Ready(RELEASE)))
        self.block = self._first_block()
        self._ids = itertools.count(1)
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def say(self, *payloads: bytes) -> None:
        """Send frames.

        Raises:
            Full: The other side has not read for `STUCK_S`.
        """
        for payload in payloads:
            push(self.socket, encode_frame(payload, FRAME_BYTES))

    def query(self, want: str, prompts: list[str], **settings: object) -> bytes:
        """The frame of a query."""
        query = Query(f"{self.block}:{next(self._ids)}", want, prompts, **settings)  # type: ignore[arg-type]
        return encode_frame(encode(query), FRAME_BYTES)

    def _first_block(self) -> int:
        frames = FrameDecoder(FRAME_BYTES)
        while True:
            for payload in frames.feed(self.socket.recv(1 << 16)):
                if b'"welcome"' not in payload and isinstance(told := decode_from_orchestrator(payload), Execute):
                    return told.block

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 20):
                pass


def push(to: socket.socket, data: bytes) -> None:
    """Send all of `data`, or raise `Full`."""
    left = memoryview(data)
    while left:
        if not select.select([], [to], [], STUCK_S)[1]:
            raise Full
        with contextlib.suppress(BlockingIOError):
            left = left[to.send(left, socket.MSG_DONTWAIT) :]


def _flood(repl: Repl, frames: Iterator[bytes]) -> Iterator[None]:
    """Send without end; yield when the connection is full, or after many frames."""
    for number, frame in enumerate(frames, 1):
        try:
            push(repl.socket, frame)
        except (Full, OSError):  # not read any more, or hung up on
            yield
            return  # a frame was cut: no further one can be sent
        if number % 5_000 == 0:
            yield


def batches(port: int, token: str) -> Iterator[None]:
    """Batches of 4,096 short prompts for a model that is slow."""
    repl = Repl(port, token)
    yield from _flood(repl, (repl.query("llm", [f"{n}"[-3:] for n in range(4096)], samples=True) for _ in _ever()))


def children(port: int, token: str) -> Iterator[None]:
    """Batches of 4,096 children."""
    repl = Repl(port, token)
    yield from _flood(repl, (repl.query("rlm", [f"{n}" for n in range(4096)]) for _ in _ever()))


def late(port: int, token: str) -> Iterator[None]:
    """Batches that come too late, the last ones first."""
    repl = Repl(port, token)
    queries = (repl.query("llm", [f"{n} {m}" for m in range(16)], timeout_s=2.0 - n / 2_000) for n in itertools.count())
    yield from _flood(repl, itertools.islice(queries, 3_000))
    yield


def wide(port: int, token: str) -> Iterator[None]:
    """Prompts as large as a query, in characters of four bytes."""
    repl = Repl(port, token)
    text = "x" * (LARGE_BYTES - 1_000) + WIDE
    yield from _flood(repl, (repl.query("llm", [text]) for _ in range(12)))
    yield


def wide_answered(port: int, token: str) -> Iterator[None]:
    """Prompts as large as allowed, in characters of four bytes, to a model that answers at once."""
    repl = Repl(port, token)
    text = "honest" + "x" * (LARGE_BYTES - 1_000) + WIDE
    yield from _flood(repl, (repl.query("llm", [text]) for _ in range(40)))
    yield


def too_large(port: int, token: str) -> Iterator[None]:
    """Queries as large as a frame, which is more than a query may have."""
    repl = Repl(port, token)
    begin = b'{"type":"query","id":"%d:1","want":"llm","prompts":["' % repl.block
    frame = encode_frame(begin + b"x" * (FRAME_BYTES - 1_000), FRAME_BYTES)
    yield from _flood(repl, itertools.repeat(frame, 10))
    yield


def escapes(port: int, token: str) -> Iterator[None]:
    """Queries as large as allowed that take long to read."""
    repl = Repl(port, token)
    yield from _flood(repl, (repl.query("llm", ["\n" * (LARGE_BYTES // 2 - 1_000)]) for _ in range(12)))
    yield


def answer(port: int, token: str) -> Iterator[None]:
    """A final answer as large as allowed, in characters of four bytes."""
    repl = Repl(port, token)
    text = "password is x, " * (1 << 20) + WIDE
    repl.say(encode(Result(repl.block, "ok", final_answer=text)))
    yield


def lists(port: int, token: str) -> Iterator[None]:
    """A tool that is called with a million empty lists."""
    repl = Repl(port, token)
    arguments = '{"args":[' + "[]," * 1_300_000 + '1],"kwargs":{}}'
    yield from _flood(repl, (repl.query("tool", [arguments], tool="tool") for _ in range(10)))
    yield


def prints(port: int, token: str) -> Iterator[None]:
    """Millions of messages of one character."""
    repl = Repl(port, token)
    frame = encode_frame(encode(Output(repl.block, "stdout", "x")), FRAME_BYTES)
    yield from _flood(repl, (frame * 1_000 for _ in range(200)))
    yield
    yield from _flood(repl, (frame * 1_000 for _ in _ever()))


def displays(port: int, token: str) -> Iterator[None]:
    """As many displays as a block may have, of texts that grow when they are decoded."""
    repl = Repl(port, token)
    begin, end = b'{"type":"display","block":%d,"texts":{"text/html":"' % repl.block, b'"}}'
    text = WIDE.encode() + b"A" * (MAX_DISPLAY_BYTES - 200)
    for _ in range(4):
        repl.say(begin + text + end)
    yield


def deaf(port: int, token: str) -> Iterator[None]:
    """Ask for replies of a megabyte, and read none."""
    repl = Repl(port, token, reads=False)
    queries = (repl.query("llm", [f"echo {n} {m}" for m in range(40)]) for n in itertools.count())
    yield from _flood(repl, queries)


def numbers(port: int, token: str) -> Iterator[None]:
    """A query as large as allowed whose prompts are numbers."""
    repl = Repl(port, token)
    head = b'{"type":"query","id":"1:1","want":"llm","prompts":['
    yield from _flood(repl, iter([encode_frame(head + b"1," * (LARGE_BYTES // 2 - 100) + b"1]}", FRAME_BYTES)]))
    yield


def quotes(port: int, token: str) -> Iterator[None]:
    """Prompts that consist of quotes, each of which is escaped."""
    repl = Repl(port, token)
    yield from _flood(repl, (repl.query("llm", ['"' * (LARGE_BYTES // 5)] * 2) for _ in range(24)))
    yield


def objects(port: int, token: str) -> Iterator[None]:
    """A query as large as allowed with a million children, whose contexts are empty objects."""
    repl = Repl(port, token)
    head = b'{"type":"query","id":"1:1","want":"rlm","prompts":["a"],"contexts":['
    yield from _flood(repl, iter([encode_frame(head + b"{}," * (LARGE_BYTES // 3 - 100) + b"{}]}", FRAME_BYTES)]))
    yield


def strings(port: int, token: str) -> Iterator[None]:
    """A query as large as allowed with a million prompts of one character."""
    repl = Repl(port, token)
    head = b'{"type":"query","id":"1:1","want":"llm","prompts":['
    yield from _flood(repl, iter([encode_frame(head + b'"a",' * (LARGE_BYTES // 4 - 100) + b'""]}', FRAME_BYTES)]))
    yield


def mistakes(port: int, token: str) -> Iterator[None]:
    """Calls of a tool with as many wrong arguments as allowed."""
    repl = Repl(port, token)
    arguments = '{"args":[[' + '"x",' * 60_000 + '"x"]],"kwargs":{}}'
    yield from _flood(repl, (repl.query("tool", [arguments], tool="typed") for _ in range(20)))
    yield


# -- strangers -------------------------------------------------------------------------------------------------------


def silent(port: int, _token: str) -> Iterator[None]:
    """Thousands of connections that send no byte."""
    held = []
    while True:
        for _ in range(3_000):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=STUCK_S))
            except OSError:
                break
            if len(held) > 500:
                held.pop(0).close()
        yield


def half_frames(port: int, _token: str) -> Iterator[None]:
    """Frames of 8 MB of which the last byte never comes, on many connections."""
    held = []
    frame = struct.pack(">I", 8 << 20) + b"x" * ((8 << 20) - 1)
    while True:
        for _ in range(40):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=STUCK_S))
                push(held[-1], frame)
            except (OSError, Full):
                continue
        yield
        held.clear()


def garbage(port: int, _token: str) -> Iterator[None]:
    """Connections that say what is no frame, one after the other."""
    while True:
        for _ in range(2_000):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=STUCK_S) as stranger:
                    stranger.sendall(b"\xff" * 100)
            except OSError:
                continue
        yield


def one_shot_lists(port: int, _token: str) -> Iterator[None]:
    """One-shot requests of empty lists."""
    payload = b'{"prompt": [' + b"[]," * 2_000_000 + b"1]}"
    yield from _requests(port, payload)


def one_shot_batches(port: int, _token: str) -> Iterator[None]:
    """One-shot requests of many prompts."""
    payload = b'{"prompts": [' + b",".join(b'"%d"' % n for n in range(4_000)) + b"]}"
    yield from _requests(port, payload)


def one_shot_names(port: int, _token: str) -> Iterator[None]:
    """One-shot batches that name a model at great length, which each reply would repeat."""
    prompts = b",".join(b'"honest %d"' % n for n in range(2_000))
    yield from _requests(port, b'{"model": "' + b"m" * 200_000 + b'", "prompts": [' + prompts + b"]}")


def one_shot_second(port: int, _token: str) -> Iterator[None]:
    """A request that is served, and most of a second one behind it."""
    first = encode_frame(b'{"prompt": "slow"}', FRAME_BYTES)
    second = struct.pack(">I", 8 << 20) + b"x" * ((8 << 20) - 1)
    held = []
    while True:
        for _ in range(60):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=STUCK_S))
                push(held[-1], first)
                push(held[-1], second)
            except (OSError, Full):
                continue
        yield
        held.clear()


def _requests(port: int, payload: bytes) -> Iterator[None]:
    frame = encode_frame(payload, FRAME_BYTES)
    held: list[socket.socket] = []
    while True:
        for _ in range(20):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=STUCK_S))
                push(held[-1], frame)
            except (OSError, Full):
                continue
            if len(held) > 200:
                held.pop(0).close()
        yield


def _ever() -> Iterator[int]:
    return itertools.count()


Attack = Callable[[int, str], Iterator[None]]
REPLS: tuple[Attack, ...] = (
    batches, children, late, wide, wide_answered, too_large, escapes, answer,
    lists, numbers, quotes, objects, strings, mistakes, prints, displays, deaf,
)  # fmt: skip
STRANGERS: tuple[Attack, ...] = (
    silent, half_frames, garbage, one_shot_lists, one_shot_batches, one_shot_names, one_shot_second,
)  # fmt: skip
ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (*REPLS, *STRANGERS)}


def main() -> None:
    attack, port, token = sys.argv[1:]
    said = False
    for _ in ATTACKS[attack](int(port), token):
        if not said:
            said = True
            print("done", flush=True)
    sys.stdin.read()  # stay, connected, until the orchestrator has seen enough


if __name__ == "__main__":
    main()
