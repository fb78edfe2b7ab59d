"""Links and streams between two ends in one event loop, over a real connection."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlm_broker.nodes import link, messages
from rlm_broker.nodes.link import HIGH_BYTES, Link
from rlm_broker.nodes.streams import WINDOW_BYTES, DescriptorEnd, FileEnd, send_file
from tests.support.clock import Clock
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def linked(*, is_patient: bool = False) -> AsyncIterator[tuple[Link, Link]]:
    """The orchestrator's end of a link, and the agent's."""
    ours = Link(messages.from_agent, lambda _: None, lambda _: None)
    theirs = Link(messages.from_orchestrator, lambda _: None, lambda _: None, is_patient=is_patient)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ours, "127.0.0.1", 0)
    async with server:
        await loop.create_connection(lambda: theirs, *server.sockets[0].getsockname())
        await until(lambda: ours._transport is not None)
        try:
            yield ours, theirs
        finally:
            ours.close("over")
            theirs.close("over")


def ends(ours: Link, theirs: Link, number: int = 1) -> tuple[socket.socket, socket.socket]:
    """A stream between two sockets that the test holds."""
    one, at_ours = socket.socketpair()
    other, at_theirs = socket.socketpair()
    DescriptorEnd(ours, number, at_ours.detach())
    DescriptorEnd(theirs, number, at_theirs.detach())
    for each in (one, other):
        each.setblocking(False)
    return one, other


async def test_bytes_go_both_ways_and_the_end_follows_them() -> None:
    loop = asyncio.get_running_loop()
    async with linked() as (ours, theirs):
        one, other = ends(ours, theirs)
        data = os.urandom(3 << 20)

        async def received(by: socket.socket) -> bytes:
            whole = b""
            while piece := await loop.sock_recv(by, 1 << 16):
                whole += piece
            return whole

        reading = asyncio.create_task(received(other))
        await loop.sock_sendall(one, data)
        await loop.sock_sendall(other, b"back")
        assert await loop.sock_recv(one, 100) == b"back"
        one.close()
        assert await reading == data
        await until(lambda: not ours.streams and not theirs.streams)
        other.close()


async def test_stream_that_is_not_read_stops_its_sender_alone() -> None:
    """No more than a window is under way, and another stream of the link goes on."""
    loop = asyncio.get_running_loop()
    async with linked() as (ours, theirs):
        one, other = ends(ours, theirs, 1)
        free, there = ends(ours, theirs, 2)
        sending = asyncio.create_task(loop.sock_sendall(one, bytes(8 << 20)))
        [stuck, _] = [vars(end) for end in ours.streams.values()]
        await until(lambda: stuck["_may_send"] == 0)
        await loop.sock_sendall(free, b"x")
        assert await loop.sock_recv(there, 10) == b"x"
        assert not sending.done()
        sending.cancel()
        for each in (one, other, free, there):
            each.close()


async def test_more_bytes_than_the_window_end_the_link() -> None:
    async with linked() as (ours, theirs):
        one, other = ends(ours, theirs)
        for _ in range(WINDOW_BYTES * 8 // messages.PIECE_BYTES):
            theirs.send(1, bytes(messages.PIECE_BYTES))
        await until(lambda: ours.why_lost is not None)
        assert "not permitted" in str(ours.why_lost)
        one.close()
        other.close()


async def test_lost_link_closes_all_descriptors() -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    async with linked() as (ours, theirs):
        held = [ends(ours, theirs, number) for number in range(1, 6)]
        ours.close("it was cut")
        await until(lambda: theirs.why_lost is not None)
        for pair in held:
            for each in pair:
                assert await asyncio.get_running_loop().sock_recv(each, 1) == b""
                each.close()
        late, at_theirs = socket.socketpair()
        DescriptorEnd(theirs, 9, at_theirs.detach())
        assert late.recv(1) == b""
        late.close()
    await until(lambda: len([*Path("/proc/self/fd").iterdir()]) <= before)


async def test_file_arrives_whole_and_messages_pass_it() -> None:
    """While a large file is sent, no more than some of its pieces are ahead of a message."""
    async with linked() as (ours, theirs):
        source, target = os.memfd_create("source"), os.memfd_create("target")
        data = os.urandom(24 << 20)
        os.write(source, data)
        end = FileEnd(theirs, 7, os.dup(target), len(data))
        sending = asyncio.create_task(send_file(ours, 7, source, len(data)))
        most = 0
        while not sending.done():
            assert ours._transport is not None
            most = max(most, ours._transport.get_write_buffer_size())
            await asyncio.sleep(0)
        assert await end.filled is None
        assert os.pread(target, len(data), 0) == data
        assert most <= HIGH_BYTES + messages.PIECE_BYTES + 100
        os.close(target)


@pytest.mark.parametrize("how", ["too long", "lost", "full"])
async def test_file_that_does_not_arrive_is_an_error(how: str) -> None:
    async with linked() as (ours, theirs):
        fd = os.open("/dev/full", os.O_WRONLY) if how == "full" else os.memfd_create("target")
        end = FileEnd(theirs, 7, fd, 10)
        if how == "too long":
            ours.send(7, bytes(11))
        elif how == "lost":
            ours.close("cut")
        else:
            ours.send(7, bytes(5))
            ours.send(7, b"")
        error = await end.filled
        assert isinstance(error, OSError)
        assert (how == "full") == (error.errno is not None)
        assert (how == "full") == (theirs.why_lost is None)


# -- silence -----------------------------------------------------------------------------------------------------------


def mute(side: Link) -> None:
    """Let a side send no heartbeat any more."""
    assert side._timer is not None
    side._timer.cancel()


async def test_silent_side_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.2)
    async with linked() as (ours, theirs):
        mute(theirs)
        await until(lambda: ours.why_lost is not None)
        assert ours.why_lost == "it was silent for 0.2 s"


async def test_agent_is_patient_with_a_busy_orchestrator_but_not_behind_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.2)
    async with linked(is_patient=True) as (ours, theirs):
        mute(ours)
        heard = theirs._heard
        await until(lambda: asyncio.get_running_loop().time() - heard > 0.6)
        assert theirs.why_lost is None
        monkeypatch.setattr(theirs, "_is_acknowledged", lambda: False)  # as behind a cut
        await until(lambda: theirs.why_lost is not None)


async def test_time_in_which_this_process_stood_still_is_no_silence(clock: Clock) -> None:
    """A process that was stopped, or a machine that slept, judges the other side by what comes afterwards."""
    async with linked() as (ours, theirs):
        clock.forward(100)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (ours.why_lost, theirs.why_lost) == (None, None)
