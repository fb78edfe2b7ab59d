"""Whole runs on real agents: what users have without a cluster they have with one, and lost nodes lose no run."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from pydantic import BaseModel

from rlm_broker.broker.models.models import Models
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.errors import ClusterFailed, ConfigurationError, LimitReached, OutputInvalid, RunCancelled
from rlm_broker.events.event import BlockEnded, CallEnded, CallStarted, CallText, Event, RunEnded, RunStarted, ToolEnded
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.run import Run
from tests.support.nodes import Agent, Crew, Gated, Proxy, agent, looping
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKS_TWICE = "a = llm_query('first')\nb = llm_query('second')\nFINAL(a + ' ' + b)"
"""Code of a run that makes two calls, one after the other."""


class Lines(BaseModel):
    """An answer of a type."""

    lines: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crew() -> AsyncIterator[Crew]:
    """A cluster whose agents the tests share."""
    async with Crew.gathered() as gathered:
        yield gathered


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(crew: Crew) -> Nodes:
    """The cluster, with a node."""
    await crew.has(1)
    return crew.nodes


async def answered(run: Run) -> Completion:
    async with asyncio.timeout(WAIT_S):
        return await run


# -- as without a cluster --------------------------------------------------------------------------------------------


async def test_a_run_answers_and_tells(cluster: Nodes) -> None:
    """A run on a node has the answer, the usage, the turns and the events of a run on this machine."""
    told: list[Event] = []
    model = Gated(looping("print(len(context))\na = llm_query('hello')\nFINAL(a + str(double(4)) + str(factor))"))
    tools = {"double": lambda number: 2 * number, "factor": 3}
    async with RLM(model, sandbox=cluster, tools=tools, on_event=told.append) as rlm:
        run = rlm.start("some text", "What is asked?")
        completion = await answered(run)
        followed = [event async for event in run.events()]
    assert completion.response == "HELLO83"
    assert completion.usage_summary.total.total_calls == 2
    assert completion.usage_by_depth[1].total_cost == 0.25
    assert completion.trajectory[0].blocks[0].stdout == "9\n"
    assert completion.isolation is not None
    assert completion.root_prompt == "What is asked?"
    assert [event.n for event in told] == list(range(1, len(told) + 1))
    assert {event.tree for event in told} == {run.id}
    assert [type(event) for event in followed] == [type(event) for event in told]
    assert isinstance(told[0], RunStarted)
    assert isinstance(told[-1], RunEnded)
    assert told[-1].usage.total.total_calls == 2
    assert "HELLO" in [event.text for event in told if isinstance(event, CallText)]
    assert any(isinstance(event, ToolEnded) and event.result == "8" for event in told)
    assert any(isinstance(event, BlockEnded) and event.outcome.stdout == "9\n" for event in told)


async def test_children_and_contexts_stay_on_the_node(cluster: Nodes) -> None:
    """A child run has its own REPL on the node, and its part of the context."""
    code = "r = rlm_query('count', context=context[:3])\nFINAL(r)"

    def reply(request: Any) -> str:
        return f"```repl\n{code if request.depth == 0 else 'FINAL(len(context))'}\n```"

    async with RLM(Gated(reply), sandbox=cluster, limits=Limits(max_depth=2)) as rlm:
        completion = await answered(rlm.start("abcdef", "How long?"))
    assert completion.response == "3"
    assert len(completion.child_traces) == 1


async def test_an_answer_has_its_type(cluster: Nodes) -> None:
    """The type is judged here: the model is told what is wrong, and the value is of the user's own class."""
    replies = iter(["```repl\nFINAL('many')\n```", "```repl\nFINAL('{\"lines\": 3}')\n```"])
    async with RLM(Gated(lambda _: next(replies)), sandbox=cluster) as rlm:
        completion = await answered(rlm.start("a\nb\nc", "How many lines?", output_type=Lines))
    assert completion.parsed == Lines(lines=3)


async def test_a_wrong_type_fails_as_here(cluster: Nodes) -> None:
    """The error of an answer that stays wrong has the last answer."""
    limits = Limits(max_output_retries=1)
    async with RLM(Gated(looping("FINAL('many')")), sandbox=cluster, limits=limits) as rlm:
        with pytest.raises(OutputInvalid) as failed:
            await answered(rlm.start("a", "How many lines?", output_type=Lines))
    assert failed.value.answer == "many"
    assert failed.value.messages


async def test_limits_end_a_run_as_here(cluster: Nodes) -> None:
    """A limit of a run ends it with the partial results, and has its own numbers."""
    code = "answer['content'] = 'so far'\nimport time\nwhile True: time.sleep(0.01)"
    async with RLM(Gated(looping(code)), sandbox=cluster) as rlm:
        with pytest.raises(LimitReached) as failed:
            await answered(rlm.start("a", "What?", timeout_s=0.5))
    assert (failed.value.limit, failed.value.allowed) == ("run_timeout_s", 0.5)
    assert failed.value.messages


async def test_a_stopped_run_has_its_draft(cluster: Nodes) -> None:
    """`stop` returns the best answer so far."""
    model = Gated(looping("llm_query('first')"))
    model.held["first"] = asyncio.Event()
    async with RLM(model, sandbox=cluster) as rlm:
        run = rlm.start("a", "What?")
        await until(lambda: "first" in model.asked)
        run.stop()
        completion = await answered(run)
    assert completion.is_stopped
    assert model.cancelled == ["first"]


async def test_a_cancelled_run_has_its_messages(cluster: Nodes) -> None:
    """A cancellation ends the call at the model, and the error has what the run had."""
    model = Gated(looping("llm_query('first')"))
    model.held["first"] = asyncio.Event()
    async with RLM(model, sandbox=cluster) as rlm:
        run = rlm.start("a", "What?")
        await until(lambda: "first" in model.asked)
        run.cancel()
        with pytest.raises(RunCancelled) as failed:
            await answered(run)
    assert model.cancelled == ["first"]
    assert len(failed.value.messages) == 3
    await until(lambda: cluster.stats().nodes[0].runs == 0)


async def test_it_works_from_plain_code() -> None:
    """`with` and `completion` work in a thread without a loop, and a closed cluster is opened while it is used."""

    def ask() -> str | None:
        with Nodes() as nodes, agent(nodes, "plain"), RLM(Gated(looping("FINAL(context)")), sandbox=nodes) as rlm:
            return rlm.completion("some text", "What?").response

    assert await asyncio.to_thread(ask) == "some text"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"persistent": True}, "persistent needs a REPL on this machine"),
        ({"recursion": lambda *given: given[-1]}, "a function for recursion needs a REPL on this machine"),
        ({"models": Models(record="calls.jsonl")}, "record and replay are for runs on this machine"),
    ],
)
async def test_what_cannot_cross_is_refused(given: dict[str, Any], says: str) -> None:
    """One sentence says what does not go with a cluster."""
    with pytest.raises(ConfigurationError, match=says):
        RLM("offline", sandbox=Nodes(), **given)


# -- places ----------------------------------------------------------------------------------------------------------


async def test_runs_wait_while_nodes_are_full(cluster: Nodes) -> None:
    """A run beyond the places of the nodes waits, and none is lost."""
    model = Gated(looping("FINAL(llm_query(context))"))
    places = sum(node.max_runs for node in cluster.stats().nodes)
    texts = [f"text {number}" for number in range(places + 1)]
    model.held.update((text, asyncio.Event()) for text in texts)
    async with RLM(model, sandbox=cluster) as rlm:
        runs = [rlm.start(text, "What?") for text in texts]
        await until(lambda: cluster.stats().waiting == 1 and len(model.asked) == 2 * places)
        assert all(node.is_full for node in cluster.stats().nodes)
        for held in model.held.values():
            held.set()
        assert [(await answered(run)).response for run in runs] == [text.upper() for text in texts]


async def test_no_node_in_time_is_one_sentence() -> None:
    """A run that waits in vain for a node says what to do."""
    async with Nodes(join_timeout_s=0.05) as nodes, RLM(Gated(str), sandbox=nodes) as rlm:
        with pytest.raises(ClusterFailed, match=r"no node has joined .*: rlm-broker node --connect 127\.0\.0\.1:"):
            await answered(rlm.start("a", "What?"))


async def test_a_closed_cluster_fails_its_runs() -> None:
    """Runs that wait for a node end with the cluster."""
    nodes = Nodes()
    async with nodes:
        rlm = RLM(Gated(str), sandbox=nodes)
        run = rlm.start("a", "What?")
        await until(lambda: nodes.stats().waiting == 1)
    with pytest.raises(ClusterFailed, match="the cluster was closed"):
        await answered(run)


# -- lost nodes ------------------------------------------------------------------------------------------------------


def kill(lost: Agent, proxy: Proxy) -> None:  # noqa: ARG001 - one form for all faults
    lost.signal(signal.SIGKILL)


def freeze(lost: Agent, proxy: Proxy) -> None:  # noqa: ARG001
    lost.signal(signal.SIGSTOP)


def cut(lost: Agent, proxy: Proxy) -> None:  # noqa: ARG001
    proxy.cut()


@pytest.mark.parametrize("fault", [kill, freeze, cut])
async def test_a_run_goes_on_elsewhere(crew: Crew, fault: Callable[[Agent, Proxy], None]) -> None:
    """A run that lost its node is answered by another one. Its answered call is not made again, and the one that is
    under way is joined: the model is asked each question once. Its followers see each event once."""
    told: list[Event] = []
    model = Gated(looping(ASKS_TWICE))
    model.held["second"] = asyncio.Event()
    await crew.has(2)
    before = crew.nodes.stats()
    async with RLM(model, sandbox=crew.nodes, on_event=told.append) as rlm:
        run = rlm.start("some text", "What?")
        await until(lambda: "second" in model.asked)
        fault(*crew.busy())
        await until(lambda: [node.runs for node in crew.nodes.stats().nodes] == [1])
        model.held["second"].set()
        completion = await answered(run)
    stats = crew.nodes.stats()
    assert completion.response == "FIRST SECOND"
    assert [asked for asked in model.asked if asked in ("first", "second")] == ["first", "second"]
    assert len(model.asked) == 3
    assert model.cancelled == []
    assert completion.usage_summary.total.total_calls == 3
    assert completion.usage_summary.total_cost == 0.75
    assert (stats.lost_nodes - before.lost_nodes, stats.lost_runs - before.lost_runs) == (1, 1)
    assert [event.n for event in told] == list(range(1, len(told) + 1))
    assert [event.call for event in told if isinstance(event, CallStarted)] == [1, 2, 3]
    assert [event.call for event in told if isinstance(event, CallEnded)] == [1, 2, 3]
    assert [type(event) for event in told if isinstance(event, RunStarted | RunEnded)] == [RunStarted, RunEnded]
    assert all(one.time <= other.time for one, other in itertools.pairwise(told))


def has_fewer(nodes: Nodes, than: int) -> bool:
    """Whether a node is gone."""
    return len(nodes.stats().nodes) < than


async def test_the_last_node_may_come_later(crew: Crew) -> None:
    """A run whose last node is lost waits for the next one."""
    model = Gated(looping("FINAL(llm_query('first'))"))
    model.held["first"] = asyncio.Event()
    await crew.has(1)
    async with RLM(model, sandbox=crew.nodes) as rlm:
        run = rlm.start("a", "What?")
        await until(lambda: "first" in model.asked)
        while crew.nodes.stats().nodes:
            there = len(crew.nodes.stats().nodes)
            kill(*crew.busy())
            await until(partial(has_fewer, crew.nodes, there))
            await until(lambda: not crew.nodes.stats().nodes or any(node.runs for node in crew.nodes.stats().nodes))
        await crew.has(1)
        model.held["first"].set()
        assert (await answered(run)).response == "FIRST"
    assert len(model.asked) == 2
