import json
from itertools import product
from pathlib import Path

import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.event import BlockStarted, Event
from rlm_broker.events.trace import TraceWriter, events
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.watch.otlp import write_otlp
from rlm_broker.watch.trace_tree import Trace
from tests.support.command import ENVIRONMENT, run, sentence
from tests.support.forked_python import python


def test_the_tree_of_runs_is_drawn_with_what_each_did(tmp_path: Path) -> None:
    client = ScriptedClient(
        ["```repl\nanswer['content'] = rlm_query('the child')\n```", "```repl\nFINAL('found')\n```", "FINAL(told)"],
        cost_per_call=0.5,
    )
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        RLM(client, limits=Limits(max_depth=2), on_event=writer).completion("c", "the question")
    lines = run("runs", "show", tmp_path / "run.jsonl").stdout.splitlines()
    assert lines[0] == "1 [scripted] the question"
    assert lines[1].startswith("  turns 2, blocks 1 ok, calls 2, tokens ")
    assert lines[1].endswith("$1.0000")
    assert lines[2].startswith("  answered in ")
    assert lines[3] == "  1.1 [scripted] the child"
    assert lines[4].endswith("$0.5000")
    assert lines[5].endswith(" s: found")


async def test_stopped_run_is_told_as_stopped(tmp_path: Path) -> None:
    """The lines of a run, and the tree of its trace, tell that it was stopped, and in which block."""
    hangs = "A first guess: 7.\n```repl\nimport time; time.sleep(1000)\n```"
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        going = RLM(ScriptedClient([hangs]), on_event=writer).start("c", "the question")
        async for event in going.events():
            if isinstance(event, BlockStarted):
                going.stop()
        assert (await going).is_stopped
    lines = Trace(tmp_path / "run.jsonl").tree()
    assert "blocks 1 not ended, calls 1" in lines[1]
    assert lines[2].startswith("  stopped in ")
    assert "[depth 0] run 1: stopped after " in run("runs", "show", "--full", tmp_path / "run.jsonl").stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The trace of a run with a long output, a call, a child, an error and a picture."""
    code = (
        "for n in range(100): print('line', n)\nprint(llm_query('a part ' * 1_000))\n"
        "class Picture:\n    def _repr_png_(self): return b'png'\ndisplay(Picture())\n"
    )
    replies = [f"I look.\n```repl\n{code}```", "of the part", "```repl\nrlm_query('the child')\n1 / 0\n```"]
    client = ScriptedClient([*replies, "FINAL(from below)", "FINAL(found)"])
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        RLM(client, limits=Limits(max_depth=2), on_event=writer).completion("c", "the question")
    return path


def test_all_of_a_run_can_be_shown(trace: Path) -> None:
    shown = run("runs", "show", "--full", trace).stdout
    lines = shown.splitlines()
    at = lines.index("[depth 0] block 1")
    assert lines[at + 1] == "  for n in range(100): print('line', n)"
    assert [f"  line {n}" for n in range(100)] == [line for line in lines if line.startswith("  line ")]
    assert f"  {('a part ' * 1_000)}" in lines
    assert "  of the part" in lines
    assert "  shown beside the output: 1:" in lines
    assert "[depth 1] run 1.1 with scripted" in lines
    assert "  ZeroDivisionError: division by zero" in lines
    assert lines[-1] == "  found"


def test_runs_are_shown_as_json(trace: Path) -> None:
    root, child = json.loads(run("runs", "show", "--json", trace).stdout)
    assert (root["name"], root["question"], root["blocks"]) == ("1", "the question", {"ok": 1, "error": 1})
    assert (root["response"], root["error"], root["turns"]) == ("found", None, 3)
    assert (child["name"], child["response"], child["duration_s"] > 0) == ("1.1", "from below", True)
    both = run("runs", "show", "--json", "--full", trace)
    assert (both.returncode, "give either --full or --json" in both.stdout) == (2, True)
    missing = run("runs", "show", "--json", "/nowhere")
    assert json.loads(missing.stdout)["error"]["kind"] == "configuration"


def test_events_of_a_trace_are_those_that_were_written(tmp_path: Path) -> None:
    told: list[Event] = []
    with TraceWriter(tmp_path / "run.jsonl") as writer:

        def tell(event: Event) -> None:
            told.append(event)
            writer(event)

        RLM("offline", on_event=tell).completion("The vault is open.", "Is the vault open?")
    assert [*events(tmp_path / "run.jsonl")] == told
    for kind, wrong in (("call_retried", '"call": "one"'), ("block_ended", '"block": 1, "outcome": {"code": 5}')):
        (tmp_path / "x").write_text(f'{{"event": "{kind}", "run": "1", "depth": 0, {wrong}}}\n')
        with pytest.raises(ConfigurationError, match=f"is not a trace: malformed {kind} event"):
            list(events(tmp_path / "x"))
    (tmp_path / "x").write_text('{"event": "iteration_started", "run": "1", "depth": 0, "number": 1}\nnot JSON\n')
    with pytest.raises(ConfigurationError, match="x is not a trace: line 2 is not JSON"):
        list(events(tmp_path / "x"))


def test_trace_cut_anywhere_shows_what_its_whole_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        RLM(ScriptedClient(["FINAL(\N{GRINNING FACE})"]), on_event=writer).completion("c", "the question")
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole), 3):  # the character has four bytes
        path.write_bytes(whole[:size])
        assert Trace(path).tree()[0] == "1 [scripted] the question"
    path.write_bytes(whole[:50])
    with pytest.raises(ConfigurationError, match="is not a trace: line 1"):
        Trace(path).tree()


def test_trace_of_text_with_half_a_character_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        RLM(ScriptedClient(["FINAL(\ud800)"]), on_event=writer).completion("c", "the question")
    assert Trace(path).tree()[0] == "1 [scripted] the question"


HOSTILE = (
    '"event": []',
    '"number": Infinity, "event": "iteration_started"',
    '"duration_s": 1' + "0" * 400 + ', "event": "run_ended"',
    '"depth": 1' + "0" * 30 + ', "event": "iteration_started", "number": 1',
    '"event": "call_ended", "usage": {"total_calls": 1, "total_cost": 1' + "0" * 400 + "}",
    '"event": "run_started", "question": "q", "model": "m", "metadata": ' + '{"a":' * 900 + "1" + "}" * 900,
)


def test_hostile_trace_is_a_sentence_or_is_shown(tmp_path: Path) -> None:
    hostile = tmp_path / "run.jsonl"
    for field, form in product(HOSTILE, ([], ["--full"], ["--json"])):
        hostile.write_text('{"n": 1, "time": 1, "tree": "t", "run": "1", "depth": 0, ' + field + "}\n")
        done = run("runs", "show", *form, hostile)
        assert (done.returncode in (0, 2), "Traceback" in done.stderr) == (True, False), (field, form, done.stderr)


def test_view_writes_a_page_beside_the_trace(trace: Path) -> None:
    """trace view writes the page and prints its link; a second time it replaces it."""
    for _ in range(2):
        done = run("runs", "view", "--no-open", trace)
        assert done.returncode == 0
        assert done.stdout == f"{trace.with_suffix('.html').as_uri()}\n"
        assert done.stderr == ""
    elsewhere = trace.with_name("other page.html")
    assert run("runs", "view", "--no-open", trace, "--out", elsewhere).stdout.endswith("/other%20page.html\n")
    assert elsewhere.stat().st_size == trace.with_suffix(".html").stat().st_size


def test_view_tells_what_is_not_shown(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("no json\n")
    done = run("runs", "view", "--no-open", trace)
    assert done.returncode == 0
    assert sentence(done).startswith("note: The rest of the trace cannot be read after ")


def test_view_opens_the_browser_if_there_is_a_display(trace: Path) -> None:
    """With a display the browser gets the link; without one, or with --no-open, it does not."""
    opened = trace.with_name("opened")
    browser = trace.with_name("browser")
    browser.write_text(f"#!/bin/sh\nprintf %s \"$1\" >> '{opened}'\n")
    browser.chmod(0o700)
    for display, flags in (("", []), (":7", ["--no-open"]), (":7", [])):
        assert not opened.exists()
        environment = {**ENVIRONMENT, "DISPLAY": display, "WAYLAND_DISPLAY": "", "BROWSER": str(browser)}
        python("-m", "rlm_broker", "runs", "view", *flags, trace, env=environment, check=True)
    assert opened.read_text() == trace.with_suffix(".html").as_uri()


def test_export_goes_to_stdout_or_a_new_file(trace: Path) -> None:
    printed = run("runs", "export", "--otlp", trace)
    assert printed.returncode == 0
    assert run("runs", "export", trace, "--out", trace.with_name("out")).stdout == ""
    assert trace.with_name("out").read_text() == printed.stdout
    again = run("runs", "export", "--otlp", trace, "--out", trace.with_name("out"))
    assert again.returncode == 2
    assert "exists: remove it, or write to another file" in sentence(again)


def test_trace_that_cannot_be_opened_is_a_sentence() -> None:
    for path in ("no/such", "a\0"):
        with pytest.raises(ConfigurationError, match="cannot read"):
            Trace(path).tree()


def test_export_of_no_trace_leaves_no_file(tmp_path: Path) -> None:
    for content in ("", "no trace\n", '{"event": "call_ended", "run": "1", "depth": 0, "usage": 7}\n'):
        (tmp_path / "run.jsonl").write_text(content)
        with pytest.raises(ConfigurationError):
            write_otlp(tmp_path / "run.jsonl", tmp_path / "out")
        assert not (tmp_path / "out").exists()
