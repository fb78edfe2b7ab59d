"""A REPL that lives on from question to question."""

import asyncio
from typing import Any

import pytest

from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, ContextRefused, RunCancelled
from rlm_broker.events.event import BlockPrinted
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.waiting import WAIT_S


def block(code: str) -> str:
    return f"```repl\n{code}\n```"


def test_variables_persist_and_calls_add_contexts(open_sandbox: Sandbox) -> None:
    replies = [
        block("x = 40\nFINAL(context + '|' + context_0)"),
        block("FINAL(str(x + 2) + '|' + context + '|' + str(context_1))"),
        block("FINAL(str(len(history)) + '|' + history_1[1]['role'] + '|' + context_2)"),
    ]
    client = ScriptedClient(replies)
    with RLM(client, persistent=True, sandbox=open_sandbox) as rlm:
        assert rlm.completion("first", "1?").response == "first|first"
        assert rlm.completion({"a": [1]}, "2?").response == "42|first|{'a': [1]}"
        assert rlm.completion("third", "3?").response == "3|user|third"
    told = str(client.requests[2].messages[1].content)
    assert "`context_2` is a str with 5 characters" in told
    assert "Contexts: `context_0`, `context_1`, `context_2`. Earlier conversations: `history_0`, `history_1`." in told


def test_after_a_kill_all_contexts_and_histories_are_back(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(
        [block("FINAL(1)"), block("import os; os._exit(1)"), block("FINAL(context + context_1 + str(len(history_0)))")]
    )
    with RLM(client, persistent=True, sandbox=open_sandbox) as rlm:
        rlm.completion("a", "?")
        assert rlm.completion("b", "?").response == "ab3"


def test_queries_go_to_the_run_that_is_going_on(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        last = messages[-1]["content"]
        if "Question: " in last and "child" not in last:
            return block("FINAL(rlm_query('child of ' + str(len([n for n in globals() if n.startswith('history_')]))))")
        return f"FINAL({str(last).partition('child of ')[2][:1]})"

    with RLM(FunctionClient(reply), persistent=True, limits=Limits(max_depth=2), sandbox=open_sandbox) as rlm:
        first, second = rlm.completion("a", "1"), rlm.completion("b", "2")
    assert [first.response, second.response] == ["0", "1"]
    assert [len(first.child_traces), len(second.child_traces)] == [1, 1]


async def test_cancelled_run_leaves_the_variables_to_the_next(open_sandbox: Sandbox) -> None:
    client = ScriptedClient([block("x = 41; print('set')\nwhile True: pass"), block("FINAL(str(x + 1) + context)")])
    async with RLM(client, persistent=True, limits=Limits(interrupt_grace_s=WAIT_S), sandbox=open_sandbox) as rlm:
        run = rlm.start("a", "?")
        async for event in run.events():
            if isinstance(event, BlockPrinted):
                run.cancel()
        with pytest.raises(RunCancelled):
            await run
        assert (await rlm.acompletion("b", "?")).response == "42a"


async def test_two_questions_at_once_and_no_with_are_refused(open_sandbox: Sandbox) -> None:
    with pytest.raises(ConfigurationError, match="within `with"):
        await RLM(ScriptedClient([]), persistent=True, sandbox=open_sandbox).acompletion("a", "?")
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def reply(_messages: list[dict[str, Any]]) -> str:
        asked.set()
        await go_on.wait()
        return "FINAL(done)"

    async with RLM(FunctionClient(reply), persistent=True, sandbox=open_sandbox) as rlm:
        first = asyncio.create_task(rlm.acompletion("a", "?"))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        with pytest.raises(ConfigurationError, match="one question at a time"):
            await rlm.acompletion("b", "?")
        go_on.set()
        assert (await first).response == "done"
        assert (await rlm.acompletion("c", "?")).response == "done"


async def test_second_concurrent_run_is_refused(open_sandbox: Sandbox) -> None:
    async with RLM(ScriptedClient([block("FINAL(1)")]), persistent=True, sandbox=open_sandbox) as rlm:
        first, second = rlm.start("a" * 1_000_000, "?"), rlm.start("b", "?")
        with pytest.raises(ConfigurationError, match="one question at a time"):
            await second
        assert (await first).response == "1"


def test_offline_model_looks_at_the_context_of_its_run(open_sandbox: Sandbox) -> None:
    with RLM("offline", persistent=True, sandbox=open_sandbox) as rlm:
        first = rlm.completion("Nothing is here.", "When did the database crash?").response
        second = rlm.completion("The database crashed on Tuesday.", "When did the database crash?").response
    assert "NOT FOUND" in (first or "")
    assert "Tuesday" in (second or "")


def test_later_context_may_exceed_message_and_memory() -> None:
    client = ScriptedClient([block("FINAL(1)"), block("FINAL(len(context_1))")])
    limits = Limits(max_frame_bytes=1 << 16, memory_bytes=64 << 20)
    with RLM(client, persistent=True, limits=limits) as rlm:
        rlm.completion("x", "?")
        assert rlm.completion("x" * (100 << 20), "?").response == str(100 << 20)


def test_later_context_without_room_is_refused_with_its_limit() -> None:
    limits = Limits(later_context_bytes=1 << 16)
    with RLM(ScriptedClient([block("FINAL(1)")]), persistent=True, limits=limits) as rlm:
        rlm.completion("x" * (1 << 20), "?")
        with pytest.raises(ContextRefused, match="raise later_context_bytes = 65,536"):
            rlm.completion("x" * 80_000, "?")
