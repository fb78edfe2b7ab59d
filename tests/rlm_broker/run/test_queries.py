"""Answers to a REPL's queries: children with REPLs of their own, bounded, and ended with their parents."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.errors import LimitReached
from rlm_broker.events.event import Event, ReplReady, RunEnded, RunStarted, ToolEnded, ToolStarted
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.sandbox.sandbox import Sandbox, place
from sandbox_worker.wire.messages import Query, Slot
from tests.support.processes import living_below
from tests.support.waiting import LONGER_AND_LONGER, WAIT_S


def asked(messages: list[dict[str, Any]]) -> str:
    """The question of the run whose turn this is; a plain completion's whole prompt."""
    last = str(messages[-1]["content"])
    return last.rpartition("Question: ")[2].partition("\n")[0]


def answer(sandbox: Sandbox, reply: Any, question: str = "root", **limits: Any) -> str:
    """The answer of one run whose model is a function, a list of replies, or a client."""
    model = ScriptedClient(reply) if isinstance(reply, list) else reply
    return RLM(model, limits=Limits(**limits), sandbox=sandbox).completion("", question).response or ""


def test_children_run_concurrently_and_answer_in_order(open_sandbox: Sandbox) -> None:
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
        meet.wait(WAIT_S)  # the barrier opens only for two calls at a time
        with lock:
            running -= 1
        return f"FINAL(child {question})"

    response = answer(open_sandbox, reply, max_depth=2, max_concurrent_children=2)
    assert response == str([f"child {number}" for number in range(6)])
    assert most == 2


def test_prompt_too_large_is_refused_and_a_large_batch_is_answered(open_sandbox: Sandbox) -> None:
    """One prompt above the bound is an error that says what to do; a batch above it is asked in parts, and answered."""

    def reply(messages: list[dict[str, Any]]) -> str:
        if len(messages) > 1:
            return (
                "```repl\nrefused = llm_query('x' * (4 << 20))\n"
                "answers = llm_query_batched([f'{n} ' + 'x' * 1_000_000 for n in range(6)])\n"
                "FINAL(refused + str(answers))\n```"
            )
        return str(messages[0]["content"]).partition(" ")[0]

    response = answer(open_sandbox, reply)
    assert re.match(
        r"Error: the query is too large: 4,194,\d{3} bytes, 4,194,304 at most; pass a large text as", response
    )
    assert response.endswith("rlm_query(task, context=part)" + str(list("012345")))


def test_grandchildren_count_against_the_trees_number(open_sandbox: Sandbox) -> None:
    """Each of two children asks for two more; four may run in all, so of the grandchildren two are refused."""

    def reply(messages: list[dict[str, Any]]) -> str:
        match asked(messages):
            case "root":
                return "```repl\nFINAL('|'.join(rlm_query_batched(['child 1', 'child 2'])))\n```"
            case "child 1" | "child 2":
                return "```repl\nFINAL('|'.join(rlm_query_batched(['leaf 1', 'leaf 2'])))\n```"
        return "FINAL(fine)"

    slots = answer(open_sandbox, reply, max_depth=3, max_children_total=4, max_concurrent_children=2).split("|")
    assert sorted(slots) == ["Error: max_children_total exceeded"] * 2 + ["fine"] * 2


def test_answer_of_a_call_and_of_a_child_is_cut(open_sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        if request.depth == 0:
            return "```repl\nFINAL(rlm_query('child') + '|' + llm_query('much'))\n```"
        return f"FINAL({'x' * 50})" if request.is_loop else "y" * 500

    response = answer(open_sandbox, ScriptedClient(reply), max_depth=2, max_result_chars=10)
    assert response == f"{'x' * 10}\n... [40 characters cut]|{'y' * 10}\n... [490 characters cut]"


def test_looping_child_is_ended_with_its_partial_answer(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        match asked(messages):
            case "root":
                return "```repl\nFINAL('|'.join(rlm_query_batched(['loops', 'answers'])))\n```"
            case "loops":
                return "a first idea\n```repl\nimport time; time.sleep(1000)\n```"
        return "FINAL(fine)"

    for timeout_s in LONGER_AND_LONGER:
        response = answer(open_sandbox, reply, max_depth=2, child_timeout_s=timeout_s)
        loops, _, answers = response.rpartition("|")
        if answers == "fine":
            break
    assert loops.startswith(f"Error: child timeout after {timeout_s}.")
    assert "a first idea" in loops
    assert answers == "fine"


def test_ended_parent_ends_children_and_their_processes() -> None:
    child_loops = threading.Event()

    def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nrlm_query('child')\n```"
        child_loops.set()
        return "```repl\nimport time; time.sleep(1000)\n```"

    for timeout_s in LONGER_AND_LONGER:
        limits = Limits(max_depth=2, run_timeout_s=timeout_s)
        with Sandbox(limits, warm=0) as sandbox, RLM(FunctionClient(reply), limits=limits, sandbox=sandbox) as rlm:
            idle = {process.pid for process in living_below()}
            with pytest.raises(LimitReached, match="run_timeout_s"):
                rlm.completion("", "root")
            assert {process.pid for process in living_below()} == idle
        if child_loops.is_set():
            break
    assert child_loops.is_set()


def test_run_names_tell_their_place_in_the_tree(open_sandbox: Sandbox) -> None:
    events: list[Event] = []

    def reply(messages: list[dict[str, Any]]) -> str:
        question = asked(messages)
        if question in ("root", "middle"):
            below = "middle" if question == "root" else "leaf"
            return f"```repl\nFINAL(rlm_query('{below}'))\n```"
        return "FINAL(done)"

    rlm = RLM(FunctionClient(reply), limits=Limits(max_depth=3), on_event=events.append, sandbox=open_sandbox)
    assert rlm.completion("", "root").response == "done"
    started = [(event.run, event.depth) for event in events if isinstance(event, RunStarted)]
    assert started == [("1", 0), ("1.1", 1), ("1.1.1", 2)]
    assert [event.run for event in events if isinstance(event, ReplReady)] == ["1", "1.1", "1.1.1"]
    assert [event.run for event in events if isinstance(event, RunEnded)] == ["1.1.1", "1.1", "1"]


async def test_cancelled_run_cancels_its_childs_model_call() -> None:
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


def test_surplus_children_of_a_batch_each_say_why(open_sandbox: Sandbox) -> None:
    replies = ["```repl\nFINAL(str(rlm_query_batched(['a', 'b', 'c'])))\n```", "FINAL(fine)", "FINAL(fine)"]
    response = answer(open_sandbox, replies, max_depth=2, max_children_per_batch=2)
    assert response == "['fine', 'fine', 'Error: max_children_per_batch exceeded: 3 > 2']"


def test_runs_nest_four_deep_with_one_place(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        level = int(asked(messages))
        if level == 4:
            return "leaf"
        return f"```repl\nFINAL('+'.join(rlm_query_batched(['{level + 1}', '{level + 1}'], samples=True)))\n```"

    limits = Limits(max_depth=4, max_concurrent_children=1)
    done = RLM(reply, limits=limits, sandbox=open_sandbox).completion("", "0")
    assert (done.response or "").count("leaf") == 16
    assert {depth: usage.total_calls for depth, usage in done.usage_by_depth.items()} == {0: 1, 1: 2, 2: 4, 3: 8, 4: 16}


def test_code_can_ask_for_its_remaining_budget(open_sandbox: Sandbox) -> None:
    replies = ["```repl\nllm_query('x')\nimport json\nFINAL(json.dumps(budget()))\n```", "y"]
    left = json.loads(answer(open_sandbox, replies, max_llm_calls=10, max_tokens=1000, run_timeout_s=100))
    assert left["max_llm_calls"] == 8
    assert 0 < left["max_tokens"] < 1000
    assert left["max_children_total"] == 100
    assert left["max_budget_usd"] is None
    assert 0 < left["run_timeout_s"] <= 100
    assert (left["max_iterations"], left["max_blocks"]) == (29, 149)


def test_child_time_is_bounded_by_its_parents(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        if asked(messages) == "root":
            return "```repl\nFINAL(rlm_query('child'))\n```"
        return "```repl\nFINAL(str(budget()['run_timeout_s'] <= 50))\n```"

    assert answer(open_sandbox, reply, max_depth=2, run_timeout_s=50, child_timeout_s=500) == "True"


def test_errors_in_a_row_end_a_run(open_sandbox: Sandbox) -> None:
    replies = ["```repl\n1 / 0\n```", "```repl\nprint(1)\n```", *["an idea\n```repl\n1 / 0\n```"] * 5]
    with pytest.raises(LimitReached, match="max_consecutive_errors = 2 was reached, 2 used") as reached:
        answer(open_sandbox, replies, max_consecutive_errors=2)
    assert "an idea" in (reached.value.partial_answer or "")


def test_blocks_above_their_number_are_not_run(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(
        ["```repl\nprint(1)\n```\n```repl\nprint(2)\n```\n```repl\nprint(3)\n```", "FINAL(as far as I got)"]
    )
    done = RLM(client, limits=Limits(max_blocks=2), sandbox=open_sandbox).completion("", "?")
    assert done.response == "as far as I got"
    assert [len(turn.blocks) for turn in done.trajectory] == [2]
    told = str(client.requests[1].messages[-1].content)
    assert "Not run: block 3. As many blocks were run as this run may have." in told
    assert "There are no turns left" in told


def test_a_turn_that_takes_too_long_ends_the_run(open_sandbox: Sandbox) -> None:
    with pytest.raises(LimitReached, match="iteration_timeout_s"):
        answer(
            open_sandbox, ["```repl\nimport time; time.sleep(1000)\n```"], iteration_timeout_s=0.5, block_timeout_s=30
        )


def test_tokens_and_budget_end_a_run(open_sandbox: Sandbox) -> None:
    def replies(_request: object) -> str:
        return "an idea of seven words or so\n```repl\nprint(1)\n```"

    with pytest.raises(LimitReached) as reached:
        answer(open_sandbox, ScriptedClient(replies), max_tokens=2000)
    assert reached.value.limit == "max_tokens"
    assert "an idea" in (reached.value.partial_answer or "")
    with pytest.raises(LimitReached) as reached:
        answer(open_sandbox, ScriptedClient(replies, cost_per_call=0.3), max_budget_usd=1.0)
    assert reached.value.limit == "max_budget_usd"
    assert 1.0 <= reached.value.spent < 1.3


def test_run_without_repl_is_a_plain_completion(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["first", "second"])
    rlm = RLM(client, limits=Limits(max_depth=0), sandbox=open_sandbox)
    assert rlm.completion("the text", "the question").response == "first"
    assert (
        rlm.completion([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]).response
        == "second"
    )
    first, second = client.requests
    assert [(message.role, message.content) for message in first.messages] == [("user", "the text\n\nthe question")]
    assert [message.role for message in second.messages] == ["system", "user"]


def test_child_may_have_its_own_model_by_policy(open_sandbox: Sandbox) -> None:
    asks = ("rlm_query('a', model='small')", "rlm_query('b', model='root')", "rlm_query('c')")
    root = ScriptedClient([f"```repl\nFINAL('|'.join([{', '.join(asks)}]))\n```"], "root")
    small, sub = (ScriptedClient([f"FINAL({name} speaks)"], name) for name in ("small", "sub"))
    events: list[Event] = []
    rlm = RLM(
        root, sub, models={"small": small}, limits=Limits(max_depth=2), on_event=events.append, sandbox=open_sandbox
    )
    response = rlm.completion("", "?").response
    assert response == "small speaks|Error: code may not call model 'root'; allowed: sub, small|sub speaks"
    assert [event.model for event in events if isinstance(event, RunStarted)] == ["root", "small", "sub"]


def test_the_recursion_can_be_replaced(open_sandbox: Sandbox) -> None:
    def factory(run: str, depth: int, ours: QueryHandler) -> QueryHandler:
        async def answer(query: Query) -> list[Slot]:
            if query.want == "rlm":
                return [Slot(text=f"{run} at {depth}: {prompt}") for prompt in query.prompts]
            return await ours(query)

        return answer

    replies = ["```repl\nFINAL(rlm_query('a') + ', ' + llm_query('b'))\n```", "plain"]
    response = RLM(ScriptedClient(replies), recursion=factory, sandbox=open_sandbox).completion("", "?").response
    assert response == "1 at 0: a, plain"


def test_system_prompts_may_differ_by_depth(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["```repl\nFINAL(rlm_query('child'))\n```", "FINAL(done)"])
    prompt = "You are at {depth} %s "
    RLM(
        client, limits=Limits(max_depth=2), instructions=lambda depth: f"{prompt}{depth}", sandbox=open_sandbox
    ).completion("", "?")
    assert [request.messages[0].content for request in client.requests] == [f"{prompt}0", f"{prompt}1"]


def test_twenty_concurrent_runs_keep_contexts_apart() -> None:
    code = "```repl\nFINAL(context[6:] if context.startswith('child ') else rlm_query('child ' + context))\n```"

    async def all_of_them() -> list[str | None]:
        handler = LMHandler(FunctionClient(lambda _: code))
        async with handler, place(Sandbox(), listener=handler.listener) as sandbox:
            rlms = [RLM(handler=handler, sandbox=sandbox, limits=Limits(max_depth=2)) for _ in range(5)]
            runs = [rlms[number % 5].acompletion(f"the secret of {number}", "q") for number in range(20)]
            return [done.response for done in await asyncio.gather(*runs)]

    assert asyncio.run(all_of_them()) == [f"the secret of {number}" for number in range(20)]


def test_profile_and_prologue_reach_the_model(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(["FINAL(done)"])
    instructions = Instructions(profile="answer", prologue="Be {brief}.")
    RLM(client, instructions=instructions, sandbox=open_sandbox).completion("", "?")
    system, opening = (str(message.content) for message in client.requests[0].messages)
    assert "answer['ready']" in system
    assert "`FINAL" not in system
    assert opening.startswith("Be {brief}.\n\n")


async def test_calls_of_tools_are_numbered_events() -> None:
    events, hangs = list[Event](), asyncio.Event()

    async def half(number: int) -> float:
        if not number:
            hangs.set()
            await asyncio.Event().wait()
        return number / 2

    def call(number: int) -> Query:
        return Query(f"1:{number}", "tool", [f'{{"args":[{number}],"kwargs":{{}}}}'], tool="half")

    async with LMHandler(FunctionClient(lambda _: "fine")) as handler:
        answers = handler.answers(tools={"half": half}, on_event=events.append)
        assert await answers(call(3)) == [Slot("1.5")]
        cancelled = asyncio.create_task(answers(call(0)))
        await asyncio.wait_for(hangs.wait(), WAIT_S)
        cancelled.cancel()
        await asyncio.wait({cancelled})
    told = [(e.run, e.depth, e.call, e.tool) for e in events if isinstance(e, ToolStarted | ToolEnded)]
    assert told == [("1", 0, 1, "half")] * 2 + [("1", 0, 2, "half")] * 2
    ends = [(event.result, event.error) for event in events if isinstance(event, ToolEnded)]
    assert ends == [("1.5", None), ("", "cancelled")]
    assert all(0 <= event.duration_s < WAIT_S for event in events if isinstance(event, ToolEnded))


async def test_query_of_hostile_code_is_refused_in_each_slot() -> None:
    """The REPL's own code sends one call of a tool in a query, and no more prompts than a query may have."""
    called: list[int] = []

    def note(number: int) -> None:
        called.append(number)

    async with LMHandler(FunctionClient(lambda _: "fine")) as handler:
        answers = handler.answers(Limits(max_batch_prompts=2), tools={"f": note})
        two_calls = await answers(Query("1:1", "tool", ['{"args":[1],"kwargs":{}}'] * 2, tool="f"))
        three = await answers(Query("1:2", "llm", ["a", "b", "c"]))
        assert await answers(Query("1:3", "llm", ["a", "b"])) == [Slot("fine")] * 2
    assert two_calls == [Slot(error="tool takes one prompt, the arguments of one call")] * 2
    assert three == [Slot(error="batch too large: 3 > 2; ask in smaller batches")] * 3
    assert called == []
