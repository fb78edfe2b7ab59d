"""Trace files: whole lines in order, also of long events."""

import json
import signal
import threading
from pathlib import Path

import pytest

from rlm_broker import TraceWriter as RlmTraceWriter
from rlm_broker.errors import ConfigurationError
from rlm_broker.events import trace as writer
from rlm_broker.events.event import BlockEnded, BlockPrinted, CallEnded, CallText, IterationStarted, Replied
from rlm_broker.events.trace import TraceWriter
from rlm_broker.results import Block
from rlm_broker.usage import Usage
from tests.support.forked_python import python


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_event_is_one_numbered_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as write:
        write(IterationStarted("1", 0, 1))
        assert [line["event"] for line in lines(path)] == ["iteration_started"]
        write(BlockEnded("1", 0, 1, Block("x", "ok", stdout="out")))
        second = lines(path)[1]
    assert (second["n"], second["event"], second["run"], second["block"]) == (2, "block_ended", "1", 1)
    assert second["outcome"]["stdout"] == "out"  # type: ignore[index]


def test_trace_has_no_secret_and_no_piece_of_a_reply(tmp_path: Path) -> None:
    """Two pieces of a reply may hold a secret together, so none of them is written."""
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as write:
        write(Replied("1", 0, 1, "the text before sk-proj-abcdefghijklmnop0123 and after"))
        write(CallText("1", 0, 1, "sk-abcdefghij"))
        write(CallText("1", 0, 1, "klmnop0123"))
        write(CallEnded("1", 0, 1, "model", Usage(), 0.1, "sk-abcdefghijklmnop0123"))
        write(BlockPrinted("1", 0, 1, "stdout", "a\ud800b"))
    found = [(line["event"], line.get("text", line.get("response"))) for line in lines(path)]
    assert found == [
        ("replied", "the text before [redacted] and after"),
        ("call_ended", "[redacted]"),
        ("block_printed", "a\ud800b"),
    ]


def test_path_may_be_text_and_full_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch()
    with RlmTraceWriter(str(path)) as write:
        write(IterationStarted("1", 0, 1))
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r"trace.jsonl exists: remove it, or write the trace to another file"):
        TraceWriter(str(path))
    assert path.read_bytes() == before
    TraceWriter("/dev/null").close()
    with pytest.raises(ConfigurationError, match=r"cannot write the trace .*nowhere.*: No such file or directory"):
        TraceWriter(tmp_path / "nowhere" / "trace.jsonl")


KILLED = """
import os, sys
from pathlib import Path
from rlm_broker.events.event import IterationStarted
from rlm_broker.events.trace import TraceWriter
write = TraceWriter(Path(sys.argv[1]))
for number in range(1, 501):
    write(IterationStarted("1", 0, number))
os.kill(os.getpid(), 9)
"""


def test_a_run_that_is_killed_leaves_every_line_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = python("-c", KILLED, path)
    assert done.returncode == -signal.SIGKILL
    assert [line["number"] for line in lines(path)] == list(range(1, 501))


def test_long_events_are_written_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    texts = ["x" * (300_000 if number % 3 == 1 else 10) for number in range(10)]
    with TraceWriter(path) as write:
        for number, text in enumerate(texts):
            write(Replied("1", 0, number, text))
    found = [(line["n"], line["number"], line["text"]) for line in lines(path)]
    assert found == [(number + 1, number, text) for number, text in enumerate(texts)]


def test_texts_are_cut_if_the_thread_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that exceed the pace of the writing thread are cut and say so."""
    path = tmp_path / "trace.jsonl"
    go_on = threading.Event()
    original = TraceWriter._write

    def held(self: TraceWriter, line: dict[str, object]) -> None:
        assert go_on.wait(60)
        original(self, line)

    monkeypatch.setattr(TraceWriter, "_write", held)
    monkeypatch.setattr(writer, "MOST_WAITING_CHARS", 300_000)
    with TraceWriter(path) as write:
        for number in range(3):
            write(Replied("1", 0, number, "x" * 160_000))
        go_on.set()
    texts = [str(line["text"]) for line in lines(path)]
    assert len(texts[0]) == 160_000
    assert "characters cut" in texts[1]
