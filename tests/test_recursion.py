"""What a REPL's queries become: children with REPLs of their own, bounded, and ended with their parents."""

import asyncio
import threading
from typing import Any

import pytest

from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import LimitReached
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.trace.events import Event, ReplReady, RunEnded, RunStarted
from tests.processes import living_below

WAIT_S = 60


def asked(messages: list[dict[str, Any]]) -> str:
    """The question of the run whose turn this is; a plain completion's whole prompt."""
    last = str(messages[-1]["content"])
    return last.rpartition("Question: ")[2].partition("\n")[0]


def test_children_run_at_the_same_time_but_only_so_many_and_answer_in_order() -> None:
    running = most = 0
    lock = threading.Lock()
    meet = threading.Barrier(2)

    def reply(messages: list[dict[str, Any]]) -> str:
        nonlocal running, most
        question = asked(messages)
        if question == "root":
            return "```repl\nFINAL(str(rlm_query_batched(['0', '1', '2', '3', '4', '5'])))\n```"
        with lock:
            running += 1
            most = max(most, running)
        meet.wait(WAIT_S)  # two at a time, or nobody goes on
        with lock:
            running -= 1
        return f"FINAL(child {question})"

    limits = Limits(max_depth=2, max_concurrent_children=2)
    response = RLM(FunctionClient(reply), limits=limits).completion("", "root").response
    assert response == str([f"child {number}" for number in range(6)])
    assert most == 2


def test_past_their_number_children_are_an_error_in_their_slot() -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nFINAL(str(rlm_query_batched(['a', 'b', 'c'])))\n```"
        return "FINAL(fine)"

    limits = Limits(max_depth=2, max_children_total=2, max_concurrent_children=1)
    response = RLM(FunctionClient(reply), limits=limits).completion("", "root").response
    assert response == "['fine', 'fine', 'Error: max_children_total exceeded']"


def test_a_batch_over_its_cap_is_refused_slot_by_slot() -> None:
    code = "```repl\nFINAL(str(llm_query_batched(['a'] * 3)))\n```"
    response = RLM(FunctionClient(lambda _: code), limits=Limits(max_batch_prompts=2)).completion("", "?").response
    assert response == str(["Error: batch too large: 3 > 2"] * 3)


def test_a_child_that_loops_is_ended_on_time_with_what_it_said_and_its_siblings_are_unharmed() -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        match asked(messages):
            case "root":
                return "```repl\nFINAL('|'.join(rlm_query_batched(['loops', 'answers'])))\n```"
            case "loops":
                return "a first idea\n```repl\nwhile True: pass\n```"
        return "FINAL(fine)"

    limits = Limits(max_depth=2, child_timeout_s=1.0)
    response = RLM(FunctionClient(reply), limits=limits).completion("", "root").response or ""
    loops, _, answers = response.rpartition("|")
    assert loops.startswith("Error: child timeout after 1.")
    assert "a first idea" in loops
    assert answers == "fine"


def test_a_child_that_fails_fills_its_slot_with_the_reason() -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nFINAL(rlm_query('child'))\n```"
        raise RuntimeError("the provider is down")

    limits = Limits(max_depth=2)
    response = RLM(FunctionClient(reply), limits=limits).completion("", "root").response
    assert response == "Error: function: RuntimeError: the provider is down"


def test_a_parent_that_is_ended_takes_its_children_and_their_processes_with_it() -> None:
    child_loops = threading.Event()

    def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nrlm_query('child')\n```"
        child_loops.set()
        return "```repl\nwhile True: pass\n```"

    with RLM(FunctionClient(reply), limits=Limits(max_depth=2, run_timeout_s=2.0)) as rlm:
        idle = {process.pid for process in living_below()}
        with pytest.raises(LimitReached, match="run_timeout_s"):
            rlm.completion("", "root")
        assert child_loops.is_set()
        assert {process.pid for process in living_below()} == idle


def test_runs_are_named_by_their_place_in_the_tree_and_each_has_an_end() -> None:
    events: list[Event] = []

    def reply(messages: list[dict[str, Any]]) -> str:
        question = asked(messages)
        if question in ("root", "middle"):
            below = "middle" if question == "root" else "leaf"
            return f"```repl\nFINAL(rlm_query('{below}'))\n```"
        return "FINAL(done)"

    rlm = RLM(FunctionClient(reply), limits=Limits(max_depth=3), on_event=events.append)
    assert rlm.completion("", "root").response == "done"
    started = [(event.run, event.depth) for event in events if isinstance(event, RunStarted)]
    assert started == [("1", 0), ("1.1", 1), ("1.1.1", 2)]
    assert [event.run for event in events if isinstance(event, ReplReady)] == ["1", "1.1", "1.1.1"]
    assert [event.run for event in events if isinstance(event, RunEnded)] == ["1.1.1", "1.1", "1"]


async def test_cancelling_a_run_ends_its_child_down_to_the_model_call() -> None:
    asked_child, cancelled = asyncio.Event(), asyncio.Event()

    async def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nrlm_query('child')\n```"
        asked_child.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    before = living_below()
    run = asyncio.create_task(RLM(FunctionClient(reply), limits=Limits(max_depth=2)).acompletion("", "root"))
    await asyncio.wait_for(asked_child.wait(), WAIT_S)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert cancelled.is_set()
    assert not living_below() - before
