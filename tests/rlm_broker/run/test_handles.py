"""Children as handles in a run: they live from block to block, and end with the REPL, with the run, or when told to."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.models.models import Models
from rlm_broker.events.event import Event, IterationStarted, RunEnded, RunStarted
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.prompts import LONG_TASK_CHARS
from tests.support.nodes import LocalNodes
from tests.support.processes import living_below
from tests.support.waiting import WAIT_S, for_ever, within_longer


def fenced(code: str) -> str:
    return f"```repl\n{code}\n```"


class Model(ScriptedClient):
    """A root that runs these blocks, one in each turn, and children that do what their task says.

    The task of a child is code; the call of one that begins with "slow" never ends. Code waits for such a call by the
    tool `until_asked`.
    """

    def __init__(self, *blocks: str) -> None:
        super().__init__(self._reply)
        self._blocks = blocks
        self.asked = threading.Semaphore(0)
        self.cancelled = Counter[str]()

    async def complete(self, request: LMRequest) -> LMReply:
        task = self._task(request)
        if request.depth and task.startswith("slow"):
            self.asked.release()
            try:
                await for_ever()
            finally:
                self.cancelled[task] += 1
        return await super().complete(request)

    def until_asked(self) -> None:
        assert self.asked.acquire(timeout=WAIT_S)

    def _reply(self, request: LMRequest) -> str:
        if not request.is_loop:
            return f"completion of {request.messages[-1].content}"
        if request.depth:
            return fenced(self._task(request))
        return fenced(self._blocks[sum(message.role == "assistant" for message in request.messages)])

    @staticmethod
    def _task(request: LMRequest) -> str:
        last = str(request.messages[-1].content)
        return last.rpartition("Question: ")[2].partition("\n\nGo on")[0]


def ran(model: Model, sandbox: Sandbox | LocalNodes, limits: Limits | None = None, **more: Any) -> Completion:
    limits = limits or Limits(max_depth=2)
    with RLM(model, limits=limits, sandbox=sandbox, tools={"until_asked": model.until_asked}, **more) as rlm:
        return rlm.completion("the context", "?")


def printed(done: Completion) -> Sequence[str]:
    return [turn.blocks[0].stdout for turn in done.trajectory]


WHOLE = (
    "total = rlm_start('FINAL(sum(context))', context=[1, 2, 3])\n"
    "counter = rlm_start('words = context.split(); FINAL(len(words))', context='a b c', keep=True)\n"
    "stuck = [rlm_start(f'slow {n}') for n in range(2)]\n"
    "until_asked(); until_asked()\n"
    "print([child.done for child in stuck])",
    "print(len(first(2, [total, counter, *stuck])), total.result(), counter.result(timeout_s=60))\n"
    "longest = counter.ask('FINAL(words[-1] + context_1)', context='!')\n"
    "stuck[0].cancel(); print(stuck[0].result())",
    "print(longest.result(), stuck[1].done)\n"
    "first(1, [longest, *stuck[1:]], cancel_rest=True)\n"
    "FINAL(stuck[1].result())",
)
PRINTED = ["[False, False]\n", "2 6 3\nError: cancelled\n", "c! False\n"]


def test_children_live_from_block_to_block_until_they_are_told_to_end(open_sandbox: Sandbox) -> None:
    events: list[Event] = []
    model = Model(*WHOLE)
    done = ran(model, open_sandbox, on_event=events.append)
    assert [*printed(done)] == PRINTED
    assert done.response == "Error: cancelled"
    assert model.cancelled == {"slow 0": 1, "slow 1": 1}
    started = {event.run: event.block for event in events if isinstance(event, RunStarted)}
    assert started == {"1": 0, "1.1": 1, "1.2": 1, "1.3": 1, "1.4": 1, "1.5": 2}
    assert Counter(event.kind for event in events if isinstance(event, RunEnded)) == {"answered": 4, "cancelled": 2}
    assert Counter(trace.error for trace in done.child_traces) == {None: 3, "cancelled": 2}
    assert done.usage_by_depth[1].total_calls == 3


def test_children_on_nodes_live_from_block_to_block() -> None:
    assert [*printed(ran(Model(*WHOLE), LocalNodes()))] == PRINTED


@pytest.mark.parametrize("end", ["import os; os._exit(1)", "FINAL('done')"])
def test_children_end_with_the_repl_and_with_the_run(open_sandbox: Sandbox, end: str) -> None:
    events: list[Event] = []
    start = "slow = rlm_start('slow')\nidle = rlm_start('FINAL(1)', keep=True)\nidle.result()\nuntil_asked()\n"
    model = Model(start + end, "FINAL('slow' in globals())")
    before = living_below()
    done = ran(model, open_sandbox, on_event=events.append)
    assert done.response == ("done" if "FINAL" in end else "False")
    assert model.cancelled == {"slow": 1}
    told = [(type(event), event.run, getattr(event, "number", 0)) for event in events]
    ends = [told.index((RunEnded, run, 0)) for run in ("1.1", "1.2")]
    assert max(ends) < told.index((RunEnded, "1", 0) if "FINAL" in end else (IterationStarted, "1", 2))
    assert not living_below() - before


def test_child_of_a_persistent_repl_ends_with_its_run(open_sandbox: Sandbox) -> None:
    model = Model("child = rlm_start('slow')\nuntil_asked()\nFINAL(child.done)")
    tools = {"until_asked": model.until_asked}
    with RLM(model, limits=Limits(max_depth=2), sandbox=open_sandbox, persistent=True, tools=tools) as rlm:
        assert rlm.completion("a", "?").response == "False"
        assert model.cancelled == {"slow": 1}
        model._blocks = ("FINAL(child.result())",)
        assert rlm.completion("b", "?").response == "Error: cancelled"


def test_stopped_run_ends_its_children(open_sandbox: Sandbox) -> None:
    model = Model("answer['content'] = 'so far'\nchild = rlm_start('slow')", "child.result()")
    with RLM(model, limits=Limits(max_depth=2), sandbox=open_sandbox) as rlm:
        run = rlm.start("", "?")
        model.until_asked()
        run.stop()
        assert run.result(WAIT_S).is_stopped
    assert model.cancelled == {"slow": 1}


def test_child_at_the_last_depth_is_a_completion(open_sandbox: Sandbox) -> None:
    code = "one = rlm_start('b', context='a', keep=True)\nFINAL([one.result(), one.ask('c').result(), rlm_start('d').result()])"
    done = ran(Model(code), open_sandbox, Limits(max_depth=1))
    assert done.response == '["completion of a\\n\\nb", "completion of c", "completion of d"]'


def test_number_of_kept_and_of_all_children_is_bounded(open_sandbox: Sandbox) -> None:
    code = (
        "one, two = (rlm_start('FINAL(1)', keep=True) for _ in range(2))\n"
        "print(one.result(), two.result())\n"
        "one.cancel(); three = rlm_start('FINAL(3)', keep=True)\n"
        "print(three.result(), three.ask('FINAL(4)').result(), one.ask('x').result()[:29])\n"
        "FINAL(rlm_start('FINAL(5)').result())"
    )
    done = ran(
        Model(code, "FINAL(0)"), open_sandbox, Limits(max_depth=2, max_concurrent_children=1, max_children_total=3)
    )
    why = "Error: this child is not kept: it was cancelled, or 1 children are kept already (max_concurrent_children)"
    assert printed(done)[0] == f"1 {why}\n3 4 Error: this child is not kept\n"
    assert done.trajectory[0].blocks[0].final_answer == "Error: max_children_total exceeded"


def test_kept_child_is_told_where_its_long_task_is(open_sandbox: Sandbox) -> None:
    long = "# why? " * (LONG_TASK_CHARS // 7 + 1)
    model = Model(
        f"kept = rlm_start('FINAL(1)', keep=True)\nFINAL(kept.ask('FINAL(len(context_1))\\n{long}').result())"
    )
    done = ran(model, open_sandbox)
    assert done.response == str(len(f"FINAL(len(context_1))\n{long}"))
    opening, later = [str(request.messages[-1].content) for request in model.requests if request.depth][1:]
    assert "Your task stands in `context_1`." in opening
    assert "characters left out here] ..." in opening
    assert "all of it is in `context_1`" in later


def test_one_place_serves_children_in_turn(open_sandbox: Sandbox) -> None:
    """A waiting child, and a kept one that is idle, hold no place."""
    code = (
        "kept = rlm_start('FINAL(0)', keep=True)\n"
        "children = [rlm_start(f'FINAL({n})', context='x' * 50_000) for n in range(5)]\n"
        "FINAL([kept.ask('FINAL(9)').result(), rlm_query('FINAL(8)'), *(child.result() for child in children)])"
    )
    done = ran(Model(code), open_sandbox, Limits(max_depth=2, max_concurrent_children=1))
    assert done.response == '["9", "8", "0", "1", "2", "3", "4"]'


def test_waiting_is_not_computing_and_computing_beside_a_child_is(open_sandbox: Sandbox) -> None:
    limit_s = 0.0

    class Slow(Model):
        async def complete(self, request: LMRequest) -> LMReply:
            if request.depth:
                await asyncio.sleep(2 * limit_s)
            return await super().complete(request)

    def attempt(seconds: float) -> Completion:
        nonlocal limit_s
        limit_s = seconds
        waits = "print(rlm_start('FINAL(7)').result())"
        computes = "child = rlm_start('slow')\nwhile True: pass"
        model = Slow(waits, computes, "FINAL(child.done)")
        return ran(model, open_sandbox, Limits(max_depth=2, block_timeout_s=seconds))

    done = within_longer(attempt, lambda done: printed(done)[0] == "7\n")
    assert printed(done)[0] == "7\n"
    assert done.trajectory[1].blocks[0].limit == "block_timeout_s"
    assert done.response == "False"


def test_failure_of_a_child_is_asked_about_in_a_later_turn(open_sandbox: Sandbox) -> None:
    model = Model("child = rlm_start('x', model='none')", "FINAL(child.result())", "FINAL('without it')")
    assert ran(model, open_sandbox).response == "without it"


def test_recorded_children_are_replayed(open_sandbox: Sandbox, tmp_path: Path) -> None:
    model = Model("child = rlm_start('FINAL(7)')\nstuck = rlm_start('slow')", "FINAL(child.result() + str(stuck.done))")
    record = Models(record=tmp_path / "run.jsonl")
    assert ran(model, open_sandbox, models=record).response == "7False"
    with RLM(models=Models(replay=tmp_path / "run.jsonl"), limits=Limits(max_depth=2), sandbox=open_sandbox) as rlm:
        replayed = rlm.completion("the context", "?")
    assert replayed.response == "7False"
    assert replayed.usage_summary.total.stored_calls == 3


def test_replay_sees_the_same_children_as_done(open_sandbox: Sandbox, tmp_path: Path) -> None:
    """Also that which was started later and was done first, and that which was late."""

    class Ordered(Model):
        async def complete(self, request: LMRequest) -> LMReply:
            if not request.depth and len(request.messages) > 2:
                may_answer.set()
            if request.depth and "last" in self._task(request):
                await asyncio.to_thread(may_answer.wait, WAIT_S)
            return await super().complete(request)

    may_answer = threading.Event()
    start = "last, early = rlm_start('FINAL(\\'last\\')'), rlm_start('FINAL(\\'early\\')')\n"
    look = "print([child.result() for child in first(1, [last, early])], last.done)\n"
    late = "try: last.result(timeout_s=0.01)\nexcept TimeoutError: print('late')"
    blocks = (start + look + late, "FINAL(last.result() + str(early.done))")
    record = Models(record=tmp_path / "run.jsonl")
    done = ran(Ordered(*blocks), open_sandbox, models=record)
    assert [*printed(done)] == ["['early'] False\nlate\n", ""]
    tools = {"until_asked": Model().until_asked}
    with RLM(
        models=Models(replay=tmp_path / "run.jsonl"), limits=Limits(max_depth=2), sandbox=open_sandbox, tools=tools
    ) as rlm:
        replayed = rlm.completion("the context", "?")
    assert [*printed(replayed)] == [*printed(done)]
    assert replayed.response == done.response == "lastTrue"


def test_own_loop_has_children_until_its_repl_is_closed(open_sandbox: Sandbox) -> None:
    model = Model()
    with LMHandler(model) as handler:
        answers = handler.answers(Limits(max_depth=2), sandbox=open_sandbox)
        with open_sandbox.repl("", answers) as repl:
            repl.execute("child, stuck = rlm_start('FINAL(7)'), rlm_start('slow')")
            model.until_asked()
            assert repl.execute("print(child.result(), stuck.done)").stdout == "7 False\n"
        assert model.cancelled == {"slow": 1}


def test_children_without_a_model_are_refused_in_words(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("") as repl:
        block = repl.execute("print(rlm_start('x', keep=True).result())")
    assert block.stdout == "Error: rlm_query is not available: no model is connected to this sandbox\n"
