"""The lines that `RLM(verbose=True)` prints without a terminal."""

import io
import os
import pty
import re

import pytest

from rlm_broker import RLM, Limits, ScriptedClient, print_events
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.events.event import RunEnded, RunStarted
from rlm_broker.events.story import MOST_CHARS
from rlm_broker.usage import UsageSummary
from rlm_broker.watch import terminal as terminals
from rlm_broker.watch.terminal import StoryPrinter
from tests.support.forked_python import Python
from tests.support.waiting import WAIT_S

STORY = """\
[depth 0] run 1 with scripted
  ?
[depth 0] REPL ready in N ms, isolation strict (N layers)
[depth 0] turn 1
[depth 0] turn 1: reply of scripted, N s, N tokens
  I ask.
[depth 0] block 1
  print(llm_query('one'))
  1 / 0
[depth 1] call 2: scripted, N s, N tokens
  asked:
  one
  replied:
  as to one
[depth 0] block 1: error after N s: ZeroDivisionError: division by zero
  as to one
  Traceback (most recent call last):
    File "<block 1>", line 2, in <module>
      1 / 0
      ~~^~~
  ZeroDivisionError: division by zero
[depth 0] turn 2
[depth 0] turn 2: reply of scripted, N s, N tokens
  FINAL(the answer)
[depth 0] run 1: answered after N s
  the answer
"""


def model(request: LMRequest) -> str:
    if request.depth:
        return f"as to {request.messages[-1].content}"
    if len(request.messages) > 2:
        return "FINAL(the answer)"
    return "I ask.\n```repl\nprint(llm_query('one'))\n1 / 0\n```"


def numberless(printed: str) -> str:
    return re.sub(
        r"(\d+ layers|\d+ ms|\d+\.\d\d s|[\d,]+ tokens in and \d+ out)",
        lambda found: f"N {found[0].split()[1]}",
        printed,
    )


def test_verbose_run_prints_what_the_command_line_does(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[object] = []
    rlm = RLM(ScriptedClient(model), verbose=True, on_event=told.append)
    assert rlm.completion("text", "?").response == "the answer"
    printed = capsys.readouterr()
    assert numberless(printed.err) == STORY
    assert printed.out == ""
    assert told
    RLM(ScriptedClient(model), on_event=print_events).completion("text", "?")
    assert numberless(capsys.readouterr().err) == STORY
    RLM(ScriptedClient(model), verbose=False).completion("text", "?")
    assert capsys.readouterr().err == ""


def test_a_call_that_waits_for_an_import_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals, "IMPORTING", {"litellm"})
    with RLM(ScriptedClient(model), on_event=StoryPrinter()) as rlm:
        rlm.completion("text", "?")
    told = [line for line in capsys.readouterr().err.splitlines() if "litellm" in line]
    assert told == ["[depth 0] waiting for the import of litellm, which takes seconds"]


def test_texts_and_failures_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(request: LMRequest) -> str:
        if request.depth:
            raise RuntimeError("down\x1b[2J\nsecond line")
        return f"\x1b]0;owned\x07{model(request)}"

    RLM(ScriptedClient(failing), verbose=True).completion("text", "?")
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    lines = printed.splitlines()
    at = lines.index("[depth 1] call 2 failed: scripted: RuntimeError: down\\x1b[2J")
    assert lines[at + 1 : at + 4] == ["  asked:", "  one", "  replied:"]
    assert "  \\x1b]0;owned\\x07I ask." in lines


def test_children_and_tools_are_told_with_their_depth(capsys: pytest.CaptureFixture[str]) -> None:
    def parent(request: LMRequest) -> str:
        code = "FINAL(rlm_query('part'))" if request.depth == 0 else "FINAL(double(x=21))"
        return f"```repl\nlen(context)\n{code}\n```"

    def double(x: int) -> int:
        return 2 * x

    rlm = RLM(ScriptedClient(parent), limits=Limits(max_depth=2), tools={"double": double}, verbose=True)
    assert rlm.completion("text", "?").response == "42"
    lines = numberless(capsys.readouterr().err).splitlines()
    at = lines.index("[depth 1] run 1.1 with scripted")
    assert lines[at + 1] == "  part"
    assert "[depth 1] turn 1" in lines
    at = lines.index("[depth 1] tool double: returned after N s")
    assert lines[at + 1 : at + 5] == ["  arguments:", '  {"args":[],"kwargs":{"x":21}}', "  result:", "  42"]
    at = lines.index("[depth 1] run 1.1: answered after N s")
    assert lines[at + 1] == "  42"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(question: str) -> RunStarted:
    return RunStarted(run="1", depth=0, model="m", question=question, metadata={})


def test_panels_keep_to_their_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile run cannot hold the event loop by panels: they are left out and counted, but for the end of a root."""
    monkeypatch.setattr(terminals, "DRAWN_AT_ONCE_S", 0.0)
    monkeypatch.setattr(terminals, "DRAWING_SHARE", 0.0)
    terminal = Terminal()
    printer = StoryPrinter(stream=terminal)
    for number in range(3):
        printer(started(f"question {number}"))
    assert terminal.getvalue() == ""
    printer(RunEnded("1", 0, response="the answer", error=None, iterations=1, duration_s=1.0, usage=UsageSummary()))
    assert "3 left out" in terminal.getvalue()
    assert "the answer" in terminal.getvalue()
    printer(started("one more"))
    monkeypatch.setattr(terminals, "DRAWN_AT_ONCE_S", 1e9)
    monkeypatch.setattr(terminals, "DRAWING_SHARE", 1e18)
    printer(started("the last"))
    assert "1 left out" in terminal.getvalue()
    assert "the last" in terminal.getvalue()


def test_unclosed_progress_line_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    code = "from rlm_broker import ProgressLine; line = ProgressLine()"
    with Python(["-c", code], stderr=theirs, env={**os.environ, "TERM": "xterm"}, takes_down=True) as program:
        assert program.wait(WAIT_S) == 0
    seen = os.read(ours, 1 << 16)
    assert -1 < seen.rfind(b"\x1b[?25l") < seen.rfind(b"\x1b[?25h")
    os.close(ours)
    os.close(theirs)


def test_escapes_count_as_characters_that_are_shown() -> None:
    terminal = Terminal()
    StoryPrinter(stream=terminal)(started("\U000e0001" * 4_000))
    assert len(terminal.getvalue()) < 4 * MOST_CHARS
