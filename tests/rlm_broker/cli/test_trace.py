from pathlib import Path

import pytest

from rlm_broker.clients.scripted import ScriptedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.trace.tree import tree
from rlm_broker.trace.writer import TraceWriter
from tests.support.command import run, sentence


def test_the_tree_of_runs_is_drawn_with_what_each_did(tmp_path: Path) -> None:
    client = ScriptedClient(
        ["```repl\nanswer['content'] = rlm_query('the child')\n```", "```repl\nFINAL('found')\n```", "FINAL(told)"],
        cost_per_call=0.5,
    )
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        RLM(client, limits=Limits(max_depth=2), on_event=writer).completion("c", "the question")
    lines = run("trace", "show", tmp_path / "run.jsonl").stdout.splitlines()
    assert lines[0] == "1 [scripted] the question"
    assert lines[1].startswith("  turns 2, blocks 1 ok, calls 2, tokens ")
    assert lines[1].endswith("$1.0000")
    assert lines[2].startswith("  answered in ")
    assert lines[3] == "  1.1 [scripted] the child"
    assert lines[4].endswith("$0.5000")
    assert lines[5].endswith(" s: found")


def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"event": "run_started", "run": "1", "depth": 0}\nnot JSON\n')
    done = run("trace", "show", tmp_path / "x")
    assert done.returncode == 2
    assert "is not a trace: line 2" in sentence(done)
    (tmp_path / "empty").touch()
    done = run("trace", "show", tmp_path / "empty")
    assert (done.returncode, sentence(done)) == (2, f"rlm-broker trace: {tmp_path}/empty is not a trace: it is empty")
    assert "cannot read" in sentence(run("trace", "show", tmp_path / "missing"))


def test_trace_cut_anywhere_shows_what_its_whole_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        RLM(ScriptedClient(["FINAL(\N{GRINNING FACE})"]), on_event=writer).completion("c", "the question")
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        assert tree(path)[0] == "1 [scripted] the question"
    path.write_bytes(whole[:50])
    with pytest.raises(ConfigurationError, match="is not a trace: line 1"):
        tree(path)


def test_trace_of_text_with_half_a_character_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        RLM(ScriptedClient(["FINAL(\ud800)"]), on_event=writer).completion("c", "the question")
    assert tree(path)[0] == "1 [scripted] the question"
