"""Runs on agents that the test plays, message by message: lost attempts, hostile nodes, and what holds over attempts."""

import asyncio
import contextlib
import contextvars
import threading
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from rlm_broker.cluster import attempt, remote_run
from rlm_broker.cluster.link import Link, encode
from rlm_broker.cluster.messages import (
    PIECE_BYTES,
    Ask,
    Begin,
    Cancel,
    Ended,
    FromAgent,
    FromBroker,
    Happened,
    Judge,
    Judged,
    Leave,
    Need,
    NoContext,
    Piece,
    Quit,
    Reply,
    ToolReply,
    UseTool,
)
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.cluster.outcomes import encoded_completion, read_completion
from rlm_broker.context.store import store
from rlm_broker.errors import (
    ClusterFailed,
    ConfigurationError,
    IsolationUnavailable,
    LimitReached,
    ModelFailed,
    RunCancelled,
    SandboxFailed,
)
from rlm_broker.events.event import Event
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import UsageSummary
from sandbox_worker.wire.values import decode
from tests.support.nodes import Gated, begun, played, taken
from tests.support.waiting import WAIT_S, until


class Number(BaseModel):
    """A type of answers."""

    number: int


def asking(begin: Begin, call: int, text: str, **more: Any) -> Ask:
    """A call as an agent asks for it."""
    return Ask(begin.run, call, "1", (("user", text),), 60.0, **{"depth": 1, **more})


def ended(begin: Begin, response: str | None, **more: Any) -> Ended:
    """The end of a run with an answer."""
    return Ended(begin.run, encoded_completion(Completion(response, "a lie", 0, 1, 1.0, UsageSummary())), **more)


def failed(begin: Begin, error: str, message: str = "it broke", **more: Any) -> Ended:
    """The end of a run without one."""
    return Ended(begin.run, error=error, message=message, **more)


async def answered(run: Any) -> Completion:
    async with asyncio.timeout(WAIT_S):
        completion: Completion = await run
        return completion


async def replied(link: Link[FromBroker], ask: Ask) -> Reply:
    """Ask, and return the reply."""
    await link.send(ask)
    reply: Reply = await taken(link, Reply)
    return reply


async def why_lost(link: Link[FromBroker]) -> str:
    async with asyncio.timeout(WAIT_S):
        return await link.lost()


# -- attempts --------------------------------------------------------------------------------------------------------


async def test_a_run_may_lose_three_nodes() -> None:
    """A run that ends the nodes on which it runs fails with one sentence, and takes no fourth with it."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm:
        run = rlm.start("a", "What?")
        for name in ("one", "two", "three"):
            async with played(nodes, name) as link:
                await begun(link)
        with pytest.raises(ClusterFailed, match=r"lost with its node 3 times \(one, two, three\), the last time since"):
            await answered(run)
        assert nodes.stats().lost_runs == 3


async def test_strangers_alone_end_no_run() -> None:
    """An agent that takes a run, drops it and joins anew under other names cannot end it while another node is there."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes, "honest", 1) as honest:
        first = rlm.start("a", "What?")
        begin = await begun(honest)
        run = rlm.start("a", "What?")
        for name in ("one", "two", "three"):
            async with played(nodes, name, 60_000) as link:
                await begun(link)
        await until(lambda: nodes.stats().lost_runs == 3)
        await honest.send(ended(begin, "well"))
        await answered(first)
        await honest.send(ended(await begun(honest), "well"))
        assert (await answered(run)).response == "well"


async def test_an_outcome_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large outcome takes a second, and the loop serves all other runs. An end behind it has no effect."""
    threads: list[threading.Thread] = []

    def read(raw: msgspec.Raw) -> Completion:
        threads.append(threading.current_thread())
        return read_completion(raw)

    monkeypatch.setattr(attempt, "read_completion", read)
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        begin = await begun(link)
        await link.send(ended(begin, "well"))
        await link.send(ended(begin, "twice"))
        await link.aclose()
        assert (await answered(run)).response == "well"
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_run_that_its_node_fails_goes_elsewhere() -> None:
    """An error of the node, and not of the run, ends the attempt alone. The run avoids that node, which is free."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes, "bad") as bad:
        run = rlm.start("a", "What?")
        begin = await begun(bad)
        async with played(nodes, "good") as good:
            await until(lambda: len(nodes.stats().nodes) == 2)
            await bad.send(failed(begin, "SandboxFailed", is_of_node=True))
            await good.send(ended(await begun(good), "well"))
            assert (await answered(run)).response == "well"


async def test_a_node_cancels_no_run() -> None:
    """A run that its node says was cancelled goes elsewhere: a cancelled one would end without a result in a batch."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        for _ in range(3):
            await link.send(failed(await begun(link), "RunCancelled"))
        with pytest.raises(SandboxFailed, match="has not cancelled it"):
            await answered(run)


@pytest.mark.parametrize("error", [SandboxFailed, IsolationUnavailable])
async def test_an_error_of_all_nodes_is_raised(error: type[Exception]) -> None:
    """A run that no node can have fails with the error of the last one."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        for _ in range(3):
            await link.send(failed(await begun(link), error.__name__, "no memory", is_of_node=True))
        with pytest.raises(error, match="no memory"):
            await answered(run)


@pytest.mark.parametrize("message", [Quit("\x1b[2J\nforged"), Happened(1, (msgspec.Raw(b'{"\\u001b\\n": 1}'),))])
async def test_a_hostile_agent_forges_no_log(message: FromAgent, caplog: pytest.LogCaptureFixture) -> None:
    """Words of an agent, and quotes of its messages, have no control characters in the log."""
    told: list[Event] = []
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes, on_event=told.append) as rlm, played(nodes) as link:
        rlm.start("a", "What?")
        await begun(link)
        await link.send(message)
        await why_lost(link)
        await until(lambda: any("is gone" in record.getMessage() for record in caplog.records))
    assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_an_agent_that_leaves_gives_its_runs_back() -> None:
    """A node that is stopped in order hands its runs on at once."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm:
        run = rlm.start("a", "What?")
        async with played(nodes, "leaves") as link:
            await begun(link)
            await link.send(Quit("the node was stopped"))
            await why_lost(link)
        async with played(nodes, "stays") as link:
            await link.send(ended(await begun(link), "well"))
            assert (await answered(run)).response == "well"


async def test_a_call_under_way_is_joined() -> None:
    """A further attempt gets the call that is under way, and the answers before it, without a further request."""
    model = Gated(lambda request: str(request.messages[-1].content).upper())
    model.held["two"] = asyncio.Event()
    async with Nodes() as nodes, RLM(model, sandbox=nodes) as rlm:
        run = rlm.start("a", "What?")
        async with played(nodes, "lost") as link:
            begin = await begun(link)
            assert (await replied(link, asking(begin, 1, "one"))).text == "ONE"
            await link.send(asking(begin, 2, "two"))
            await until(lambda: "two" in model.asked)
        async with played(nodes, "next") as link:
            begin = await begun(link)
            assert (await replied(link, asking(begin, 1, "one"))).text == "ONE"
            await link.send(asking(begin, 2, "two"))
            model.held["two"].set()
            assert (await taken(link, Reply)).text == "TWO"
            await link.send(ended(begin, "done"))
            completion = await answered(run)
    assert model.asked == ["one", "two"]
    assert completion.usage_summary.total.total_calls == 2


async def test_a_function_is_called_once() -> None:
    """A further attempt gets the result of a function that was called, and joins a call that is under way."""
    called: list[str] = []
    goes_on = asyncio.Event()

    async def note(text: str) -> str:
        called.append(text)
        if text == "slow":
            await goes_on.wait()
        return text.upper()

    def use(begin: Begin, call: int, text: str) -> UseTool:
        return UseTool(begin.run, call, "note", f'{{"args": ["{text}"], "kwargs": {{}}}}', 60.0)

    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes, tools={"note": note}) as rlm:
        run = rlm.start("a", "What?")
        async with played(nodes, "lost") as link:
            begin = await begun(link)
            assert [tool.name for tool in begin.tools.tools] == ["note"]
            await link.send(use(begin, 1, "quick"))
            assert decode((await taken(link, ToolReply)).text.encode()) == "QUICK"
            await link.send(use(begin, 2, "slow"))
            await until(lambda: "slow" in called)
        async with played(nodes, "next") as link:
            begin = await begun(link)
            await link.send(use(begin, 1, "quick"))
            assert decode((await taken(link, ToolReply)).text.encode()) == "QUICK"
            await link.send(use(begin, 2, "slow"))
            goes_on.set()
            assert decode((await taken(link, ToolReply)).text.encode()) == "SLOW"
            await link.send(ended(begin, "done"))
            await answered(run)
    assert called == ["quick", "slow"]


async def test_context_variables_are_those_of_the_run() -> None:
    """A function of the user's finds the variables of the run's caller. A call gets none that a receiver has set."""
    found: list[str] = []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    async def note() -> None:
        found.append(variable.get())

    def reply(_: object) -> str:
        found.append(variable.get())
        return "yes"

    def receiver(event: Event) -> None:
        found.append(variable.get())
        variable.set(type(event).__name__)

    tools = {"note": note}
    async with Nodes() as nodes, RLM(Gated(reply), sandbox=nodes, tools=tools, on_event=receiver) as rlm:
        variable.set("caller")
        run = rlm.start("a", "What?")
        async with played(nodes) as link:
            begin = await begun(link)
            event = (
                b'{"event": "call_started", "run": "1", "depth": 0, "call": %d, "requested_model": null, "prompt": ""}'
            )
            await link.send(Happened(begin.run, tuple(msgspec.Raw(event % number) for number in (1, 2))))
            await replied(link, asking(begin, 1, "one"))
            await link.send(UseTool(begin.run, 2, "note", '{"args": [], "kwargs": {}}', 60.0))
            await taken(link, ToolReply)
            await link.send(ended(begin, "well"))
            await answered(run)
    assert found == ["caller"] * 4


async def test_time_goes_on_from_attempt_to_attempt() -> None:
    """A further attempt gets the seconds that are left, and its limit is told with the number of the run."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm:
        run = rlm.start("a", "What?", timeout_s=50)
        async with played(nodes, "lost") as link:
            first_s = (await begun(link)).limits["run_timeout_s"]
            assert 0 < first_s < 50  # the reading of the context was counted
        async with played(nodes, "next") as link:
            begin = await begun(link)
            left_s = begin.limits["run_timeout_s"]
            assert 0 < left_s < first_s
            facts = {"limit": "run_timeout_s", "spent": left_s, "allowed": left_s}
            await link.send(failed(begin, "LimitReached", facts=facts))
            with pytest.raises(LimitReached) as reached:
                await answered(run)
    assert (reached.value.limit, reached.value.allowed) == ("run_timeout_s", 50)


async def test_a_mute_node_holds_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that lives and says nothing of a run cannot keep it beyond its time."""
    monkeypatch.setattr(remote_run, "END_S", 0.05)
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?", timeout_s=0.05)
        begin = await begun(link)
        with pytest.raises(LimitReached, match="run_timeout_s"):
            await answered(run)
        assert (await taken(link, Cancel)).run == begin.run


async def test_a_mute_node_holds_no_cancelled_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled run ends, whether its node says so or not."""
    monkeypatch.setattr(remote_run, "END_S", 0.05)
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        await begun(link)
        run.cancel()
        with pytest.raises(RunCancelled):
            await answered(run)


async def test_a_run_that_waits_can_be_stopped() -> None:
    """A run that no node has yet ends without an answer."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm:
        run = rlm.start("a", "What?")
        await until(lambda: nodes.stats().waiting == 1)
        run.stop()
        completion = await answered(run)
    assert completion.is_stopped
    assert completion.response is None


async def test_a_closed_cluster_ends_its_runs() -> None:
    """A run whose cluster is closed fails at once, and waits for no other node."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(Nodes())
        link = await stack.enter_async_context(played(nodes))
        run = RLM(Gated(str), sandbox=nodes).start("a", "What?")
        await begun(link)
        await nodes.aclose()
        with pytest.raises(ClusterFailed, match="the cluster was closed"):
            await answered(run)
        assert isinstance(await taken(link, Quit), Quit)


async def test_a_cluster_of_another_loop_is_used_there() -> None:
    """A cluster that was opened by `with` lives in the background, and so do the runs."""
    nodes = Nodes()
    await asyncio.to_thread(nodes.__enter__)
    try:
        run = RLM(Gated(str), sandbox=nodes, limits=Limits(run_timeout_s=60)).start("a", "What?")
        async with played(nodes) as link:
            await link.send(ended(await begun(link), "well"))
            assert (await answered(run)).response == "well"
    finally:
        await nodes.aclose()


async def test_two_loops_for_one_run_are_refused() -> None:
    """A handler and a cluster that live on two event loops cannot serve one run."""
    nodes = Nodes()
    await asyncio.to_thread(nodes.__enter__)
    try:
        async with LMHandler(Gated(str)) as handler:
            with pytest.raises(ConfigurationError, match="on two event loops"):
                await answered(RLM(handler=handler, sandbox=nodes).start("a", "What?"))
    finally:
        await nodes.aclose()


# -- contexts --------------------------------------------------------------------------------------------------------


async def test_a_context_crosses_once() -> None:
    """A context goes to a node in pieces, once for all that ask for it at the same time."""
    text = "0123456789" * (PIECE_BYTES // 4)
    with store(text) as context:
        async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
            runs = [rlm.start(context, "What?"), rlm.start(context, "Why?")]
            begins = [await begun(link), await begun(link)]
            digests = {begin.context.digest for begin in begins}
            assert len(digests) == 1
            [digest] = digests
            link._write(2 * encode(Need(digest)))  # in one segment: a second one may come when the transfer has ended
            pieces: list[bytes] = []
            size = begins[0].context.size_bytes
            async for message, data in link.receive():
                assert isinstance(message, Piece)
                assert message.at == sum(map(len, pieces))
                pieces.append(bytes(data or b""))
                if sum(map(len, pieces)) == size:
                    break
            assert b"".join(pieces).rstrip(b"\0") == text.encode()
            for run, begin in zip(runs, begins, strict=True):
                await link.send(asking(begin, 1, "more"))
                assert isinstance(await anything(link), Reply)  # and no further piece
                await link.send(ended(begin, "done"))
                await answered(run)


async def anything(link: Link[FromBroker]) -> FromBroker:
    """Return the next message, whatever it is."""
    async for message, _ in link.receive():
        return message
    raise AssertionError("the link has ended")


async def test_a_node_gets_no_context_of_others() -> None:
    """A digest is no right: a node has the contexts of its own runs alone."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes, "one", max_runs=1) as one:
        rlm.start("a secret", "What?")
        begin = await begun(one)
        async with played(nodes, "two") as two:
            await two.send(Need(begin.context.digest))
            assert (await taken(two, NoContext)).digest == begin.context.digest


# -- hostile nodes ---------------------------------------------------------------------------------------------------


async def test_a_node_makes_no_more_calls_than_its_run() -> None:
    """The limit of calls holds here, over all attempts, whatever the node says; and it is the error of the run."""
    model = Gated(lambda _: "yes")
    limits = Limits(max_llm_calls=2)
    async with Nodes() as nodes, RLM(model, sandbox=nodes, limits=limits) as rlm:
        run = rlm.start("a", "What?")
        async with played(nodes, "lost") as link:
            await replied(link, asking(await begun(link), 1, "one"))
        async with played(nodes, "next") as link:
            begin = await begun(link)
            assert (await replied(link, asking(begin, 1, "two"))).failure is None
            refused = await replied(link, asking(begin, 2, "three"))
            await link.send(failed(begin, "ModelFailed", refused.failure or ""))
            with pytest.raises(LimitReached, match="max_llm_calls"):
                await answered(run)
    assert model.asked == ["one", "two"]


async def test_a_node_spends_no_more_than_its_run() -> None:
    """The limit of money holds here."""
    model = Gated(lambda _: "yes")
    limits = Limits(max_budget_usd=0.25)
    async with Nodes() as nodes, RLM(model, sandbox=nodes, limits=limits) as rlm, played(nodes) as link:
        rlm.start("a", "What?")
        begin = await begun(link)
        await replied(link, asking(begin, 1, "one"))
        assert "max_budget_usd" in ((await replied(link, asking(begin, 2, "two"))).failure or "")
    assert model.asked == ["one"]


async def test_a_node_calls_no_other_model() -> None:
    """The policy of models holds here, and a wish for more output than the run may have has no effect."""
    model = Gated(lambda _: "yes")
    limits = Limits(max_completion_tokens=5)
    async with Nodes() as nodes, RLM(model, sandbox=nodes, limits=limits) as rlm, played(nodes) as link:
        rlm.start("a", "What?")
        begin = await begun(link)
        refused = await replied(link, asking(begin, 1, "one", model="dear"))
        assert refused.cause == "unknown_model"
        await replied(link, asking(begin, 2, "two", max_completion_tokens=9_000))
    assert model.asked == ["two"]
    assert model.requests[0].max_completion_tokens == 5


async def test_usage_is_what_was_counted_here() -> None:
    """Usage and model are not taken from the node."""
    async with Nodes() as nodes, RLM(Gated(lambda _: "yes"), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        begin = await begun(link)
        await replied(link, asking(begin, 1, "one"))
        await link.send(ended(begin, "done"))
        completion = await answered(run)
    assert completion.root_model == "gated"
    assert completion.usage_by_depth[1].total_cost == 0.25


async def test_a_node_reaches_no_run_of_others() -> None:
    """A number of a run means that of the node's own link: another node's run gets neither its calls nor its end."""
    model = Gated(lambda _: "yes")
    async with Nodes() as nodes, RLM(model, sandbox=nodes) as rlm, played(nodes, "one", max_runs=1) as one:
        run = rlm.start("a", "What?")
        begin = await begun(one)
        async with played(nodes, "two") as two:
            await two.send(asking(begin, 1, "one"))
            await two.send(ended(begin, "theirs"))
            await two.send(Need("none"))
            await taken(two, NoContext)  # all before it was taken
        await one.send(ended(begin, "ours"))
        assert (await answered(run)).response == "ours"
    assert model.asked == []


@pytest.mark.parametrize(
    "message",
    [
        lambda begin: Happened(begin.run, (msgspec.Raw(b'{"event": "run_vanished"}'),)),
        lambda begin: Happened(begin.run, (msgspec.Raw(b'{"event": "iteration_started", "run": "2", "depth": 0}'),)),
        lambda begin: asking(begin, 1, "one", depth=9),
        lambda begin: Ask(begin.run, 1, "1", (("tool", "text"),), 60.0),
        lambda begin: Ask(begin.run, 1, "1", (), 60.0),
        lambda begin: Ask(
            begin.run,
            1,
            "1",
            (("user", [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),),
            60.0,
        ),
        lambda begin: Judge(begin.run, 1, "an answer of no type"),
        lambda begin: Ended(begin.run, msgspec.Raw(b'{"response": 5}')),
    ],
)
async def test_a_node_that_says_nonsense_is_dropped(message: Any) -> None:
    """A message that no agent sends ends the link, and the run goes elsewhere."""
    model = Gated(lambda _: "yes")
    async with Nodes() as nodes, RLM(model, sandbox=nodes, on_event=lambda _: None) as rlm:
        run = rlm.start("a", "What?")
        async with played(nodes, "hostile") as link:
            await link.send(message(await begun(link)))
            await why_lost(link)
        async with played(nodes, "next") as link:
            await link.send(ended(await begun(link), "done"))
            assert (await answered(run)).response == "done"
    assert model.asked == []


async def test_an_answer_must_have_been_judged() -> None:
    """A node cannot end a run with an answer of another type, or with one that was never judged."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?", output_type=Number)
        begin = await begun(link)
        assert begin.output_schema is not None
        await link.send(Judge(begin.run, 1, '{"number": 5}'))
        assert (await taken(link, Judged)).problem is None
        await link.send(ended(begin, '{"number": 6}'))
        with pytest.raises(ClusterFailed, match="was not judged"):
            await answered(run)


@pytest.mark.parametrize("bound", ["MOST_ASKED_OF_RUN", "MOST_ASKED_OF_NODE"])
async def test_large_calls_at_once_are_refused(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node cannot keep many large prompts in the orchestrator's memory. A large one alone is answered."""
    monkeypatch.setattr(attempt, bound, 10_000)
    model = Gated(lambda _: "yes")
    large = "x" * 2_000_000
    model.held[large] = asyncio.Event()
    async with Nodes() as nodes, RLM(model, sandbox=nodes) as rlm, played(nodes) as link:
        rlm.start("a", "What?")
        begin = await begun(link)
        await link.send(asking(begin, 1, large))
        refused = await replied(link, asking(begin, 2, "small", question="y" * 8_000))
        assert (refused.call, refused.failure) == (2, "more requests at the same time than a run may have")
        model.held[large].set()
        assert (await taken(link, Reply)).text == "yes"
        parts = [{"type": "text", "text": "z" * 9_000}]
        assert (await replied(link, msgspec.structs.replace(asking(begin, 3, ""), messages=(("user", parts),)))).text


async def test_too_many_calls_at_once_are_refused() -> None:
    """A node cannot keep more calls open than a few times those of its run."""
    model = Gated(lambda _: "yes")
    model.held["one"] = asyncio.Event()
    limits = Limits(max_concurrent_calls=1)
    async with Nodes() as nodes, RLM(model, sandbox=nodes, limits=limits) as rlm, played(nodes) as link:
        rlm.start("a", "What?")
        begin = await begun(link)
        for call in range(1, 6):
            await link.send(asking(begin, call, "one"))
        reply: Reply = await taken(link, Reply)
        assert (reply.call, reply.failure) == (5, "more requests at the same time than a run may have")
        await link.send(Leave(begin.run, 1))
        await until(lambda: model.cancelled == ["one"])


async def test_an_error_of_a_run_is_its_own() -> None:
    """An error that the run earned is raised as it is, with the partial answer, and not attempted again."""
    async with Nodes() as nodes, RLM(Gated(str), sandbox=nodes) as rlm, played(nodes) as link:
        run = rlm.start("a", "What?")
        message = failed(await begun(link), "ModelFailed", facts={"cause": "request"}, partial_answer="half")
        await link.send(message)
        with pytest.raises(ModelFailed) as error:
            await answered(run)
    assert (error.value.cause, error.value.partial_answer) == ("request", "half")
    assert nodes.stats().lost_runs == 0
