"""Frames that a hostile REPL, or a stranger on the port, can send. Each attack goes on until its process ends.

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
HALF_FRAME = struct.pack(">I", 8 << 20) + b"x" * ((8 << 20) - 1)
"""Frame of 8 MB without its last byte."""


class Full(Exception):
    """The other side reads no more."""


class Repl:
    """The connection of a REPL that does not behave. Its block is running.

    Args:
        reads: Whether it reads what it is told.
    """

    def __init__(self, port: int, token: str, *, reads: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        for greeting in (Hello(token=token), Ready(RELEASE)):
            push(self.socket, encode_frame(encode(greeting), FRAME_BYTES))
        self.block = self._first_block()
        self._ids = itertools.count(1)
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

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
    """Send all frames; yield when the connection is full, after many frames, and at the end."""
    for number, frame in enumerate(frames, 1):
        try:
            push(repl.socket, frame)
        except (Full, OSError):  # not read any more, or hung up on
            yield
            return  # a frame was cut: no further one can be sent
        if number % 2_000 == 0:
            yield
    yield


# -- frames of a REPL --------------------------------------------------------------------------------------------------


def batches(repl: Repl) -> Iterator[bytes]:
    """Batches of 4,096 short prompts for a model that is slow."""
    return (repl.query("llm", [f"{n}"[-3:] for n in range(4096)], samples=True) for _ in itertools.count())


def children(repl: Repl) -> Iterator[bytes]:
    """Batches of 4,096 children."""
    return (repl.query("rlm", [f"{n}" for n in range(4096)]) for _ in itertools.count())


def late(repl: Repl) -> Iterator[bytes]:
    """Batches that come too late, the last ones first."""
    return (repl.query("llm", [f"{n} {m}" for m in range(16)], timeout_s=2.0 - n / 2_000) for n in range(3_000))


def wide(repl: Repl) -> Iterator[bytes]:
    """Prompts as large as a query, in characters of four bytes."""
    return (repl.query("llm", ["x" * (LARGE_BYTES - 1_000) + WIDE]) for _ in range(12))


def wide_answered(repl: Repl) -> Iterator[bytes]:
    """Prompts as large as allowed, in characters of four bytes, to a model that answers at once."""
    return (repl.query("llm", ["honest" + "x" * (LARGE_BYTES - 1_000) + WIDE]) for _ in range(40))


def too_large(repl: Repl) -> Iterator[bytes]:
    """Queries as large as a frame, which is more than a query may have."""
    begin = b'{"type":"query","id":"%d:1","want":"llm","prompts":["' % repl.block
    return itertools.repeat(encode_frame(begin + b"x" * (FRAME_BYTES - 1_000), FRAME_BYTES), 10)


def escapes(repl: Repl) -> Iterator[bytes]:
    """Queries as large as allowed that take long to read."""
    return (repl.query("llm", ["\n" * (LARGE_BYTES // 2 - 1_000)]) for _ in range(12))


def answer(repl: Repl) -> Iterator[bytes]:
    """A final answer as large as allowed, in characters of four bytes."""
    text = "password is x, " * (1 << 20) + WIDE
    return iter([encode_frame(encode(Result(repl.block, "ok", final_answer=text)), FRAME_BYTES)])


def lists(repl: Repl) -> Iterator[bytes]:
    """A tool that is called with a million empty lists."""
    arguments = '{"args":[' + "[]," * 1_300_000 + '1],"kwargs":{}}'
    return (repl.query("tool", [arguments], tool="tool") for _ in range(10))


def prints(repl: Repl) -> Iterator[bytes]:
    """Millions of messages of one character."""
    return itertools.repeat(encode_frame(encode(Output(repl.block, "stdout", "x")), FRAME_BYTES) * 40)


def displays(repl: Repl) -> Iterator[bytes]:
    """As many displays as a block may have, of texts that grow when they are decoded."""
    begin = b'{"type":"display","block":%d,"texts":{"text/html":"' % repl.block
    text = WIDE.encode() + b"A" * (MAX_DISPLAY_BYTES - 200)
    return itertools.repeat(encode_frame(begin + text + b'"}}', FRAME_BYTES), 4)


def deaf(repl: Repl) -> Iterator[bytes]:
    """Ask for replies of a megabyte, and read none."""
    return (repl.query("llm", [f"echo {n} {m}" for m in range(40)]) for n in itertools.count())


def numbers(_repl: Repl) -> Iterator[bytes]:
    """A query as large as allowed whose prompts are numbers."""
    return _one(b'"want":"llm","prompts":[' + b"1," * (LARGE_BYTES // 2 - 100) + b"1]}")


def quotes(repl: Repl) -> Iterator[bytes]:
    """Prompts that consist of quotes, each of which is escaped."""
    return (repl.query("llm", ['"' * (LARGE_BYTES // 5)] * 2) for _ in range(24))


def objects(_repl: Repl) -> Iterator[bytes]:
    """A query as large as allowed with a million children, whose contexts are empty objects."""
    return _one(b'"want":"rlm","prompts":["a"],"contexts":[' + b"{}," * (LARGE_BYTES // 3 - 100) + b"{}]}")


def strings(_repl: Repl) -> Iterator[bytes]:
    """A query as large as allowed with a million prompts of one character."""
    return _one(b'"want":"llm","prompts":[' + b'"a",' * (LARGE_BYTES // 4 - 100) + b'""]}')


def mistakes(repl: Repl) -> Iterator[bytes]:
    """Calls of a tool with as many wrong arguments as allowed."""
    arguments = '{"args":[[' + '"x",' * 60_000 + '"x"]],"kwargs":{}}'
    return (repl.query("tool", [arguments], tool="typed") for _ in range(20))


def _one(rest: bytes) -> Iterator[bytes]:
    return iter([encode_frame(b'{"type":"query","id":"1:1",' + rest, FRAME_BYTES)])


# -- connections of strangers ------------------------------------------------------------------------------------------


def silent(port: int) -> Iterator[None]:
    """Thousands of connections that send no byte."""
    return _connections(port, 3_000, keeps=500)


def half_frames(port: int) -> Iterator[None]:
    """Frames of 8 MB of which the last byte never comes, on many connections."""
    return _connections(port, 40, HALF_FRAME)


def garbage(port: int) -> Iterator[None]:
    """Connections that say what is no frame, one after the other."""
    return _connections(port, 2_000, b"\xff" * 100, keeps=0)


def one_shot_lists(port: int) -> Iterator[None]:
    """One-shot requests of empty lists."""
    return _requests(port, b'{"prompt": [' + b"[]," * 2_000_000 + b"1]}")


def one_shot_batches(port: int) -> Iterator[None]:
    """One-shot requests of many prompts."""
    return _requests(port, b'{"prompts": [' + b",".join(b'"%d"' % n for n in range(4_000)) + b"]}")


def one_shot_names(port: int) -> Iterator[None]:
    """One-shot batches that name a model at great length, which each reply would repeat."""
    prompts = b",".join(b'"honest %d"' % n for n in range(2_000))
    return _requests(port, b'{"model": "' + b"m" * 200_000 + b'", "prompts": [' + prompts + b"]}")


def one_shot_second(port: int) -> Iterator[None]:
    """A request that is served, and most of a second one behind it."""
    return _connections(port, 60, encode_frame(b'{"prompt": "slow"}', FRAME_BYTES), HALF_FRAME)


def _requests(port: int, payload: bytes) -> Iterator[None]:
    return _connections(port, 20, encode_frame(payload, FRAME_BYTES), keeps=200)


def _connections(port: int, count: int, *sent: bytes, keeps: int | None = None) -> Iterator[None]:
    """Open so many connections without end, and yield after each time.

    Args:
        sent: What each of them sends.
        keeps: Connections that stay open; the oldest of more are closed. None closes all, each time.
    """
    held: list[socket.socket] = []
    while True:
        for _ in range(count):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=STUCK_S))
                for data in sent:
                    push(held[-1], data)
            except (OSError, Full):
                if not sent:  # no further connection is taken
                    break
            while keeps is not None and len(held) > keeps:
                held.pop(0).close()
        yield
        if keeps is None:
            held.clear()


REPLS: tuple[Callable[[Repl], Iterator[bytes]], ...] = (
    batches, children, late, wide, wide_answered, too_large, escapes, answer,
    lists, numbers, quotes, objects, strings, mistakes, prints, displays, deaf,
)  # fmt: skip
STRANGERS: tuple[Callable[[int], Iterator[None]], ...] = (
    silent, half_frames, garbage, one_shot_lists, one_shot_batches, one_shot_names, one_shot_second,
)  # fmt: skip
ATTACKS = [attack.__name__ for attack in (*REPLS, *STRANGERS)]


def _steps(name: str, port: int, token: str) -> Iterator[None]:
    """Begin an attack; its iterator yields once it has done what it can: sent all, or filled the connection."""
    for connect in STRANGERS:
        if connect.__name__ == name:
            return connect(port)
    repl = Repl(port, token, reads=name != deaf.__name__)
    return _flood(repl, next(frames(repl) for frames in REPLS if frames.__name__ == name))


def main() -> None:
    attack, port, token = sys.argv[1:]
    for number, _ in enumerate(_steps(attack, int(port), token)):
        if not number:
            print("done", flush=True)
    sys.stdin.read()  # stay, connected, until the orchestrator has seen enough


if __name__ == "__main__":
    main()
