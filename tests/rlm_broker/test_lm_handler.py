"""A handler that answers the REPLs of a loop that is the user's own."""

import asyncio
import logging
from typing import Any

import pytest

from rlm_broker import (
    Budget,
    CallEnded,
    ConfigurationError,
    Event,
    FunctionClient,
    Limits,
    LMHandler,
    ModelFailed,
    RunStarted,
    Sandbox,
    SandboxFailed,
    ScriptedClient,
    ToolEnded,
    Usage,
)
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.sandbox.sandbox import place


def counted(reply: str = "yes", model: str = "m") -> FunctionClient:
    """A client whose calls use 3 tokens in and 2 out."""
    return FunctionClient(lambda _: LMReply(reply, Usage(1, 3, 2, 0.001)), model)


async def test_bare_repl_is_answered_by_a_handler() -> None:
    async with LMHandler(counted()) as handler, Sandbox() as sandbox:
        answers = handler.answers()
        async with sandbox.repl("text", answer=answers) as repl:
            block = await repl.aexecute("FINAL(llm_query('Is it?'))")
        assert block.final_answer == "yes"
        assert answers.usage.total_calls == 1
        assert answers.usage_by_depth == {1: Usage(1, 3, 2, 0.001)}
        assert handler.get_usage_summary().total_input_tokens == 3
        assert handler.usage_by_depth() == {1: Usage(1, 3, 2, 0.001)}


async def test_handler_on_another_loop_answers() -> None:
    with LMHandler(counted()) as handler:  # on the background loop
        async with Sandbox() as sandbox, sandbox.repl("text", answer=handler.answers()) as repl:
            assert (await repl.aexecute("FINAL(llm_query('Is it?'))")).final_answer == "yes"


async def test_repls_have_own_and_shared_budgets(open_sandbox: Sandbox) -> None:
    code = "FINAL([llm_query(str(number)) for number in range(3)])"
    async with LMHandler(counted()) as handler:
        shared = Budget(Limits(max_llm_calls=5))
        several = [handler.answers(Limits(max_llm_calls=2), budget=shared) for _ in range(3)]
        finals: list[Any] = []
        for answers in several:
            async with open_sandbox.repl("text", answer=answers) as repl:
                finals.append((await repl.aexecute(code)).final_answer)
        assert [each.usage.total_calls for each in several] == [2, 2, 1]
        assert "the limit max_llm_calls = 2 was reached" in finals[0]
        assert "the limit max_llm_calls = 5 was reached" in finals[2]
        assert (shared.usage.total_calls, shared.left()["max_llm_calls"]) == (5, 0)
        assert several[2].left()["max_llm_calls"] == 0


async def test_rlm_query_needs_the_means(open_sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        return "```repl\nFINAL(len(context))\n```" if request.is_loop else "as a completion"

    code = "FINAL(rlm_query('four'))"
    async with LMHandler(ScriptedClient(reply)) as handler:
        finals: list[str | None] = []
        for means, limits in ((None, None), (open_sandbox, Limits(max_depth=2))):
            answers = handler.answers(limits, sandbox=means)
            async with open_sandbox.repl("text", answer=answers) as repl:
                finals.append((await repl.aexecute(code)).final_answer)
        assert finals == ["as a completion", "4"]


async def test_tools_and_events_of_a_repl(open_sandbox: Sandbox) -> None:
    seen: list[Event] = []
    async with LMHandler(counted()) as handler:
        answers = handler.answers(tools={"double": lambda number: 2 * number, "PRICE": 3}, on_event=seen.append)
        async with open_sandbox.repl("text", answer=answers, tools=answers.tools, values=answers.values) as repl:
            block = await repl.aexecute("llm_query('x'); FINAL(double(PRICE))")
    assert block.final_answer == "6"
    assert [type(event) for event in seen if isinstance(event, CallEnded | ToolEnded)] == [CallEnded, ToolEnded]
    assert {event.tree for event in seen} == {answers.id}
    assert not any(isinstance(event, RunStarted) for event in seen)


async def test_depth_decides_which_model_answers(open_sandbox: Sandbox) -> None:
    root, sub = counted(model="root"), counted(model="sub")
    async with LMHandler(root, other_backend_client=sub) as handler:
        for depth in (1, 3):
            answers = handler.answers(depth=depth)
            async with open_sandbox.repl("text", answer=answers) as repl:
                await repl.aexecute("llm_query('x')")
            assert list(answers.usage.model_usage_summaries) == ["sub"]
            assert list(answers.usage_by_depth) == [depth]


async def test_bad_argument_of_answers_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"limits": 5}, "limits must be a Limits, not int"),
        ({"depth": 0}, "depth must be an integer of 1 or more"),
        ({"depth": True}, "not True"),
        ({"tools": 5}, "tools must be a dict"),
        ({"on_event": 3}, "on_event is a plain function"),
        ({"on_event": asyncio.sleep}, "on_event is a plain function"),
        ({"limits": Limits(run_timeout_s=1)}, "run_timeout_s has no effect on a loop of your own"),
        ({"limits": Limits(max_depth=3)}, "max_depth = 3 needs sandbox="),
    ]
    async with LMHandler(counted()) as handler:
        for given, why in cases:
            with pytest.raises(ConfigurationError, match=why):
                handler.answers(**given)
    with pytest.raises(SandboxFailed, match="the handler is not open: use it as"):
        LMHandler(counted()).answers()
    with pytest.raises(ConfigurationError, match="limits must be a Limits, not int"):
        Budget(5)  # type: ignore[arg-type]


async def test_failed_callback_is_logged_once(caplog: pytest.LogCaptureFixture, open_sandbox: Sandbox) -> None:
    def fails(_: Event) -> None:
        raise NameError("no such name")

    with caplog.at_level(logging.WARNING, "rlm_broker"):
        async with (
            LMHandler(counted()) as handler,
            open_sandbox.repl("text", answer=handler.answers(on_event=fails)) as repl,
        ):
            assert (await repl.aexecute("FINAL(llm_query('x'))")).final_answer == "yes"
    [logged] = caplog.messages
    assert logged.startswith("on_event raised; what else it raises is not logged\nTraceback")
    assert logged.endswith("NameError: no such name\n")


async def test_async_twins_of_the_handler() -> None:
    async with LMHandler(counted()) as handler:
        assert await handler.acompletion("x") == "yes"
        assert handler.host == "127.0.0.1"
    async with LMHandler(ScriptedClient([ModelFailed("down")])) as handler:
        with pytest.raises(ModelFailed, match="down"):
            await handler.acompletion("x")


async def test_stats_tell_calls_under_way() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def reply(_: object) -> str:
        asked.set()
        await go_on.wait()
        return "yes"

    async with (
        LMHandler(FunctionClient(reply, "slow")) as handler,
        place(Sandbox(), listener=handler.listener) as sandbox,
        sandbox.repl("text", answer=handler.answers()) as repl,
    ):
        block = asyncio.create_task(repl.aexecute("FINAL(llm_query('x'))"))
        await asked.wait()
        during = handler.stats()
        go_on.set()
        await block
        after = handler.stats()
    assert during.connections == 1
    assert [(each.model, each.calls, each.waiting) for each in during.clients] == [("slow", 1, 0)]
    assert [(each.calls, each.is_cooling) for each in after.clients] == [(0, False)]
    assert after.usage.total_calls == 1
