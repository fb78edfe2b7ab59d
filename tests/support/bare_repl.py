"""A REPL without isolation: a process of its own, spoken to over the connection alone."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sandbox_worker import RELEASE
from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.repl import Repl
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.descriptors import BELL_BYTES
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    Execute,
    FromOrchestrator,
    FromWorker,
    Output,
    Query,
    Ready,
    Reply,
    Result,
    Slot,
    Submit,
    decode_from_worker,
    encode,
)
from tests.support.forked_python import Python
from tests.support.places import PROJECT
from tests.support.waiting import WAIT_S

MAX_FRAME_BYTES = 1 << 20
OUTPUT = OutputBounds(max_output_bytes=1 << 16)

Answer = Callable[[Any], list[Slot]]


def shout(query: Query) -> list[Slot]:
    return [Slot(text=prompt.upper()) for prompt in query.texts]


class Ran(NamedTuple):
    """The result of one block."""

    result: Result
    stdout: str
    stderr: str


class BareRepl:
    """The orchestrator's end of the connection of a REPL."""

    def __init__(self, process: Python, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        connection.settimeout(WAIT_S)
        self._frames = FrameDecoder(MAX_FRAME_BYTES)
        self._heard: list[FromWorker] = []
        self._block = 0

    def hear(self) -> FromWorker:
        """The next message.

        Raises:
            EOFError: There will be none.
        """
        while not self._heard:
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError("the REPL has closed its connection")
            self._heard += map(decode_from_worker, self._frames.feed(data))
        return self._heard.pop(0)

    def say(self, message: FromOrchestrator) -> None:
        self.connection.sendall(encode_frame(encode(message), MAX_FRAME_BYTES))

    def begin(self, code: str, **more: Any) -> None:
        """Send a block, with `more` fields of its message, and do not wait for it."""
        self._block += 1
        self.say(Execute(block=self._block, code=code, **more))

    def finish(self, answer: Answer = shout) -> Ran:
        """Answer what the block asks until it ends."""
        text = {"stdout": "", "stderr": ""}
        while True:
            message = self.hear()
            if isinstance(message, Output):
                text[message.stream] += message.text
            elif isinstance(message, Query | Submit):
                self.say(Reply(id=message.id, slots=answer(message)))
            elif isinstance(message, Result):
                assert message.block == self._block
                return Ran(message, text["stdout"], text["stderr"])

    def run(self, code: str, answer: Answer = shout, **more: Any) -> Ran:
        """Run one block, with `more` fields of its message."""
        self.begin(code, **more)
        return self.finish(answer)

    def until_printed(self, text: str) -> None:
        """Wait until the running block has printed `text` in one message."""
        while True:
            message = self.hear()
            if isinstance(message, Output) and text in message.text:
                return

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@contextmanager
def bare_repl(**contexts: Any) -> Iterator[BareRepl]:
    """A REPL that holds `contexts`, for the length of a `with`. Its connection comes as its stdin."""
    ours, theirs = socket.socketpair()
    serve = f"from tests.support.bare_repl import serve; serve({json.dumps(contexts)!r})"
    with ours:
        with theirs:
            quiet = subprocess.DEVNULL
            process = Python(["-c", serve], cwd=PROJECT, stdin=theirs.fileno(), stdout=quiet, stderr=quiet)
        try:
            repl = BareRepl(process, ours)
            assert repl.hear() == Ready(RELEASE)
            yield repl
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serve(contexts: str) -> None:
    """Become the REPL, in the new process."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    interrupts = Interrupts()
    interrupts.install()
    reserve = Reserve()
    channel = Channel(connection, MAX_FRAME_BYTES, interrupts, reserve)
    Repl(json.loads(contexts), channel, interrupts, reserve, OUTPUT, bytes(BELL_BYTES)).serve()
