"""Branches of a run after a turn, and the best of several runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import (
    RLM,
    BestOf,
    Completion,
    ConfigurationError,
    LimitReached,
    Limits,
    LMReply,
    LMRequest,
    ModelFailed,
    Models,
    RunStarted,
    Sandbox,
    ScriptedClient,
    Trace,
    TraceWriter,
)
from rlm_broker.broker.clients.base import SAMPLE_STEP, BaseClient
from rlm_broker.run.branches import majority
from rlm_broker.usage import Usage, UsageSummary


def turn_of(request: LMRequest) -> int:
    return sum(message.role == "assistant" for message in request.messages) + 1


def sample_of(request: LMRequest) -> int:
    return request.sample // SAMPLE_STEP


def count(request: LMRequest) -> str:
    """Count up a variable in two turns, then answer with it and with the number of the branch."""
    turn = turn_of(request)
    if turn < 3:
        return f"Turn {turn}.\n```repl\nn = {'n + 1' if turn > 1 else '40'}\nprint(n)\n```"
    return f"```repl\nFINAL(f'{{n}} in {sample_of(request)}')\n```"


def rlm_of(client: BaseClient, sandbox: Sandbox, **given: Any) -> RLM:
    return RLM(client, sandbox=sandbox, **given)


async def test_branches_have_the_conversation_and_the_variables_of_the_first_turns(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(count)
    run = rlm_of(client, open_sandbox).start("text", "How many?")
    whole = await run
    assert (whole.response, run.turns) == ("41 in 0", 2)
    branches = run.branch(2)
    ended = [await branch for branch in branches]
    assert [each.response for each in ended] == ["41 in 1", "41 in 2"]
    for each in ended:
        assert each.messages[:-1] == whole.messages[:-1]
        assert (each.iterations, each.earlier_turns, each.usage_summary.total.total_calls) == (3, 2, 1)
    assert len({run.id, *(branch.id for branch in branches)}) == 3
    (earlier,) = run.branch(1, after_turn=1)
    assert (await earlier).response == "41 in 3"
    (anew,) = earlier.branch(1, after_turn=0)
    assert ((await anew).response, (await anew).earlier_turns) == ("41 in 4", 0)


class Held(ScriptedClient):
    """Holds back the third turn of the run that is no branch."""

    def __init__(self) -> None:
        super().__init__(count)
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def complete(self, request: LMRequest) -> LMReply:
        if turn_of(request) == 3 and not request.sample:
            self.asked.set()
            await self.let_go.wait()
        return await super().complete(request)


async def test_run_in_progress_has_branches_that_end_before_it(open_sandbox: Sandbox) -> None:
    client = Held()
    async with rlm_of(client, open_sandbox) as rlm:
        run = rlm.start("text", "How many?")
        await client.asked.wait()
        assert [(await branch).response for branch in run.branch(2)] == ["41 in 1", "41 in 2"]
        assert not run.is_done
        client.let_go.set()
        completion = await run
    assert (completion.response, completion.usage_summary.total.total_calls) == ("41 in 0", 3)


async def test_branches_share_what_the_run_has_left(open_sandbox: Sandbox) -> None:
    def never(request: LMRequest) -> str:
        return "```repl\nprint(1)\n```" if request.sample or turn_of(request) < 3 else "FINAL(1)"

    client = ScriptedClient(never, cost_per_call=1)
    run = rlm_of(client, open_sandbox, limits=Limits(max_llm_calls=11, max_budget_usd=100)).start("text", "?")
    await run
    branches = run.branch(2)
    for branch in branches:
        with pytest.raises(LimitReached, match="max_llm_calls = 4 was reached"):
            await branch
    assert len(client.requests) == 11
    with pytest.raises(ConfigurationError, match="max_llm_calls has 0 left, too little for 3 branches"):
        run.branch(3)


async def test_branch_cannot_use_what_the_run_itself_has_used_meanwhile(open_sandbox: Sandbox) -> None:
    held = Held()
    async with rlm_of(held, open_sandbox, limits=Limits(max_llm_calls=3)) as rlm:
        run = rlm.start("text", "How many?")
        await held.asked.wait()  # its third call is under way
        with pytest.raises(ConfigurationError, match="max_llm_calls has 0 left"):
            run.branch(1)
        held.let_go.set()
        await run


async def test_cache_answers_each_branch_anew(open_sandbox: Sandbox, tmp_path: Path) -> None:
    client = ScriptedClient(count)
    client.fingerprint = "counts"
    rlm = rlm_of(client, open_sandbox, models=Models(cache=tmp_path / "cache.db"))
    run = rlm.start("text", "How many?")
    await run
    for branch in run.branch(2):
        await branch
    assert sorted(map(sample_of, client.requests)) == [0, 0, 0, 1, 2]
    again = rlm.start("text", "How many?")
    await again
    await again.branch(1)[0]
    assert len(client.requests) == 5


def test_branch_that_cannot_be_is_refused_in_one_sentence(open_sandbox: Sandbox, tmp_path: Path) -> None:
    run = rlm_of(ScriptedClient(count), open_sandbox).start("text", "How many?")
    run.result()
    plain = rlm_of(ScriptedClient(["yes"]), open_sandbox, limits=Limits(max_depth=0)).start("text", "?")
    recorded = rlm_of(ScriptedClient(["FINAL(1)"]), open_sandbox, models=Models(record=tmp_path / "calls.jsonl")).start(
        "text", "?"
    )
    with rlm_of(ScriptedClient(["FINAL(1)"]), open_sandbox, persistent=True) as persistent:
        kept = persistent.start("text", "?")
        kept.result()
    cases: dict[str, tuple[Callable[[], object], str]] = {
        "none": (lambda: run.branch(0), "n must be an integer of 1 to 256, not 0"),
        "text": (lambda: run.branch("2"), "n must be an integer"),  # type: ignore[arg-type]
        "too late": (lambda: run.branch(1, 3), "after_turn must be 0 to 2, a turn after which the run went on, not 3"),
        "before": (lambda: run.branch(1, -1), "after_turn must be 0 to 2"),
        "no REPL": (lambda: plain.branch(1), "a run without a REPL"),
        "recorded": (lambda: recorded.branch(1), "a run that is recorded or replayed cannot have branches"),
        "persistent": (lambda: kept.branch(1), "a run in a persistent REPL has no branches"),
    }
    for call, sentence in cases.values():
        with pytest.raises(ConfigurationError, match=sentence):
            call()
    plain.result()
    recorded.result()


async def test_branch_is_told_of_blocks_that_a_later_kill_or_another_outcome_has_cost(open_sandbox: Sandbox) -> None:
    codes = ["import os; n = os.urandom(8).hex()\nprint(n)", "m = 1", "print('n' in dir(), 'm' in dir())", "FINAL(1)"]

    def reply(request: LMRequest) -> str:
        return f"```repl\n{codes[turn_of(request) - 1]}\n```"

    run = rlm_of(ScriptedClient(reply), open_sandbox).start("text", "?")
    await run
    (branch,) = run.branch(1, after_turn=2)
    completion = await branch
    assert "None of its blocks was run again: block 1 printed or raised something else" in str(completion.messages[5])
    assert completion.trajectory[2].blocks[0].stdout == "True False\n"

    codes[:] = ["n = 1", "m = 1", "import os; os._exit(3)", "print('n' in dir(), 'm' in dir())", "FINAL(1)"]
    killed = rlm_of(ScriptedClient(reply), open_sandbox, limits=Limits(max_replay_s=0)).start("text", "?")
    await killed
    (branch,) = killed.branch(1, after_turn=2)
    assert "None of its blocks was run again" in str((await branch).messages[5])


async def test_another_context_ends_a_branch(open_sandbox: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("text")
    run = rlm_of(ScriptedClient(count), open_sandbox).start(file, "How many?")
    await run
    file.write_text("longer text")
    with pytest.raises(ConfigurationError, match=r"the context is a str of 11 characters, and the run .* of 4 char"):
        await run.branch(1)[0]


# -- the best of several -----------------------------------------------------------------------------------------------


def answers(*said: str) -> Callable[[LMRequest], str]:
    """One turn, then the answer of the run's number."""

    def reply(request: LMRequest) -> str:
        if turn_of(request) == 1:
            return "```repl\nprint(1)\n```"
        answer = said[sample_of(request)]
        if answer == "fails":
            raise ModelFailed("the model is gone")
        return f"FINAL({answer})"

    return reply


async def best(sandbox: Sandbox, *said: str, **given: Any) -> BestOf[Any]:
    return await rlm_of(ScriptedClient(answers(*said)), sandbox).abest_of(len(said), "text", "?", **given)


async def test_most_frequent_answer_is_chosen(open_sandbox: Sandbox) -> None:
    found = await best(open_sandbox, "a", "The  Answer.", "fails", "the answer")
    assert (found.chosen.response, found.votes) == ("The  Answer.", 2)
    assert [getattr(each, "response", None) for each in found.runs] == ["a", "The  Answer.", None, "the answer"]
    assert isinstance(found.runs[2], ModelFailed)
    assert found.usage.total_calls == 7
    tied = await best(open_sandbox, "b", "a", "a", "b")
    assert (tied.chosen.response, tied.votes) == ("b", 2)
    typed = await best(open_sandbox, '{"a": 1, "b": 2}', '{"b": 2, "a": 1.0}', '{"a": 2}', output_type=dict[str, float])
    assert (typed.chosen.parsed, typed.votes) == ({"a": 1, "b": 2}, 2)


async def test_scorer_chooses_in_place_of_the_majority(open_sandbox: Sandbox) -> None:
    async def later(completion: Completion[Any]) -> float:
        return len(completion.answer)

    for scorer in (lambda completion: len(completion.answer), later):
        found = await best(open_sandbox, "a", "a", "abc", scorer=scorer)
        assert (found.chosen.response, found.votes) == ("abc", 1)


async def test_shared_turns_are_paid_once(open_sandbox: Sandbox) -> None:
    found = await best(open_sandbox, "a", "b", "b", after_turn=1)
    assert (found.chosen.response, found.usage.total_calls) == ("b", 4)
    assert [getattr(each, "earlier_turns", None) for each in found.runs] == [0, 1, 1]


async def test_all_runs_stay_within_the_limits_together(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(answers(*"aaaa"))
    found = await rlm_of(client, open_sandbox).abest_of(4, "text", "?", limits=Limits(max_llm_calls=6))
    assert len(client.requests) == 5
    assert [isinstance(each, LimitReached) for each in found.runs] == [False, True, True, True]


async def test_limits_too_low_for_all_runs_are_refused_before_a_call(open_sandbox: Sandbox) -> None:
    client = ScriptedClient(answers(*"aaa"))
    with pytest.raises(ConfigurationError, match="max_llm_calls has 2 left, too little for 3 branches"):
        await rlm_of(client, open_sandbox).abest_of(3, "text", "?", limits=Limits(max_llm_calls=2))
    assert not client.requests


async def test_failure_of_all_is_the_first_one_and_bad_input_one_sentence(open_sandbox: Sandbox) -> None:
    with pytest.raises(ModelFailed, match="the model is gone"):
        await best(open_sandbox, "fails", "fails")
    for given, sentence in (
        ({"scorer": 3}, "scorer must be a function, not int"),
        ({"after_turn": -1}, "after_turn must be 0 or more, not -1"),
        ({"limits": Limits(max_depth=0)}, "a run without a REPL"),
        ({"scorer": lambda _: None}, "the scorer has returned a NoneType: return a number"),
        ({"scorer": lambda _: "best"}, "the scorer has returned a str: return a number"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            await best(open_sandbox, "a", **given)
    with pytest.raises(ConfigurationError, match="n must be an integer of 1 to 256, not 0"):
        await best(open_sandbox)


async def test_cancelled_choice_ends_all_runs(open_sandbox: Sandbox) -> None:
    held = Held()
    async with rlm_of(held, open_sandbox) as rlm:
        choosing = asyncio.create_task(rlm.abest_of(2, "text", "?"))
        await held.asked.wait()
        choosing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await choosing
    assert not open_sandbox.stats().workers


def test_trace_has_all_runs_and_says_where_they_branch(open_sandbox: Sandbox, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        rlm_of(ScriptedClient(answers(*"aab")), open_sandbox, on_event=writer).best_of(3, "text", "?", after_turn=1)
    trace = Trace(tmp_path / "trace.jsonl")
    first, *others = [event for event in trace if isinstance(event, RunStarted)]
    assert (first.branch_of, first.after_turn) == ("", 0)
    assert [(each.branch_of, each.after_turn, each.is_resumed) for each in others] == [(first.tree, 1, False)] * 2
    assert [line for line in trace.tree() if line.startswith("1 ")] == [
        "1 [scripted] ?",
        "1 [scripted] (tree 2, after turn 1 of tree 1) ?",
        "1 [scripted] (tree 3, after turn 1 of tree 1) ?",
    ]


def test_majority_counts_values_and_texts() -> None:
    def answered(response: str, parsed: Any = None) -> Completion[Any]:
        return Completion(response, "m", 0, 1, 0.0, UsageSummary({"m": Usage()}), parsed=parsed)

    texts = [answered(each) for each in ("Rome", "Paris.", "paris", "Rome?", " PARIS ")]
    assert majority(texts) is texts[1]
    values = [answered(*each) for each in (("[2]", [2]), ("[1, 2]", [1, 2]), ("[1,2]", [1, 2]))]
    assert majority(values) is values[1]
