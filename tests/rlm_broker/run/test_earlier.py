"""Runs that go on from the trace of another one."""

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from rlm_broker import (
    RLM,
    BlockStarted,
    Completion,
    ConfigurationError,
    Event,
    Limits,
    LMRequest,
    ModelFailed,
    RunFailed,
    RunStarted,
    Sandbox,
    ScriptedClient,
    Trace,
    TraceWriter,
)
from rlm_broker.run.prompts.messages import SUMMARISE
from tests.rlm_broker.run.test_branches import turn_of

QUESTION = "What is the sum?"
CODES = ["n = 40", "n += 1\nprint(n)", "n += 1", "FINAL(n)"]


def scripted(codes: Sequence[str], fails_at: int | None = None) -> ScriptedClient:
    """Return a model whose turns have these codes. One turn fails."""

    def reply(request: LMRequest) -> str:
        if not request.is_loop:
            return f"reply to {request.messages[-1].content}"
        turn = turn_of(request)
        if turn == fails_at:
            raise ModelFailed("the model is gone")
        return f"Turn {turn}.\n```repl\n{codes[turn - 1]}\n```"

    return ScriptedClient(reply)


class Runs:
    """Runs about one context, each with a trace of its own."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._sandbox = sandbox
        self.folder = folder
        self._number = 0

    def trace(self, client: ScriptedClient, ask: Callable[[RLM], Any], **given: Any) -> Path:
        """Run to an answer or a failure; return the trace."""
        self._number += 1
        path = self.folder / f"{self._number}.jsonl"
        with TraceWriter(path) as writer:
            rlm = RLM(client, sandbox=self._sandbox, on_event=writer, **given)
            try:
                self.last = ask(rlm)
            except RunFailed as failed:
                self.last = failed
        return path

    def failed(self, codes: Sequence[str], turn: int, **given: Any) -> Path:
        """Return the trace of a run whose model fails in this turn."""
        path = self.trace(scripted(codes, turn), lambda rlm: rlm.completion("text", QUESTION), **given)
        assert isinstance(self.last, ModelFailed)
        return path

    def resumed(self, client: ScriptedClient, *traces: Path, **given: Any) -> Completion[Any]:
        """Return the completion of a run that goes on from traces."""
        self.trace(client, lambda rlm: rlm.resume(traces, "text").result(), **given)
        assert isinstance(self.last, Completion), self.last
        return self.last


@pytest.fixture
def runs(open_sandbox: Sandbox, tmp_path: Path) -> Runs:
    return Runs(open_sandbox, tmp_path)


def test_failed_run_goes_on_as_if_it_had_not_failed(runs: Runs) -> None:
    trace = runs.failed(CODES, 3)
    client = scripted(CODES)
    resumed = runs.resumed(client, trace)
    runs.trace(scripted(CODES), lambda rlm: rlm.completion("text", QUESTION))
    whole = runs.last
    assert (resumed.response, resumed.iterations, resumed.earlier_turns) == ("42", 4, 2)
    assert (resumed.messages, resumed.root_prompt) == (whole.messages, QUESTION)
    assert [[block.stdout for block in turn.blocks] for turn in resumed.trajectory] == [[""], ["41\n"], [""], [""]]
    assert resumed.usage_summary.total == whole.usage_summary.total  # the failed run's calls are counted
    assert len(client.requests) == 2


def test_trace_says_what_it_goes_on_from_and_has_only_further_blocks(runs: Runs) -> None:
    first = runs.failed(CODES, 3)
    second = runs.trace(scripted(CODES, 4), lambda rlm: rlm.resume(first, "text").result())
    (before,) = [event for event in Trace(first) if isinstance(event, RunStarted)]
    (started,) = [event for event in Trace(second) if isinstance(event, RunStarted)]
    assert (started.branch_of, started.after_turn, started.is_resumed) == (before.tree, 2, True)
    assert [event.block for event in Trace(second) if isinstance(event, BlockStarted)] == [3]
    with pytest.raises(ConfigurationError, match=f"goes on from the run {before.tree}: give the trace of that one"):
        runs.resumed(scripted(CODES), second)
    third = runs.resumed(scripted(CODES), first, second)
    assert (third.response, third.earlier_turns, third.usage_summary.total.total_calls) == ("42", 3, 4)
    joined = runs.folder / "joined.jsonl"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    assert runs.resumed(scripted(CODES), joined).response == "42"


def test_calls_tools_and_children_are_answered_from_the_trace(runs: Runs) -> None:
    called = []

    def price(name: str) -> int:
        called.append(name)
        return len(name)

    code = (
        "said = llm_query_batched(['a', 'b', 'a'])\nchild = rlm_query('FINAL me')\nalone = llm_query('c')\n"
        "cost = price('lens')\nprint(said, child, alone, cost)"
    )
    codes = [code, "1 / 0", "FINAL(f'{said} {child} {alone} {cost}')"]
    limits = Limits(max_depth=2)

    def of_both(codes: Sequence[str], fails_at: int | None = None) -> ScriptedClient:
        own = scripted(codes, fails_at)._replies
        assert callable(own)
        return ScriptedClient(lambda request: "FINAL(mine)" if request.is_loop and request.depth else own(request))

    trace = runs.trace(
        of_both(codes, 3), lambda rlm: rlm.completion("text", QUESTION), tools={"price": price}, limits=limits
    )
    client = of_both(codes)
    resumed = runs.resumed(client, trace, tools={"price": price}, limits=limits)
    assert resumed.response == "['reply to a', 'reply to b', 'reply to a'] mine reply to c 4"
    assert len(client.requests) == 1
    assert called == ["lens"]


def test_text_that_is_not_whole_ends_the_replay_and_the_model_is_told(runs: Runs) -> None:
    secret = "sk-" + "a1B2" * 10
    trace = runs.failed(["n = 1", f"key = '{secret}'", "m = 2", ""], 4)
    resumed = runs.resumed(scripted(["", "", "", "print(n)\nprint('key' in dir(), 'm' in dir())", "FINAL(n)"]), trace)
    told = str(resumed.messages[7].content)
    assert "This run goes on in a fresh REPL. Its first 1 of 3 blocks were run again" in told
    assert "has a text that is not whole in the trace" in told
    assert (resumed.trajectory[3].blocks[0].stdout, resumed.response) == ("1\nFalse False\n", "1")


@pytest.mark.parametrize("limits", [Limits(max_iterations=2), Limits(max_llm_calls=2)], ids=["turns", "calls"])
def test_run_that_a_limit_ended_goes_on_with_a_higher_one(runs: Runs, limits: Limits) -> None:
    trace = runs.trace(scripted([*CODES, ""]), lambda rlm: rlm.completion("text", QUESTION), limits=limits)
    with pytest.raises(
        (ConfigurationError, AssertionError), match=r"max_iterations = 2 leaves no turn|max_llm_calls = 2"
    ):
        runs.resumed(scripted(CODES), trace, limits=limits)
    resumed = runs.resumed(scripted(CODES), trace)
    assert (resumed.response, resumed.earlier_turns) == ("42", 2)
    assert "stdout:\n41" in str(resumed.messages[5].content)
    assert "no turns left" not in str(resumed.messages[5].content)


def test_stopped_run_goes_on_before_the_block_that_was_under_way(runs: Runs) -> None:
    def stop(rlm: RLM) -> Completion[Any]:
        run = rlm.start("text", QUESTION, on_event=lambda event: stop_at(event))

        def stop_at(event: Event) -> None:
            if isinstance(event, BlockStarted) and event.block == 2:
                run.stop()

        return run.result()

    trace = runs.trace(scripted(["n = 40", "n = 0\nwhile True: pass"]), stop)
    assert runs.last.is_stopped
    resumed = runs.resumed(scripted(CODES), trace)
    assert (resumed.response, resumed.earlier_turns) == ("42", 1)


def test_run_goes_on_after_a_summary(runs: Runs) -> None:
    turns = iter(["n = 40", "n += 1", "n += 1", "print(n)", None, "FINAL(f'{n} {len(history)}')"])

    def reply(request: LMRequest) -> str:
        if request.messages[-1].content == SUMMARISE:
            return "n is counted up."
        if (code := next(turns)) is None:
            raise ModelFailed("the model is gone")
        return f"{'thinking ' * 1_500}\n```repl\n{code}\n```"

    client = ScriptedClient(reply)
    client.context_tokens = 10_000
    trace = runs.trace(client, lambda rlm: rlm.completion("text", QUESTION))
    before = runs.last.messages
    assert any(message.content == SUMMARISE for message in before)
    resumed = runs.resumed(client, trace)
    replaced = [message.content for message in before].index(SUMMARISE) + 2
    assert resumed.response == f"42 {replaced}"
    assert resumed.messages[replaced : len(before)] == before[replaced:]  # those before are whole in the trace


def test_trace_that_cannot_be_gone_on_from_is_refused_in_one_sentence(runs: Runs, open_sandbox: Sandbox) -> None:
    failed = runs.failed(CODES, 3)
    answered = runs.trace(scripted(CODES), lambda rlm: rlm.completion("text", QUESTION))
    lines = [json.loads(line) for line in failed.read_text().splitlines()]
    old = runs.folder / "old.jsonl"
    holes = []
    for number, event in enumerate(("replied", "call_started", "call_ended")):
        gone = next(at for at, line in enumerate(lines) if line["event"] == event)
        holes.append(runs.folder / f"hole{number}.jsonl")
        holes[-1].write_text("".join(f"{json.dumps(line)}\n" for at, line in enumerate(lines) if at != gone))
    called = next(line for line in lines if line["event"] == "call_ended")
    gained = []
    for number, usage in enumerate(
        ({"total_cost": -100.0}, {"total_cost": math.nan}, {"total_input_tokens": -(10**9)})
    ):
        gained.append(runs.folder / f"gained{number}.jsonl")
        changed = [line | {"usage": line["usage"] | usage} if line is called else line for line in lines]
        gained[-1].write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    del lines[0]["metadata"]["context"]
    old.write_text("\n".join(map(json.dumps, lines)) + "\n")
    (runs.folder / "empty").touch()

    def ask(rlm: RLM) -> None:
        with rlm:
            rlm.completion("text", QUESTION)

    in_kept = runs.trace(scripted(CODES, 2), ask, persistent=True)
    gone_on = runs.trace(scripted(CODES), lambda rlm: rlm.resume(failed, "text").result())
    rlm = RLM(scripted(CODES), sandbox=open_sandbox)
    kept = RLM(scripted(CODES), sandbox=open_sandbox, persistent=True)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: rlm.resume(answered, "text"), "there is no run to go on from in .*: its run has answered"),
        (lambda: rlm.resume([failed, gone_on], "text"), "no run to go on from in .*: its run has answered"),
        (lambda: rlm.resume(runs.folder / "empty", "text"), "no run .* in .*empty: it has the beginning of none"),
        (lambda: rlm.resume(os.devnull, "text"), "/dev/null is not a regular file: write the trace to one"),
        *((partial(rlm.resume, cast("str", each), "text"), "trace must be a str or PathLike") for each in (None, [3])),
        (lambda: rlm.resume(failed, {"a": "b"}).result(), "the context is a dict of 1 character in 1 part, and"),
        (lambda: rlm.resume(old, "text"), "does not say what its run was about"),
        *((partial(rlm.resume, hole, "text"), "is not whole: it lacks lines of its run") for hole in holes),
        *(
            (partial(rlm.resume, each, "text"), "the usage of a call in it is negative, or no number")
            for each in gained
        ),
        (lambda: rlm.resume(runs.folder / "none.jsonl", "text"), "cannot read .*none.jsonl"),
        (lambda: rlm.resume([], "text"), "name a trace to go on from"),
        (lambda: rlm.resume(failed, "text", "Another question?"), "has the question there"),
        (lambda: rlm.resume(failed, "texts").result(), "the context is a str of 5 characters, and the run to go on"),
        (lambda: kept.resume(failed, "text"), "a persistent RLM cannot go on from a trace"),
        (lambda: rlm.resume(in_kept, "text"), "was in a persistent REPL: its trace lacks the variables before it"),
    ]
    for call, sentence in cases:
        with pytest.raises(ConfigurationError, match=sentence):
            call()


def test_block_whose_call_a_limit_refused_ends_the_replay(runs: Runs) -> None:
    codes = ["n = 1", "said = llm_query('a')", ""]
    trace = runs.trace(scripted(codes), lambda rlm: rlm.completion("text", QUESTION), limits=Limits(max_llm_calls=2))
    resumed = runs.resumed(scripted([*codes[:2], "FINAL(f\"{n} {'said' in globals()}\")"]), trace)
    assert resumed.response == "1 False"
    assert "block 2 asked what the record has no answer to" in str(resumed.messages[5].content)


def test_run_killed_in_its_first_turn_begins_anew_and_its_calls_count(runs: Runs) -> None:
    trace = runs.trace(scripted(CODES, 2), lambda rlm: rlm.completion("text", None))
    cut = runs.folder / "cut.jsonl"
    cut.write_text("".join(trace.read_text().splitlines(keepends=True)[:5]))
    resumed = runs.resumed(scripted(CODES), cut)
    assert (resumed.response, resumed.earlier_turns, resumed.root_prompt) == ("42", 0, None)
    assert resumed.usage_summary.total.total_calls == 5
