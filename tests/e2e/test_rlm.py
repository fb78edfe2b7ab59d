"""Whole runs: question, model, code, REPL, answer, with real processes and a client of our own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed
from rlm_broker.events.event import BlockPrinted, RunStarted
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.e2e.conftest import MakeRLM
from tests.support.processes import living_below
from tests.support.waiting import LONGER_AND_LONGER, WAIT_S

Messages = list[dict[str, Any]]


def scripted(*replies: str) -> FunctionClient:
    script = iter(replies)
    return FunctionClient(lambda _: next(script), "scripted")


def model(reply: Callable[[Messages], str]) -> FunctionClient:
    return FunctionClient(lambda messages: reply(messages), "function")


def test_rlm_answers_a_question_through_its_repl(open_sandbox: Sandbox) -> None:
    completion = RLM(scripted("```repl\nFINAL(len(context))\n```"), sandbox=open_sandbox).completion(
        "x" * 1234, "How long is it?"
    )
    assert completion.response == "1234"
    assert completion.iterations == 1
    assert completion.isolation is not None
    assert completion.isolation.level == "strict"
    assert completion.usage_summary.model_usage_summaries["scripted"].total_calls == 1


def test_block_output_is_told_and_variables_persist(rlm: MakeRLM) -> None:
    seen: list[str] = []

    def reply(messages: Messages) -> str:
        seen.append(messages[-1]["content"])
        return "```repl\nn = len(context)\nprint('n is', n)\n```" if len(seen) == 1 else "FINAL_VAR(n)"

    assert rlm(model(reply)).completion("a" * 3_000, "How long?").response == "3000"
    assert "You have not looked at the context yet" in seen[0]
    assert "n is 3000" in seen[1]
    assert "Question: How long?" in seen[1]


def test_child_run_has_its_own_repl(rlm: MakeRLM) -> None:
    """A child run has its own REPL, and a deeper query is a plain completion."""

    def reply(messages: Messages) -> str:
        if "Question: How many" in messages[-1]["content"]:
            return "```repl\nsecret = 1\nFINAL(rlm_query('child, is secret defined?'))\n```"
        if "Question: child" in messages[-1]["content"]:
            return "```repl\nFINAL(str(('secret' in globals(), context, llm_query('leaf'), rlm_query('leaf'))))\n```"
        return f"plain:{messages[-1]['content']}"

    completion = rlm(model(reply), limits=Limits(max_depth=2)).completion("", "How many?")
    assert completion.response == "(False, 'child, is secret defined?', 'plain:leaf', 'plain:leaf')"
    assert [trace.depth for trace in completion.child_traces] == [1]


def test_run_timeout_keeps_the_partial_answer(rlm: MakeRLM) -> None:
    """A run past its time ends with its partial answer and leaves no process."""
    before = living_below()
    for timeout_s in LONGER_AND_LONGER:
        client = ScriptedClient(["a first idea\n```repl\n1\n```", "```repl\nimport time; time.sleep(1000)\n```"])
        with pytest.raises(LimitReached, match="run_timeout_s") as caught:
            rlm(client, limits=Limits(run_timeout_s=timeout_s)).completion("", "?")
        assert living_below() == before
        if len(client.requests) == 2:  # it was ended in its second turn
            break
    assert caught.value.partial_answer == "a first idea"  # code is no answer


async def test_stream_yields_events_then_the_completion(rlm: MakeRLM) -> None:
    code = "print('first', flush=True)\nllm_query('wait')\nprint('second')\nFINAL('done')"
    said = asyncio.Event()

    async def reply(messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"] == "wait":
            await asyncio.wait_for(said.wait(), WAIT_S)
            return "ok"
        return f"```repl\n{code}\n```"

    seen: list[object] = []
    async for event in rlm(FunctionClient(reply)).stream("c", "q"):
        seen.append(event)
        if isinstance(event, BlockPrinted) and "first" in event.text:
            said.set()  # the block goes on only when its first line was seen here
    names = [type(event).__name__ for event in seen]
    assert names[:3] == ["RunStarted", "ReplReady", "IterationStarted"]
    assert names[-2:] == ["RunEnded", "Completion"]
    assert isinstance(seen[-1], Completion)
    assert seen[-1].response == "done"


async def test_stream_raises_the_error_at_its_end(rlm: MakeRLM) -> None:
    """The error of a run that is followed is raised at the end of its events."""
    events = rlm(ScriptedClient([ModelFailed("the provider is down")])).stream("c", "q")
    assert isinstance(await anext(events), RunStarted)
    with pytest.raises(ModelFailed, match="down"):
        [event async for event in events]


def test_requests_have_question_and_own_traceback_lines(rlm: MakeRLM) -> None:
    client = ScriptedClient(
        [
            "```repl\nprint(len(context))\n```",
            "```repl\ndef ratio(n):\n    return 100 / n  # of the model\nratio(0)\n```",
            "I think about it.",
            "FINAL(done)",
        ]
    )
    assert rlm(client).completion("abc", "How many letters are there?").response == "done"
    asked = [request.messages[-1] for request in client.requests]
    assert [message.role for message in asked] == ["user"] * 4
    assert all("How many letters are there?" in str(message.content) for message in asked)
    seen = str(asked[2].content)
    assert "ZeroDivisionError: division by zero" in seen
    assert "line 2, in ratio\n    return 100 / n  # of the model" in seen
    assert "sandbox_worker" not in seen


def test_offline_model_refuses_typed_answers() -> None:
    with pytest.raises(ConfigurationError, match="offline answers in text: leave out output_type"):
        RLM("offline").completion("a,b", "How many?", output_type=int)
