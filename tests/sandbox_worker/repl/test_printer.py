"""Output of Python code: pieces, bounds, threads and forked processes."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_worker.repl.printer import BURST, MAX_PIECE_CHARS, Printer
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.messages import Stream
from tests.support.forked_child import in_child


class Sent(list[str]):
    def __call__(self, _stream: Stream, text: str) -> None:
        self.append(text)


@pytest.fixture
def sent() -> Sent:
    return Sent()


def printer(sent: Sent, limit: int = 1 << 20) -> Printer:
    made = Printer("stdout", OutputBounds(max_output_bytes=limit), sent)
    made.begin_block()
    return made


def test_line_is_sent_when_complete(sent: Sent) -> None:
    out = printer(sent)
    out.write("half a ")
    assert sent == []
    out.write("line\n")
    assert sent == ["half a line\n"]


@pytest.mark.usefixtures("clock")  # a slower machine sends more pieces
def test_line_flood_is_bundled_without_loss(sent: Sent) -> None:
    out = printer(sent)
    for number in range(20_000):
        out.write(f"{number}\n")
    out.end_block()
    assert len(sent) <= BURST + 20
    assert "".join(sent) == "".join(f"{number}\n" for number in range(20_000))


def test_output_past_limit_keeps_head_and_tail(sent: Sent) -> None:
    out = printer(sent, limit=100)
    out.write("H" * 50 + "x" * 1000 + "T" * 50)
    out.end_block()
    assert "".join(sent) == "H" * 50 + "\n... [1,000 more cut] ...\n" + "T" * 50


def test_pieces_fit_into_a_message(sent: Sent) -> None:
    out = printer(sent, limit=1 << 22)
    out.write("x" * (3 * MAX_PIECE_CHARS + 7))
    out.end_block()
    assert (max(map(len, sent)), sum(map(len, sent))) == (MAX_PIECE_CHARS, 3 * MAX_PIECE_CHARS + 7)


def test_output_between_blocks_belongs_to_the_next(sent: Sent) -> None:
    out = printer(sent)
    out.end_block()
    out.write("late\n")
    assert sent == []
    out.begin_block()
    out.flush()
    assert sent == ["late\n"]


def test_stdout_takes_only_text_and_buffer_bytes(sent: Sent) -> None:
    out = printer(sent)
    with pytest.raises(TypeError, match="write\\(\\) argument must be str, not bytes"):
        out.write(b"bytes")  # type: ignore[arg-type]
    assert out.buffer.write(b"bytes\xff\n") == 7
    assert sent == ["bytes\N{REPLACEMENT CHARACTER}\n"]
    assert (out.isatty(), out.writable(), out.fileno(), out.name) == (False, True, 1, "<stdout>")


def test_threads_do_not_tear_lines(sent: Sent) -> None:
    out = printer(sent)

    def work(letter: str) -> None:
        for _ in range(500):
            out.write(letter * 50 + "\n")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, "abcd"))
    out.end_block()
    lines = "".join(sent).splitlines()
    assert len(lines) == 2000
    assert all(len(set(line)) == 1 for line in lines)


def test_forked_process_prints_to_the_descriptor(sent: Sent) -> None:
    read_end, write_end = os.pipe()

    def child() -> list[str]:
        os.dup2(write_end, 1)
        out = printer(sent)
        out.owner = os.getppid()
        out.write("from the child\n")
        return sent

    assert in_child(child) == []
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"from the child\n"
