import contextlib
import mmap
import os
from collections.abc import Iterator

import pytest

from sandbox_worker.init.output_pipes import FLOOD_PAUSE_S, PIPE_BYTES, STACK_BYTES, ReplOutput
from sandbox_worker.init.sockets import Events
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.descriptors import BELL
from tests.support.clock import Clock


class Said(list[bytes]):
    def __init__(self) -> None:
        self.streams: list[str] = []

    def __call__(self, written: Written) -> None:
        self.append(written.data)
        self.streams.append(written.stream)


class Pipes:
    """Output of which up to `max_output_bytes` of a block are kept, with its events and its bell."""

    def __init__(self, said: Said, max_output_bytes: int) -> None:
        self.events = Events()
        self.bell = mmap.mmap(-1, mmap.PAGESIZE)
        self.output = ReplOutput(self.events, OutputBounds(max_output_bytes=max_output_bytes), said, self.bell)
        self.ends = self.output.open()

    @property
    def ready(self) -> list[int]:
        return [fd for fd, _ in self.events.poll.poll(0)]

    def close(self) -> None:
        self.output.close()
        self.output.close()
        for fd in self.ends:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.bell.close()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def wide(said: Said) -> Iterator[Pipes]:
    with contextlib.closing(Pipes(said, 4 * PIPE_BYTES)) as made:
        yield made


@pytest.fixture
def narrow(said: Said) -> Iterator[Pipes]:
    with contextlib.closing(Pipes(said, 4)) as made:
        yield made


def test_output_before_begin_belongs_to_its_block(narrow: Pipes, said: Said) -> None:
    output, ends = narrow.output, narrow.ends
    os.write(ends.stdout, b"abcdefgh")
    output.begin_block()
    os.write(ends.stdout, b"ijkl")
    output.drain()
    assert b"".join(said) == b"ab\n... [8 more cut] ...\nkl"
    said.clear()
    os.write(ends.stdout, b"mnop")
    output.drain()
    assert b"".join(said) == b"mnop"  # the next block has a head and a tail of its own


def test_output_read_before_block_uses_no_bounds(narrow: Pipes, said: Said) -> None:
    output, ends = narrow.output, narrow.ends
    os.write(ends.stdout, b"abcdefgh")
    for fd in range(ends.stack):
        output.forward(fd)
    output.begin_block()
    os.write(ends.stdout, b"ij")
    output.drain()
    assert b"".join(said) == b"ab\n... [4 more cut] ...\nghij"


def test_output_names_its_stream_and_rings_the_bell(wide: Pipes, said: Said) -> None:
    os.write(wide.ends.stdout, b"out")
    os.write(wide.ends.stderr, b"err")
    wide.output.drain()
    assert dict(zip(said.streams, said, strict=True)) == {"stdout": b"out", "stderr": b"err"}
    (rung,) = BELL.unpack_from(wide.bell)
    assert rung == 2


def test_pipes_are_read_while_the_orchestrator_listens(wide: Pipes) -> None:
    os.write(wide.ends.stdout, b"x")
    assert wide.output.regulate(True) is None
    (stdout,) = wide.ready
    assert wide.output.regulate(False) is None
    assert wide.ready == []
    wide.output.regulate(True)
    assert wide.ready == [stdout]
    assert wide.output.forward(stdout)
    assert not wide.output.forward(stdout)  # it is empty
    assert not wide.output.forward(wide.ends.stdout)  # no read end of these pipes


def test_pipe_whose_writers_are_gone_is_not_waited_for(wide: Pipes) -> None:
    wide.output.regulate(True)
    os.close(wide.ends.stdout)
    (stdout,) = wide.ready
    assert not wide.output.forward(stdout)
    wide.output.regulate(True)
    assert wide.ready == []
    os.write(wide.ends.stderr, b"err")
    assert len(wide.ready) == 1


def test_flood_is_read_after_a_pause(narrow: Pipes, clock: Clock) -> None:
    """A pipe beyond its head is left for a moment; a new block does not wait for that moment."""
    output, ends = narrow.output, narrow.ends
    os.write(ends.stdout, b"a")
    output.regulate(True)
    (stdout,) = narrow.ready
    assert output.forward(stdout)
    assert output.regulate(True) is None  # within the head
    os.write(ends.stdout, b"bcdef")
    assert output.forward(stdout)
    os.write(ends.stdout, b"more")
    assert output.regulate(True) == pytest.approx(FLOOD_PAUSE_S)
    assert narrow.ready == []
    clock.forward(FLOOD_PAUSE_S * 1.01)
    assert output.regulate(True) is None
    assert narrow.ready == [stdout]
    output.forward(stdout)
    output.begin_block()
    os.write(ends.stdout, b"g")
    assert output.regulate(True) is None
    assert narrow.ready == [stdout]


def test_full_pipes_are_drained_and_each_message_is_small(wide: Pipes, said: Said) -> None:
    """The tail of several pipes' size is sent in messages of one."""
    wide.output.regulate(True)
    for _ in range(3):
        os.write(wide.ends.stdout, b"x" * PIPE_BYTES)
        wide.output.forward(*wide.ready)
    os.write(wide.ends.stdout, b"y" * PIPE_BYTES)
    wide.output.drain()
    assert b"".join(said) == b"x" * 3 * PIPE_BYTES + b"y" * PIPE_BYTES
    assert max(map(len, said)) <= PIPE_BYTES


def test_pipes_of_the_next_repl_are_listened_to(wide: Pipes, said: Said) -> None:
    """The pipes of the last REPL are closed."""
    wide.output.regulate(True)
    wide.output.close()
    with pytest.raises(BrokenPipeError):
        os.write(wide.ends.stdout, b"x")
    with pytest.raises(BrokenPipeError):
        os.write(wide.ends.stack, b"x")
    for fd in wide.ends:
        os.close(fd)
    wide.ends = wide.output.open()
    os.write(wide.ends.stdout, b"next")
    wide.output.regulate(True)
    wide.output.forward(*wide.ready)
    assert said == [b"next"]


def test_stack_is_read_to_its_bound(wide: Pipes) -> None:
    os.write(wide.ends.stack, b"line 1\n")
    assert wide.output.read_stack(1000) == b"line 1\n"
    assert wide.output.read_stack(0.01) == b""
    os.write(wide.ends.stack, b"late")
    assert wide.output.read_stack(0) == b""
    assert wide.output.read_stack(1000) == b"late"
    os.write(wide.ends.stack, b"x" * (STACK_BYTES + 100))
    assert wide.output.read_stack(1000) == b"x" * STACK_BYTES
    os.close(wide.ends.stack)
    assert wide.output.read_stack(1000) == b"x" * 100
