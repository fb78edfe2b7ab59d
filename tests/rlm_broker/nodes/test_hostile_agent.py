"""An agent that lies: it ends its own link, or its own REPLs, and reaches nothing else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rlm_broker import ContextRefused, SandboxFailed, WorkerDied
from rlm_broker.nodes import messages
from rlm_broker.nodes.link import HEAD, SILENCE_S
from rlm_broker.nodes.node import Node
from rlm_broker.nodes.streams import WINDOW_BYTES
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire import control
from tests.support.nodes import LocalNodes, PlayedAgent
from tests.support.waiting import WAIT_S, until


@contextlib.asynccontextmanager
async def playing() -> AsyncIterator[tuple[LocalNodes, PlayedAgent]]:
    """A cluster whose one node is played by the test."""
    nodes = LocalNodes({})
    opening = asyncio.create_task(nodes.__aenter__())
    await until(lambda: nodes._port is not None and nodes._address != ("", 0))
    async with PlayedAgent.joined(nodes._order("played")) as agent:
        await opening
        try:
            yield nodes, agent
        finally:
            agent.link.close("the test is over")
            await nodes.aclose()


async def opening_repl(
    nodes: LocalNodes, agent: PlayedAgent
) -> "tuple[asyncio.Task[SandboxedRepl], int, messages.Say]":
    """Begin to open a REPL; return the opening, the number of its worker, and its `Start`."""
    opening = asyncio.create_task(nodes.repl().__aenter__())
    worker = await agent.forked()
    load, start = await agent.next(messages.Say), await agent.next(messages.Say)
    assert isinstance(control.unpack_to_init(load.packet), control.Load)
    assert isinstance(control.unpack_to_init(start.packet), control.Start)
    return opening, worker, start


async def given_up(opening: "asyncio.Task[SandboxedRepl]", agent: PlayedAgent) -> None:
    """End the opening of a REPL, whose agent answers nothing."""
    agent.link.close("the test is over")
    opening.cancel()
    await asyncio.wait({opening}, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (HEAD.pack(messages.MAX_FRAME_BYTES + 1, 0), "frame"),
        (HEAD.pack(4 + 3, 0) + b"\xff\xff\xff", "protocol of the link"),
        (HEAD.pack(4 + 1, 0) + b"\x80", "protocol of the link"),
        (messages.encoded(messages.Kill(1)), "protocol of the link"),
        (messages.encoded(messages.RequestRefused(1, "sandbox", "x" * 3000)), "protocol of the link"),
        (messages.encoded(messages.Heard(1, b"x" * (1 << 17))), "protocol of the link"),
        (b"\x00\x00\x00\x01\x00", "protocol of the link"),
    ],
    ids=["too long", "no message", "no tag", "not an agent's", "long reason", "long packet", "no stream"],
)
async def test_wrong_frame_ends_the_link(sent: bytes, why: str) -> None:
    """Its node is lost, and what waits for it fails or goes elsewhere."""
    async with playing() as (nodes, agent):
        raw = sent if sent[:1] == b"\x00" else HEAD.pack(4 + len(sent), 0) + sent
        node = nodes._placement.nodes[0]
        assert agent.link._transport is not None
        agent.link._transport.write(raw)
        await until(lambda: node.link.why_lost is not None)
        assert why in str(node.link.why_lost)
        assert nodes.nodes() == ()


async def test_credit_does_not_grow_beyond_the_window() -> None:
    """An agent that permits more than was sent gets no more under way than a window."""
    async with playing() as (nodes, agent):
        opening, _, start = await opening_repl(nodes, agent)
        for _ in range(10):
            agent.link.post(messages.Credit(start.streams[0], 1 << 50))
        await asyncio.sleep(0.05)
        [end] = nodes._placement.nodes[0].link.streams.values()
        assert vars(end)["_may_send"] == WINDOW_BYTES
        await given_up(opening, agent)


async def test_forged_numbers_reach_nothing() -> None:
    """Workers, requests, streams and keys that were never named are dropped; the REPL that lives goes on opening."""
    async with playing() as (nodes, agent):
        opening, worker, _ = await opening_repl(nodes, agent)
        agent.link.post(messages.Heard(worker + 1000, control.pack(control.Died(exit_code=1))))
        agent.link.post(messages.Gone(worker + 1000))
        agent.link.post(messages.RequestDone(worker + 1000))
        agent.link.post(messages.RequestRefused(worker + 1000, "configuration", "no"))
        agent.link.post(messages.Credit(worker + 1000, 5))
        agent.link.send(worker + 1000, b"bytes")
        agent.link.send(worker + 1000, b"")
        await asyncio.sleep(0.05)
        assert not opening.done()
        assert nodes._placement.nodes[0].link.why_lost is None
        agent.link.post(messages.Heard(worker, control.pack(control.Failed("load", "no memory"))))
        with pytest.raises(Exception, match="no memory"):
            await opening


async def test_bytes_of_no_repl_are_a_broken_repl() -> None:
    """Bytes on a REPL's stream are judged by the broker, as on one machine."""
    async with playing() as (nodes, agent):
        opening, worker, start = await opening_repl(nodes, agent)
        agent.link.post(messages.Heard(worker, control.pack(control.Loaded([]))))
        agent.link.post(messages.Heard(worker, control.pack(control.Started([]))))
        agent.link.send(start.streams[0], b"\x00\x00\x00\x05hello")
        with pytest.raises(Exception, match=r"not valid|malformed|JSON"):
            await opening


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([control.Opened()], "a file of 10 bytes"),
        ([control.Drained()] * 100, "an answer of an init that was not asked"),
        ([control.ProgramEnded(1)], "the end of a program that does not run"),
    ],
    ids=["file", "answers", "program"],
)
async def test_what_was_not_asked_for_ends_the_link(said: list[control.FromInit], why: str) -> None:
    """No caller reads it, so it would pile up here."""
    async with playing() as (nodes, agent):
        opening, worker, _ = await opening_repl(nodes, agent)
        node = nodes._placement.nodes[0]
        for each in said:
            agent.link.post(messages.Heard(worker, control.pack(each), 10))
        await until(lambda: node.link.why_lost is not None)
        assert why in str(node.link.why_lost)
        await given_up(opening, agent)


async def reading_a_file(nodes: LocalNodes, agent: PlayedAgent) -> tuple[Any, int, Node, "asyncio.Task[Any]"]:
    """Open a file in a REPL of the agent's: the opening of the REPL, its worker's number, its node, and the reading."""
    opening, number, _ = await opening_repl(nodes, agent)
    node = nodes._placement.nodes[0]
    worker: Any = node._inits[number].listener
    for each in (control.Loaded([]), control.Started([])):
        agent.link.post(messages.Heard(number, control.pack(each)))
    reading = asyncio.create_task(worker.open_file(control.OpenToRead([b"x"])))
    await agent.next(messages.Say)
    return opening, number, node, reading


async def test_file_that_comes_after_another_answer_ends_the_link() -> None:
    """Its caller has left with an error, and its copy here would stay open."""
    async with playing() as (nodes, agent):
        opening, number, node, reading = await reading_a_file(nodes, agent)
        agent.link.post(messages.Heard(number, control.pack(control.Drained())))
        agent.link.post(messages.Heard(number, control.pack(control.Opened()), 10))
        with pytest.raises(WorkerDied):
            await reading
        await until(lambda: node.link.why_lost is not None)
        assert "a file of 10 bytes" in str(node.link.why_lost)
        await given_up(opening, agent)


async def test_file_that_does_not_come_in_time_gives_the_node_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.nodes.node.CROSS_S", 0.05)
    async with playing() as (nodes, agent):
        opening, number, _, reading = await reading_a_file(nodes, agent)
        agent.link.post(messages.Heard(number, control.pack(control.Opened()), 10))
        with pytest.raises(WorkerDied, match="did not answer within"):
            await reading
        await given_up(opening, agent)


async def test_lie_about_a_level_is_not_believed_by_a_later_node() -> None:
    """The level of all is that of the first node; another one is asked for that level by name."""
    async with playing() as (nodes, _), PlayedAgent.joined(nodes._order("weak"), opens=False) as weak:
        asked = await weak.next(messages.OpenNode)
        weak.link.post(messages.NodeOpened(asked.request, "standard", [], False, 5, 2, 8 << 30, []))
        again = await weak.next(messages.OpenNode)
        assert (asked.isolation, again.isolation) == ("auto", "strict")
        weak.link.post(messages.RequestRefused(again.request, "isolation", "no user namespaces"))
        await until(lambda: weak.link.why_lost is not None)
        assert [node.name for node in nodes.nodes()] == ["played"]


@pytest.mark.parametrize("isolation", ["auto", "strict"])
async def test_node_with_less_isolation_than_was_asked_for_is_refused(isolation: str) -> None:
    """Its level would be asked of all other nodes, and honest ones would give it."""
    nodes = LocalNodes({}, isolation=isolation)
    opening = asyncio.create_task(nodes.__aenter__())
    await until(lambda: nodes._port is not None and nodes._address != ("", 0))
    async with PlayedAgent.joined(nodes._order("liar"), opens=False) as liar:
        asked = await liar.next(messages.OpenNode)
        liar.link.post(messages.NodeOpened(asked.request, "process", [], True, 1, 2, 8 << 30, []))
        await until(lambda: liar.link.why_lost is not None)
    async with PlayedAgent.joined(nodes._order("honest")) as honest:
        await opening
        assert [(node.name, node.level) for node in nodes.nodes()] == [("honest", "strict")]
        assert not any(isinstance(each, messages.OpenNode) for each in honest.got)
        await nodes.aclose()


async def test_cluster_closes_beside_a_node_that_does_not_open() -> None:
    async with playing() as (nodes, _), PlayedAgent.joined(nodes._order("late"), opens=False) as late:
        await late.next(messages.OpenNode)
        await nodes.aclose()
        await until(lambda: late.link.why_lost is not None)


async def test_node_that_does_not_open_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing() as (nodes, _):
        monkeypatch.setattr("rlm_broker.nodes.node.OPEN_S", 0.05)
        async with PlayedAgent.joined(nodes._order("late"), opens=False) as late:
            await until(lambda: late.link.why_lost is not None)


async def test_control_characters_of_an_agent_reach_no_terminal() -> None:
    async with playing() as (nodes, agent):
        opening = asyncio.create_task(nodes.repl().__aenter__())
        asked = await agent.next(messages.Fork)
        agent.link.post(messages.RequestRefused(asked.request, "sandbox", "\x1b[2Jgone"))
        with pytest.raises(SandboxFailed, match="gone") as caught:
            await opening
        assert "\x1b" not in str(caught.value)
        opening, worker, _ = await opening_repl(nodes, agent)
        agent.link.post(messages.Heard(worker, control.pack(control.Failed("load", "\x1b[2Jlost"))))
        with pytest.raises(ContextRefused, match="lost") as refused:
            await opening
        assert "\x1b" not in str(refused.value)


async def test_silent_agent_is_lost() -> None:
    """An agent whose process goes on and whose link is silent counts as lost after two seconds."""
    async with playing() as (nodes, agent):
        opening, _, _ = await opening_repl(nodes, agent)
        node = nodes._placement.nodes[0]
        assert agent.link._timer is not None
        agent.link._timer.cancel()
        await until(lambda: node.link.why_lost is not None)
        assert node.link.why_lost == f"it was silent for {SILENCE_S:g} s"
        await given_up(opening, agent)


async def test_node_that_does_not_end_a_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.nodes.node.END_S", 0.1)
    async with playing() as (nodes, agent):
        agent.ends_workers = False
        opening, _, _ = await opening_repl(nodes, agent)
        node = nodes._placement.nodes[0]
        opening.cancel()
        await asyncio.wait({opening}, timeout=WAIT_S)
        assert "did not end a worker" in str(node.link.why_lost)


async def test_node_that_does_not_fork_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.nodes.node.END_S", 0.1)
    async with playing() as (nodes, agent):
        node = nodes._placement.nodes[0]
        opening = asyncio.create_task(nodes.repl().__aenter__())
        await until(lambda: node.link.why_lost is not None)
        assert node.link.why_lost == "it did not answer within 0.1 s"
        await given_up(opening, agent)


async def test_agent_is_told_to_end_what_a_dead_worker_has_left() -> None:
    """Also where it has said itself that the worker is gone."""
    async with playing() as (nodes, agent):
        opening, worker, _ = await opening_repl(nodes, agent)
        agent.link.post(messages.Gone(worker))
        assert (await agent.next(messages.Kill)).worker == worker
        await given_up(opening, agent)


async def test_node_short_of_memory_gets_no_further_repl(caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat says so; with the next good one a REPL that waits is placed there. It is logged once."""
    async with playing() as (nodes, agent):
        agent.link._beat = lambda: messages.Beat(has_room=False)
        await until(lambda: "the node played gives no REPL: it is short of memory" in caplog.text)
        for times in range(100):
            agent.link.post(messages.Beat(has_room=times % 2 == 0))
        await asyncio.sleep(0.05)
        opening = asyncio.create_task(nodes.repl().__aenter__())
        await until(lambda: nodes._placement.waiting == 1)
        agent.link._beat = messages.Beat
        await agent.next(messages.Fork)
        assert caplog.text.count("gives no REPL") == 1
        await given_up(opening, agent)


async def test_context_without_memory_for_it_goes_elsewhere() -> None:
    """A node that refuses a context is short of memory until its next heartbeat, and the worker is tried anew."""
    async with playing() as (nodes, agent):
        opening = asyncio.create_task(nodes.repl("x" * 100_000).__aenter__())
        tries = 0
        while not opening.done():
            tries += 1
            await agent.forked()
            hold = await agent.next(messages.HoldMemory)
            agent.link.post(messages.RequestRefused(hold.request, "memory", "Cannot allocate memory"))
            await agent.next(messages.Kill)
            await asyncio.sleep(0.05)
        assert tries == 3
        with pytest.raises(WorkerDied, match=r"Cannot allocate memory \(on the node played\)"):
            await opening


def test_messages_are_what_their_decoders_take() -> None:
    """No message of one side is one of the other's, but for credit and heartbeat."""
    for message, decoder in ((messages.Gone(1), messages.from_orchestrator), (messages.Kill(1), messages.from_agent)):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(messages.encoded(message))
