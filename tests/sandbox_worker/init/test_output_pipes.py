import mmap
import os
import select
from collections.abc import Iterator

import pytest

from sandbox_worker.init.output_pipes import ReplOutput, WriteEnds
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.control import Written


class Said(list[bytes]):
    def __call__(self, written: Written) -> None:
        self.append(written.data)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def pipes(said: Said) -> Iterator[tuple[ReplOutput, WriteEnds]]:
    """Return output of which 4 bytes of a block are kept."""
    with mmap.mmap(-1, mmap.PAGESIZE) as bell:
        output = ReplOutput(select.poll(), OutputBounds(max_output_bytes=4), said, bell)
        ends = output.open()
        yield output, ends
        output.close()
        for fd in ends:
            os.close(fd)


def test_output_before_begin_belongs_to_its_block(pipes: tuple[ReplOutput, WriteEnds], said: Said) -> None:
    """Output that a block writes before init knows of the block belongs to this block."""
    output, ends = pipes
    os.write(ends.stdout, b"abcdefgh")
    output.begin_block()
    os.write(ends.stdout, b"ijkl")
    output.drain()
    assert b"".join(said) == b"ab\n... [8 more cut] ...\nkl"


def test_output_read_before_block_uses_no_bounds(pipes: tuple[ReplOutput, WriteEnds], said: Said) -> None:
    """Output that was read before a block uses up none of the block's bounds."""
    output, ends = pipes
    os.write(ends.stdout, b"abcdefgh")
    for fd in range(ends.stack):
        output.forward(fd)
    output.begin_block()
    os.write(ends.stdout, b"ij")
    output.drain()
    assert b"".join(said) == b"ab\n... [4 more cut] ...\nghij"
