import json
from typing import Any

import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
    RunEnded,
    RunStarted,
    ToolStarted,
)
from rlm_broker.limits import Limits
from rlm_broker.results import Block
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.watch import spans as module
from rlm_broker.watch.spans import NAME_CHARS, Span, Spans


class Seen:
    """Spans, with all that began and all that ended."""

    def __init__(self) -> None:
        self.begun: list[Span] = []
        self.ended: list[Span] = []
        self.spans = Spans(self.begun.append, self.ended.append)

    def take(self, *events: Event) -> None:
        for event in events:
            self.spans.take(event)


def started(tree: str, run: str = "1", time: float = 1.0, **fields: Any) -> RunStarted:
    return RunStarted(run, run.count("."), "q", "openai/m", {"sub_model": "small"}, tree=tree, time=time, **fields)


def ended(tree: str, run: str = "1", time: float = 9.0, **fields: Any) -> RunEnded:
    return RunEnded(run, run.count("."), "a", None, 1, 1.0, UsageSummary(), tree=tree, time=time, **fields)


def call(number: int, tree: str = "t", run: str = "1", **fields: Any) -> CallStarted:
    return CallStarted(run, 0, number, None, "p", tree=tree, time=2.0, **fields)


def test_trees_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TREES", 3)
    seen = Seen()
    for number in range(10):
        seen.take(started(f"t{number}", time=number))
        seen.take(started("busy"), call(number, "busy"))
    assert len(seen.spans._trees) == 3
    assert {span.tree for span in seen.ended} == {f"t{number}" for number in range(8)}
    assert {span.results["error.type"] for span in seen.ended} == {"unfinished"}
    assert [span.end_ns for span in seen.ended] == [number * 10**9 for number in range(8)]


def test_open_spans_of_a_tree_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 5)
    seen = Seen()
    seen.take(started("t"), *(call(number) for number in range(100)), ended("t"))
    assert len(seen.begun) == len(seen.ended) == 5
    assert not seen.spans._trees


def test_repeated_and_lost_events_do_no_harm() -> None:
    """A second beginning counts no more, and an end without a beginning is left out."""
    seen = Seen()
    lost = CallEnded("1", 0, 9, "m", Usage(), 1.0, "", tree="t")
    block = BlockEnded("1", 0, 7, Block("", "ok"), tree="t")
    seen.take(lost, block, ended("t"))
    assert not seen.spans._trees
    seen.take(started("t"), started("t"), call(1), call(1), lost, block, ended("t", "1.4"), ended("t"), ended("t"))
    assert [span.key for span in seen.ended] == ["call 1", "run 1"]
    assert not seen.spans._trees


def test_times_that_cannot_be_are_no_error() -> None:
    seen = Seen()
    for time in (float("nan"), float("inf"), -1.0, 1e300):
        seen.take(started("t", time=5.0), ended("t", time=time))
    assert [(span.start_ns, span.end_ns) for span in seen.ended] == [(5 * 10**9,) * 2] * 4


def test_what_is_open_ends_with_its_run() -> None:
    seen = Seen()
    child = started("t", "1.1", block=1)
    seen.take(started("t"), BlockStarted("1", 0, 1, 1, "x", tree="t", time=1.0), child, call(1, run="1.1"))
    seen.take(ended("t", "1.1", 3.0))
    assert {span.key for span in seen.ended} <= {"call 1", "run 1.1"}
    seen.take(ended("t"))
    assert {span.key for span in seen.ended} == {"call 1", "run 1.1", "run 1.b1", "run 1"}
    assert seen.ended[-1].key == "run 1"


def test_deep_nesting_is_no_error() -> None:
    """A trace may name runs below runs as deep as it likes."""
    seen = Seen()
    runs = ["1" + ".1" * depth for depth in range(3_000)]
    seen.take(*(RunStarted(run, min(1, depth), "q", "m", {}, tree="t") for depth, run in enumerate(runs)))
    seen.take(RunEnded("1.1", 1, "a", None, 1, 1.0, UsageSummary(), tree="t"), ended("t"))
    assert [span.key for span in seen.ended] == [f"run {run}" for run in (*reversed(runs[2:]), "1.1", "1")]


def test_models_of_calls_are_told() -> None:
    """A call that names no model has that of its run's loop, and code's calls that of the tree for them."""
    seen = Seen()
    seen.take(started("t"), call(1), call(2, block=1), call(3, block=1, batch=4, of=5))
    assert [span.name for span in seen.begun[1:]] == ["chat openai/m", "chat small", "chat small"]
    assert seen.begun[3].attributes["rlm_broker.call.batch_size"] == 5


def test_stream_retries_and_stored_replies_are_told() -> None:
    seen = Seen()
    text = CallText("1", 0, 1, "a", tree="t", time=2.5)
    retries = [CallRetried("1", 0, 1, 2, 0.5, "m: HTTP status 503: secret", tree="t", time=2.2)] * 100
    end = CallEnded("1", 0, 1, "openai/m", Usage(1, 2, 3, 0.1, 1, 2), 1.0, "a", tree="t", time=3.0)
    seen.take(started("t"), call(1), *retries, text, text, end)
    (span,) = seen.ended
    assert span.results["gen_ai.request.stream"] is True
    assert span.results["gen_ai.response.time_to_first_chunk"] == 0.5
    assert span.results["rlm_broker.call.stored"] is True
    assert span.results["gen_ai.usage.cache_read.input_tokens"] == 2
    seen.take(call(2), CallEnded("1", 0, 2, "openai/m", Usage(), 0.0, "a", tree="t", is_remembered=True))
    assert seen.ended[1].results["rlm_broker.call.remembered"] is True
    assert len(span.events) == module.MOST_RETRIES
    assert span.events[0].attributes == {
        "rlm_broker.retry.attempt": 2,
        "rlm_broker.retry.wait_s": 0.5,
        "error.type": "503",
    }


def test_names_are_bounded() -> None:
    seen = Seen()
    long = "n" * 10_000
    seen.take(RunStarted(long, 0, "q", long, {}, tree=long, time=1.0))
    seen.take(ToolStarted(long, 0, 1, 1, long, "{}", tree=long, time=1.0))
    for span in seen.begun:
        assert max(len(str(value)) for value in span.attributes.values()) <= NAME_CHARS + 2
        assert len(span.name) <= NAME_CHARS + 20


def test_killed_block_has_its_limit() -> None:
    seen = Seen()
    block = Block("x", "killed", error="it took too long", limit="block_timeout_s")
    seen.take(started("t"), BlockStarted("1", 0, 1, 1, "x", tree="t", time=1.0))
    seen.take(BlockEnded("1", 0, 1, block, tree="t", time=2.0))
    (span,) = seen.ended
    assert span.results == {
        "rlm_broker.block.status": "killed",
        "rlm_broker.limit": "block_timeout_s",
        "error.type": "killed",
    }
    assert span.words == ""


async def test_calls_of_a_users_own_loop_are_spans() -> None:
    """A REPL of the user's own loop has no run: its calls have no parent, and no state is kept."""
    seen = Seen()
    async with LMHandler(ScriptedClient(["of one", "FINAL(of the child)"])) as handler, Sandbox() as sandbox:
        answers = handler.answers(Limits(max_depth=2), on_event=seen.spans.take, sandbox=sandbox)
        async with sandbox.repl("c", answers) as repl:
            await repl.aexecute("print(llm_query('one')); print(rlm_query('child'))")
    assert [(span.name, span.parent and span.parent.name) for span in seen.ended] == [
        ("chat scripted", None),
        ("chat scripted", "invoke_agent rlm_broker"),
        ("invoke_agent rlm_broker", None),
    ]
    assert not seen.spans._trees


def test_messages_have_the_form_of_the_conventions() -> None:
    prompt = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]},
    ]
    assert json.loads(module.prompt_value(prompt)) == [
        {"role": "system", "parts": [{"type": "text", "content": "be short"}]},
        {"role": "user", "parts": [{"type": "text", "content": "look"}, {"type": "image_url"}]},
    ]
    assert json.loads(module.reply_value("yes")) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "yes"}], "finish_reason": "stop"}
    ]
    assert json.loads(module.instructions_value("be short")) == [{"type": "text", "content": "be short"}]


def test_content_is_bounded() -> None:
    """However large a prompt is, its attribute stays small, and is JSON."""
    many = [{"role": "user" * 1_000, "content": [{"type": "text", "text": "x" * 10**5}] * 100}] * 100
    made = module.prompt_value(many)
    most = module.MOST_MESSAGES**2 * (module.MOST_CHARS + 200)
    assert len(made) < most
    assert len(json.loads(made)) == module.MOST_MESSAGES
    assert len(module.output_value("o" * 10**6, "e" * 10**6, "w" * 10**6)) < 3 * (module.MOST_CHARS + 100)


def test_malformed_messages_are_no_error() -> None:
    """A trace may hold any plain value in the place of messages."""
    odd = ["text", None, {}, {"role": None, "content": 3}, {"role": "user", "content": ["a", {"type": 7}]}]
    assert len(json.loads(module.prompt_value(odd))) == 3
