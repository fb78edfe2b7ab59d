"""The results of a run: every field of its `Completion`, and what its calls cost."""

import dataclasses
import time

from pydantic import BaseModel

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.events.event import CallEnded, Event, RunEnded
from rlm_broker.limits import Limits
from rlm_broker.results import Completion, ContextInfo
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.usage import Usage, UsageSummary
from tests.e2e.conftest import MakeRLM

ROOT_CODE = "answers = llm_query('one') + llm_query('two')\nFINAL({'n': int(rlm_query('child'))})"
CODE = {0: ROOT_CODE, 1: "FINAL(7)"}
COSTS = {0: 0.5, 1: 0.125}


class Answer(BaseModel):
    n: int


class Priced(BaseClient):
    """Costs by depth, and counts tokens by depth."""

    model_name = "priced"

    async def complete(self, request: LMRequest) -> LMReply:
        depth = request.depth
        code = CODE[depth]
        text = f"I ask.\n```repl\n{code}\n```" if request.is_loop else "a sub answer"
        return LMReply(text, Usage(1, 100 * (depth + 1), 10, COSTS[depth]))


def test_completion_has_all_of_a_run(open_sandbox: Sandbox) -> None:
    started = time.monotonic()
    events: list[Event] = []
    rlm = RLM(Priced(), limits=Limits(max_depth=2), on_event=events.append, sandbox=open_sandbox)
    done = rlm.completion("the text", "the question", output_type=Answer)
    elapsed_s = time.monotonic() - started
    usage = Usage(4, 700, 40, 0.875)
    (turn,) = done.trajectory
    (block,) = turn.blocks
    (child,) = done.child_traces
    expected = {
        "response": '{"n": 7}',
        "root_model": "priced",
        "depth": 0,
        "iterations": 1,
        "execution_time": done.execution_time,
        "usage_summary": UsageSummary({"priced": usage}),
        "usage_by_depth": {0: Usage(1, 100, 10, 0.5), 1: Usage(3, 600, 30, 0.375)},
        "parsed": Answer(n=7),
        "limit": None,
        "is_stopped": False,
        "isolation": done.isolation,
        "messages": done.messages,
        "trajectory": done.trajectory,
        "child_traces": done.child_traces,
        "prompt": "the text",
        "root_prompt": "the question",
        "context": ContextInfo("str", 8),
        "earlier_turns": 0,
    }
    assert {each.name: getattr(done, each.name) for each in dataclasses.fields(Completion)} == expected
    assert elapsed_s > done.execution_time > block.execution_time > child.duration_s > 0
    assert done.isolation is not None
    assert done.isolation.level == "strict"
    assert done.isolation.layers
    assert [message.role for message in done.messages] == ["system", "user", "assistant"]
    assert (turn.number, block.code, block.status) == (1, ROOT_CODE, "ok")
    assert turn.reply == done.messages[-1].content
    assert (child.depth, child.prompt_preview, child.result_preview, child.error) == (1, "child", "7", None)
    # The cost of each call is in its event, and the sums are sums of these costs.
    calls = [event for event in events if isinstance(event, CallEnded)]
    assert [(call.depth, call.usage.total_cost) for call in calls] == [(0, 0.5), *[(1, 0.125)] * 3]
    ended = {event.run: event for event in events if isinstance(event, RunEnded)}
    assert {run: event.cost_usd for run, event in ended.items()} == {"1": 0.875, "1.1": 0.125}
    assert ended["1"].usage == done.usage_summary


def test_run_without_repl_has_time_and_usage(rlm: MakeRLM) -> None:
    client = ScriptedClient(["plain"], cost_per_call=0.5)
    done = rlm(client, limits=Limits(max_depth=0)).completion("the text", "?")
    assert (done.response, done.isolation, done.iterations, done.trajectory) == ("plain", None, 0, ())
    assert done.execution_time > 0
    assert done.usage_by_depth[0].total_cost == 0.5
