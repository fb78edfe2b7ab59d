"""Lines that a run prints while it goes on."""

import io
import re

import pytest

from rlm_broker import RLM, ConfigurationError, Limits, ScriptedClient, print_events
from rlm_broker.clients.base import LMRequest
from rlm_broker.results import Usage
from rlm_broker.trace.events import CallEnded
from rlm_broker.trace.printing import print_event

STORY = """\
[depth 0] run 1 with scripted
[depth 0] REPL ready in N ms, isolation strict (N layers)
[depth 0] iteration 1
[depth 1] batch 1: 1 of 2 calls
[depth 1] batch 1: 2 of 2 calls
[depth 0] block 1: error after N s: ZeroDivisionError: division by zero
[depth 0] iteration 2
[depth 0] run 1: answered after N s
"""


def model(request: LMRequest) -> str:
    if request.depth:
        return str(request.messages[-1].content)
    if len(request.messages) > 2:
        return "FINAL(the answer)"
    return "```repl\nllm_query_batched(['one', 'two'])\n1 / 0\n```"


def numberless(printed: str) -> str:
    return re.sub(r"(\d+ layers|\d+ ms|\d+\.\d\d s)", lambda found: f"N {found[0].split()[1]}", printed)


def test_verbose_run_prints_what_the_command_line_does(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[object] = []
    rlm = RLM(ScriptedClient(model), verbose=True, on_event=told.append)
    assert rlm.completion("text", "?").response == "the answer"
    printed = capsys.readouterr()
    assert numberless(printed.err) == STORY
    assert printed.out == ""
    assert told
    RLM(ScriptedClient(model), on_event=print_events).completion("text", "?")
    assert numberless(capsys.readouterr().err) == numberless(printed.err)
    RLM(ScriptedClient(model), verbose=False).completion("text", "?")
    assert capsys.readouterr().err == ""


def test_failures_are_printed_in_a_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Failures are printed in a line that steers no terminal."""

    def failing(request: LMRequest) -> str:
        if request.depth:
            raise RuntimeError("down\x1b[2J\nsecond line")
        return model(request)

    RLM(ScriptedClient(failing), verbose=True).completion("text", "?")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "RuntimeError" in line] == [
        f"[depth 1] call {number} failed: scripted: RuntimeError: down\\x1b[2J" for number in (2, 3)
    ]


def test_long_batch_is_ten_lines() -> None:
    stream = io.StringIO()
    for done in range(1, 1001):
        print_event(CallEnded("1", 1, done, "m", Usage(), 0.1, "", batch=3, done=done, of=1000), stream)
    hundreds = range(100, 1001, 100)
    assert stream.getvalue().splitlines() == [f"[depth 1] batch 3: {done:,} of 1,000 calls" for done in hundreds]


def test_children_are_told_with_their_depth(capsys: pytest.CaptureFixture[str]) -> None:
    def parent(request: LMRequest) -> str:
        return "FINAL(a child)" if request.depth else "```repl\nFINAL(rlm_query('part'))\n```"

    RLM(ScriptedClient(parent), limits=Limits(max_depth=2), verbose=True).completion("text", "?")
    lines = capsys.readouterr().err.splitlines()
    assert "[depth 1] run 1.1 with scripted" in lines
    assert "[depth 1] iteration 1" in lines


def test_verbose_is_yes_or_no() -> None:
    with pytest.raises(ConfigurationError, match="verbose must be a bool, not int"):
        RLM("offline", verbose=1)  # type: ignore[arg-type]
