import signal
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.sandbox.blocks import block_result
from rlm_broker.sandbox.blocks.block_result import BlockOutput
from sandbox_worker.wire.bounds import NOTE_LINES, OutputBounds, WatchedLimit
from sandbox_worker.wire.control import BROKEN, OUT_OF_MEMORY, Died, Exceeded, LastSeen, Written
from sandbox_worker.wire.messages import Output, Stream
from tests.support.tables import table


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


@table("data", [b"\xff\xfe", b"\xed\xa0\x80"])
def test_undecodable_output_is_shown_in_part(data: bytes) -> None:
    """Bytes that are no text are shown as far as they can be decoded."""
    output = BlockOutput(OutputBounds(max_output_bytes=100), None)
    output.written(Written(stream="stderr", data=data + b"ok"))
    assert output.finish()[1].endswith("\N{REPLACEMENT CHARACTER}ok")


@given(st.lists(st.text("a\n", max_size=50), max_size=40), st.integers(1, 10))
def test_forged_lines_are_kept_within_the_honest_bound(pieces: list[str], lines: int) -> None:
    bounds = OutputBounds(max_output_bytes=10_000, max_output_lines=lines)
    output = BlockOutput(bounds, None)
    for piece in pieces:
        printed(output, piece)
        output.written(Written(stream="stdout", data=piece.encode()))
    most = 2 * (lines + NOTE_LINES)
    assert output.finish()[0].count("\n") <= most + NOTE_LINES


STACK = """Current thread 0x00007f0005e7cb80 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "<block 3>", line 7 in search
  File "<block 4>", line 2 in <module>
  File "/usr/lib/site-packages/sandbox_worker/execution.py", line 62 in _evaluate
"""


@table(
    "died, reason",
    [
        (Died(exit_code=3), "its process ended by itself with exit code 3 (os._exit)"),
        (
            Died(exit_code=OUT_OF_MEMORY),
            "it used up its memory (memory_bytes) to the point that its REPL could not go on",
        ),
        (Died(exit_code=BROKEN), "it broke the REPL that it runs in"),
        (Died(signal=signal.SIGKILL), "its process was ended by SIGKILL"),
        (Died(signal=signal.SIGSEGV), "its process was ended by SIGSEGV (a crash in C code, or too deep a recursion)"),
        (Died(signal=40), "its process was ended by signal 40"),
        (
            Exceeded("memory_bytes", 300 << 20, 256 << 20, LastSeen()),
            "its processes used 300 MiB together, memory_bytes = 256 MiB",
        ),
        (
            Exceeded("max_processes", 70, 64, LastSeen()),
            "its processes used 70 threads and processes together, max_processes = 64 threads and processes",
        ),
        (
            Exceeded("scratch_bytes", 9 << 20, 8 << 20, LastSeen()),
            "its processes used 9 MiB of the scratch folder together, scratch_bytes = 8 MiB of the scratch folder",
        ),
        (
            Exceeded("max_scratch_files", 201, 200, LastSeen()),
            "its processes used 201 files in the scratch folder together, "
            "max_scratch_files = 200 files in the scratch folder",
        ),
        (
            Exceeded("cpu_s", 12.03, 12, LastSeen()),
            "its processes used 12.03 s CPU time together, cpu_s = 12 s CPU time",
        ),
    ],
)
def test_reason_names_the_cause_of_the_end(died: Died | Exceeded, reason: str) -> None:
    assert block_result.reason_of_death(died) == reason


def test_reason_shows_only_the_newest_line_of_model_code() -> None:
    """The newest line of the model's code is told, and no frame of the package."""
    told = block_result.located(LastSeen(STACK, 5 << 20, 1.5, 2, 3), block=3)
    assert told.where == "It was at line 7 of the block, in search"
    assert "sandbox_worker" not in told.stack
    assert block_result.located(LastSeen(STACK), block=4).where == "It was at line 7 of an earlier block, in search"
    assert block_result.sentence_of_death("it was slow", told) == (
        "it was slow. It was at line 7 of the block, in search. It used 5 MiB (processes: 2, threads: 3)"
    )


@table("used_bytes, told", [(0, "less than 1 MiB"), (900_000, "less than 1 MiB"), (1 << 20, "1 MiB")])
def test_small_cpu_usage_is_not_told_as_zero(used_bytes: int, told: str) -> None:
    """A program that uses very little CPU time is not reported with zero."""
    seen = block_result.located(LastSeen("", used_bytes, 0.1, 1, 1), block=1)
    assert (
        block_result.sentence_of_death("it was slow", seen) == f"it was slow. It used {told} (processes: 1, threads: 1)"
    )


@table(
    "stack",
    ["", "garbage \x1b[31m", '  File "<block 1>", line \u0662 in x', 'File "<block 1>", line 1 in ' + "x" * 9000],
)
def test_a_stack_that_says_nothing_is_left_out(stack: str) -> None:
    assert (
        block_result.sentence_of_death("it was slow", block_result.located(LastSeen(stack), block=1)) == "it was slow"
    )


def test_line_in_digits_of_another_script_is_no_frame() -> None:
    """Model code may write to the descriptor that the stack comes through."""
    seen = LastSeen(stack='  File "<block 1>", line \u0662 in <module>\n  File "<block 1>", line 5 in <module>\n')
    assert block_result.located(seen, 1).where == "It was at line 5 of the block"


@table("limit", get_args(WatchedLimit))
def test_limit_that_init_watches_has_a_sentence(limit: WatchedLimit) -> None:
    assert " used " in block_result.reason_of_death(Exceeded(limit, 2 << 20, 1 << 20, LastSeen()))
