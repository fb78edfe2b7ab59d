import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.sandbox.blocks.output import BlockOutput
from sandbox_worker.wire.bounds import NOTE_LINES, OutputBounds
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.messages import Output, Stream


def printed(output: BlockOutput, text: str, stream: Stream = "stdout") -> None:
    output.printed(Output(block=1, stream=stream, text=text))


def test_stdout_and_stderr_keep_their_order() -> None:
    """Both ways of printing arrive in order, each stream apart."""
    seen: list[tuple[Stream, str]] = []
    output = BlockOutput(OutputBounds(max_output_bytes=100), lambda stream, text: seen.append((stream, text)))
    printed(output, "from Python\n")
    output.written(Written(stream="stdout", data=b"from C\n"))
    printed(output, "oops\n", "stderr")
    assert output.finish() == ("from Python\nfrom C\n", "oops\n")
    assert seen == [("stdout", "from Python\n"), ("stdout", "from C\n"), ("stderr", "oops\n")]


@given(st.text(max_size=60), st.data())
def test_a_character_may_be_cut_between_two_pieces(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cut = data.draw(st.integers(0, len(raw)))
    output = BlockOutput(OutputBounds(max_output_bytes=1000), None)
    output.written(Written(stream="stdout", data=raw[:cut]))
    output.written(Written(stream="stdout", data=raw[cut:]))
    assert output.finish()[0] == raw.decode()


@given(st.lists(st.text(max_size=50), max_size=40))
def test_output_kept_is_at_most_twice_the_bound(pieces: list[str]) -> None:
    limit = 64
    output = BlockOutput(OutputBounds(max_output_bytes=limit // 2), None)
    for piece in pieces:
        printed(output, piece)
    text = output.finish()[0]
    everything = "".join(pieces)
    if len(everything) <= limit:
        assert text == everything
    else:
        assert text.startswith(everything[: limit // 2])
        assert text.endswith(everything[-limit // 2 :])
        assert f"[{len(everything) - limit:,} more cut]" in text
        assert len(text) < limit + 40


def test_failing_on_output_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An `on_output` that raises is logged once, and the block continues."""
    seen: list[str] = []

    def broken(_stream: Stream, text: str) -> None:
        seen.append(text)
        raise RuntimeError("mine, password=hunter2hunter2")

    output = BlockOutput(OutputBounds(max_output_bytes=100), broken)
    printed(output, "one")
    printed(output, "two")
    assert output.finish() == ("onetwo", "")
    assert seen == ["one", "two"]
    [logged] = caplog.messages
    assert logged.startswith("on_output raised; what else it raises is not logged\nTraceback")
    assert logged.endswith("RuntimeError: mine, password=[redacted]\n")
    assert "hunter2" not in logged


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xed\xa0\x80"])
def test_undecodable_output_is_shown_in_part(data: bytes) -> None:
    """Bytes that are no text are shown as far as they can be decoded."""
    output = BlockOutput(OutputBounds(max_output_bytes=100), None)
    output.written(Written(stream="stderr", data=data + b"ok"))
    assert output.finish()[1].endswith("\N{REPLACEMENT CHARACTER}ok")


@given(st.lists(st.text("a\n", max_size=50), max_size=40), st.integers(1, 10))
def test_forged_lines_are_kept_within_the_honest_bound(pieces: list[str], lines: int) -> None:
    """A forged flood of lines is kept only as far as an honest REPL sends lines."""
    bounds = OutputBounds(max_output_bytes=10_000, max_output_lines=lines)
    output = BlockOutput(bounds, None)
    for piece in pieces:
        printed(output, piece)
        output.written(Written(stream="stdout", data=piece.encode()))
    most = 2 * (lines + NOTE_LINES)
    assert output.finish()[0].count("\n") <= most + NOTE_LINES
