"""An agent that lies: it ends its own link, or its own REPLs, and reaches nothing else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rlm_broker import ContextRefused, SandboxFailed, WorkerDied
from rlm_broker.nodes import link, messages
from rlm_broker.nodes.agent import refusal
from rlm_broker.nodes.link import HEAD
from rlm_broker.nodes.streams import WINDOW_BYTES
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire import control
from tests.support.nodes import LocalNodes, PlayedAgent
from tests.support.waiting import WAIT_S, until


class Play:
    """A cluster whose one node is played by the test. `worker` and `streams` are those of the last REPL."""

    def __init__(self, nodes: LocalNodes, agent: PlayedAgent) -> None:
        self.nodes = nodes
        self.node = nodes._placement.nodes[0]
        self.agent = agent
        self.worker = 0
        self.streams: tuple[int, ...] = ()
        self._openings: list[asyncio.Task[SandboxedRepl]] = []

    def opening(self, context: str = "") -> "asyncio.Task[SandboxedRepl]":
        """Begin to open a REPL. It is cancelled at the end of the play."""
        self._openings.append(asyncio.create_task(self.nodes.repl(context or None).__aenter__()))
        return self._openings[-1]

    async def forked(self) -> "asyncio.Task[SandboxedRepl]":
        """Open a REPL up to the `Start` of its worker, and return the opening."""
        opening = self.opening()
        self.worker = await self.agent.forked()
        load, start = await self.agent.next(messages.Say), await self.agent.next(messages.Say)
        assert isinstance(control.unpack_to_init(load.packet), control.Load)
        assert isinstance(control.unpack_to_init(start.packet), control.Start)
        self.streams = start.streams
        return opening

    def say(self, *said: control.FromInit, size_bytes: int = 0) -> None:
        """Be the init of the worker."""
        for each in said:
            self.agent.link.post(messages.Heard(self.worker, control.pack(each), size_bytes))

    async def is_lost(self, why: str) -> None:
        """Wait until the node is lost, for a reason with these words."""
        await until(lambda: self.node.link.why_lost is not None)
        assert why in str(self.node.link.why_lost)

    async def close(self) -> None:
        """End the link, the openings and the cluster."""
        self.agent.link.close("the test is over")
        for opening in self._openings:
            opening.cancel()
        if self._openings:
            await asyncio.wait(self._openings, timeout=WAIT_S)
        await self.nodes.aclose()


async def listening(**given: Any) -> "tuple[LocalNodes, asyncio.Task[Any]]":
    """A cluster without a node, and its opening."""
    nodes = LocalNodes({}, **given)
    opening = asyncio.create_task(nodes.__aenter__())
    await until(lambda: nodes._port is not None and nodes._address != ("", 0))
    return nodes, opening


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    nodes, opening = await listening()
    async with PlayedAgent.joined(nodes._order("played")) as agent:
        await opening
        play = Play(nodes, agent)
        yield play
        await play.close()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD.pack(messages.MAX_FRAME_BYTES + 1, 0),
        HEAD.pack(4 + 3, 0) + b"\xff\xff\xff",
        HEAD.pack(4 + 1, 0) + b"\x80",
        messages.encoded(messages.Kill(1)),
        messages.encoded(messages.RequestRefused(1, "sandbox", "x" * 3000)),
        messages.encoded(messages.Heard(1, b"x" * (1 << 17))),
        b"\x00\x00\x00\x01\x00",
    ],
    ids=["too long", "no message", "no tag", "not an agent's", "long reason", "long packet", "no stream"],
)
async def test_wrong_frame_ends_the_link(play: Play, sent: bytes) -> None:
    """Its node is lost, and what waits for it fails or goes elsewhere."""
    assert play.agent.link._transport is not None
    play.agent.link._transport.write(sent if sent[:1] == b"\x00" else HEAD.pack(4 + len(sent), 0) + sent)
    await play.is_lost("it broke the protocol of the link: ")
    assert play.nodes.nodes() == ()


async def test_credit_does_not_grow_beyond_the_window(play: Play) -> None:
    """An agent that permits more than was sent gets no more under way than a window."""
    await play.forked()
    for _ in range(10):
        play.agent.link.post(messages.Credit(play.streams[0], 1 << 50))
    await asyncio.sleep(0.05)
    [end] = play.node.link.streams.values()
    assert vars(end)["_may_send"] == WINDOW_BYTES


async def test_forged_numbers_reach_nothing(play: Play) -> None:
    """Workers, requests, streams and keys that were never named are dropped; the REPL that lives goes on opening."""
    opening = await play.forked()
    link, forged = play.agent.link, play.worker + 1000
    link.post(messages.Heard(forged, control.pack(control.Died(exit_code=1))))
    link.post(messages.Gone(forged))
    link.post(messages.RequestDone(forged))
    link.post(messages.RequestRefused(forged, "configuration", "no"))
    link.post(messages.Credit(forged, 5))
    link.send(forged, b"bytes")
    link.send(forged, b"")
    await asyncio.sleep(0.05)
    assert not opening.done()
    assert play.node.link.why_lost is None
    play.say(control.Failed("load", "no memory"))
    with pytest.raises(Exception, match="no memory"):
        await opening


async def test_bytes_of_no_repl_are_a_broken_repl(play: Play) -> None:
    """Bytes on a REPL's stream are judged by the broker, as on one machine."""
    opening = await play.forked()
    play.say(control.Loaded([]), control.Started([]))
    play.agent.link.send(play.streams[0], b"\x00\x00\x00\x05hello")
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
async def test_what_was_not_asked_for_ends_the_link(play: Play, said: list[control.FromInit], why: str) -> None:
    """No caller reads it, so it would pile up here."""
    await play.forked()
    play.say(*said, size_bytes=10)
    await play.is_lost(why)


async def reading_a_file(play: Play) -> "asyncio.Task[Any]":
    """Open a file in a REPL of the agent's, and return the reading."""
    await play.forked()
    worker: Any = play.node._inits[play.worker].listener
    play.say(control.Loaded([]), control.Started([]))
    reading = asyncio.create_task(worker.open_file(control.OpenToRead([b"x"])))
    await play.agent.next(messages.Say)
    return reading


async def test_file_that_comes_after_another_answer_ends_the_link(play: Play) -> None:
    """Its caller has left with an error, and its copy here would stay open."""
    reading = await reading_a_file(play)
    play.say(control.Drained(), control.Opened(), size_bytes=10)
    with pytest.raises(WorkerDied):
        await reading
    await play.is_lost("a file of 10 bytes")


async def test_file_that_does_not_come_in_time_gives_the_node_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.nodes.node.CROSS_S", 0.05)
    reading = await reading_a_file(play)
    play.say(control.Opened(), size_bytes=10)
    with pytest.raises(WorkerDied, match="did not answer within"):
        await reading


async def test_lie_about_a_level_is_not_believed_by_a_later_node(play: Play) -> None:
    """The level of all is that of the first node; another one is asked for that level by name."""
    async with PlayedAgent.joined(play.nodes._order("weak"), opens=False) as weak:
        asked = await weak.next(messages.OpenNode)
        weak.link.post(messages.NodeOpened(asked.request, "standard", [], False, 5, 2, 8 << 30, []))
        again = await weak.next(messages.OpenNode)
        assert (asked.isolation, again.isolation) == ("auto", "strict")
        weak.link.post(messages.RequestRefused(again.request, "isolation", "no user namespaces"))
        await until(lambda: weak.link.why_lost is not None)
        assert [node.name for node in play.nodes.nodes()] == ["played"]


@pytest.mark.parametrize("isolation", ["auto", "strict"])
async def test_node_with_less_isolation_than_was_asked_for_is_refused(isolation: str) -> None:
    """Its level would be asked of all other nodes, and honest ones would give it."""
    nodes, opening = await listening(isolation=isolation)
    async with PlayedAgent.joined(nodes._order("liar"), opens=False) as liar:
        asked = await liar.next(messages.OpenNode)
        liar.link.post(messages.NodeOpened(asked.request, "process", [], True, 1, 2, 8 << 30, []))
        await until(lambda: liar.link.why_lost is not None)
    async with PlayedAgent.joined(nodes._order("honest")) as honest:
        await opening
        assert [(node.name, node.level) for node in nodes.nodes()] == [("honest", "strict")]
        assert not any(isinstance(each, messages.OpenNode) for each in honest.got)
        await nodes.aclose()


async def test_node_that_does_not_open_is_given_up_in_time_and_with_the_cluster(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PlayedAgent.joined(play.nodes._order("late"), opens=False) as late:
        await late.next(messages.OpenNode)
        with monkeypatch.context() as patched:
            patched.setattr("rlm_broker.nodes.node.OPEN_S", 0.05)
            async with PlayedAgent.joined(play.nodes._order("later"), opens=False) as later:
                await until(lambda: later.link.why_lost is not None)
        assert late.link.why_lost is None
        await play.nodes.aclose()
        await until(lambda: late.link.why_lost is not None)


async def test_control_characters_of_an_agent_reach_no_terminal(play: Play) -> None:
    opening = play.opening()
    asked = await play.agent.next(messages.Fork)
    play.agent.link.post(messages.RequestRefused(asked.request, "sandbox", "\x1b[2Jgone"))
    with pytest.raises(SandboxFailed, match="gone") as caught:
        await opening
    assert "\x1b" not in str(caught.value)
    opening = await play.forked()
    play.say(control.Failed("load", "\x1b[2Jlost"))
    with pytest.raises(ContextRefused, match="lost") as refused:
        await opening
    assert "\x1b" not in str(refused.value)


async def test_silent_agent_is_lost(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its process goes on."""
    monkeypatch.setattr(link, "SILENCE_S", 0.2)
    assert play.agent.link._timer is not None
    play.agent.link._timer.cancel()
    await play.is_lost("it was silent for 0.2 s")


async def test_node_that_neither_forks_nor_ends_a_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_broker.nodes.node.END_S", 0.1)
    for is_forked, why in ((False, "it did not answer within 0.1 s"), (True, "it did not end a worker within 0.1 s")):
        nodes, opened = await listening()
        async with PlayedAgent.joined(nodes._order("played")) as agent:
            await opened
            play, agent.ends_workers = Play(nodes, agent), False
            if is_forked:
                (await play.forked()).cancel()
            else:
                play.opening()
            await play.is_lost(why)
            await play.close()


async def test_agent_is_told_to_end_what_a_dead_worker_has_left(play: Play) -> None:
    """Also where it has said itself that the worker is gone."""
    await play.forked()
    play.agent.link.post(messages.Gone(play.worker))
    assert (await play.agent.next(messages.Kill)).worker == play.worker


async def test_node_short_of_memory_gets_no_further_repl(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat says so; with the next good one a REPL that waits is placed there. It is logged once."""
    link = play.agent.link
    link._beat = lambda: messages.Beat(has_room=False)
    await until(lambda: "the node played gives no REPL: it is short of memory" in caplog.text)
    for times in range(100):
        link.post(messages.Beat(has_room=times % 2 == 0))
    await asyncio.sleep(0.05)
    play.opening()
    await until(lambda: play.nodes._placement.waiting == 1)
    link._beat = messages.Beat
    await play.agent.next(messages.Fork)
    assert caplog.text.count("gives no REPL") == 1


async def test_context_without_memory_for_it_goes_elsewhere(play: Play) -> None:
    """A node that refuses a context is short of memory until its next heartbeat, and the worker is tried anew."""
    opening = play.opening("x" * 100_000)
    tries = 0
    while not opening.done():
        tries += 1
        await play.agent.forked()
        hold = await play.agent.next(messages.HoldMemory)
        play.agent.link.post(messages.RequestRefused(hold.request, "memory", "Cannot allocate memory"))
        await play.agent.next(messages.Kill)
        await asyncio.sleep(0.05)
    assert tries == 3
    with pytest.raises(WorkerDied, match=r"Cannot allocate memory \(on the node played\)"):
        await opening


def test_errors_of_a_node_keep_their_class() -> None:
    """Also a class that is a kind of another one: a refused context is a refused argument."""
    kinds = {kind: refusal(1, cls("no")).kind for kind, cls in messages.ERRORS.items() if kind != "memory"}
    assert kinds == {kind: kind for kind in kinds}
    assert refusal(1, OSError(12, "no")).kind == "memory"


def test_messages_are_what_their_decoders_take() -> None:
    """No message of one side is one of the other's, but for credit and heartbeat."""
    for message, decoder in ((messages.Gone(1), messages.from_orchestrator), (messages.Kill(1), messages.from_agent)):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(messages.encoded(message))
