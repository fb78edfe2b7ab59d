"""Contexts of a node: fetched once, checked, bounded, shared."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from rlm_broker.cluster.agent import contexts as module
from rlm_broker.cluster.agent.contexts import Arrival, Contexts
from rlm_broker.cluster.described import context_spec
from rlm_broker.cluster.messages import ContextSpec, Need, NoContext, Piece
from rlm_broker.context.store import store
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ContextRefused, SandboxFailed
from sandbox_worker.loading.form import SEALS
from tests.support.fds import memfds
from tests.support.links import linked

PART = 1_000


@dataclass
class Store:
    """The contexts of an orchestrator, and what a node has asked for."""

    known: dict[str, StoredContext] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)

    def add(self, value: object) -> ContextSpec:
        stored = store(value)
        spec = context_spec(stored)
        self.known[spec.digest] = stored
        return spec

    def pieces(self, digest: str) -> Iterator[tuple[Piece, bytes]]:
        data = b"".join(os.pread(fd, piece.form.size_bytes, 0) for fd, piece in self.known[digest].pieces())
        return ((Piece(digest, at), data[at : at + PART]) for at in range(0, len(data), PART))


@contextlib.asynccontextmanager
async def fetching(max_bytes: int | None = None, *, sends: bool = True) -> AsyncIterator[tuple[Contexts, Store]]:
    """Contexts of a node whose orchestrator sends what is asked for."""
    source = Store()
    async with linked() as (at_broker, at_agent):
        contexts = Contexts(at_agent, max_bytes)

        async def send() -> None:
            async for message, _ in at_broker.receive():
                if isinstance(message, Need):
                    source.needs.append(message.digest)
                    if not sends:
                        at_broker.post(NoContext(message.digest))
                    else:
                        for piece, data in source.pieces(message.digest):
                            await at_broker.send(piece, data)

        async def take() -> None:
            async for message, data in at_agent.receive():
                if isinstance(message, Piece):
                    contexts.take(message, data or b"")
                elif isinstance(message, NoContext):
                    contexts.missing(message)

        tasks = [asyncio.create_task(send()), asyncio.create_task(take())]
        yield contexts, source
        await contexts.aclose()
        at_broker.close()
        await asyncio.wait(tasks)


async def value_of(contexts: Contexts, spec: ContextSpec) -> Any:
    async with contexts.held(spec) as context:
        return context.value()


@pytest.mark.parametrize(
    "value",
    ["", "text " * 5_000, "a\U0001f600" * 3_000, {"a": 1, "b": ["x"]}, ["x" * 2_000, "ü" * 2_000], 7, None],
)
async def test_a_context_arrives_as_it_was(value: object) -> None:
    """Each form of context is equal on the node, with its facts, in sealed memory."""
    async with fetching() as (contexts, source):
        spec = source.add(value)
        async with contexts.held(spec) as context:
            assert context.value() == value
            assert context.info == source.known[spec.digest].info
            assert all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS for fd, _ in context.pieces())


async def test_a_context_of_several_pieces_arrives() -> None:
    """A dict with stored contexts in it keeps its parts in memfds of their own."""
    async with fetching() as (contexts, source):
        with store("shared " * 1_000) as shared:
            spec = source.add({"a": shared, "b": "own " * 700})
        assert len(spec.pieces) == 2
        assert await value_of(contexts, spec) == {"a": "shared " * 1_000, "b": "own " * 700}


async def test_runs_share_what_was_fetched_once() -> None:
    """Runs at the same time, and later ones, ask for no second copy."""
    async with fetching() as (contexts, source):
        spec = source.add("text " * 5_000)
        values = await asyncio.gather(*(value_of(contexts, spec) for _ in range(5)))
        assert [*values, await value_of(contexts, spec)] == ["text " * 5_000] * 6
        assert source.needs == [spec.digest]


async def test_equal_bytes_may_have_other_facts() -> None:
    """A run gets the facts of its own request, such as the names of files."""
    async with fetching() as (contexts, source):
        spec = source.add("text")
        other = msgspec.structs.replace(spec, info={**spec.info, "parts": [["a.txt", 4]], "parts_total": 1})
        async with contexts.held(spec) as one, contexts.held(other) as two:
            assert (one.info.parts, two.info.parts) == ((), (("a.txt", 4),))
            assert two.value() == "text"
        assert len(source.needs) == 1


async def test_the_least_recently_used_goes_first() -> None:
    """Beyond the bound a context without a run goes; one with a run stays."""
    async with fetching(25_000) as (contexts, source):
        a, b, c = (source.add(letter * 10_000) for letter in "abc")
        for spec in (a, b, a, c, a):
            await value_of(contexts, spec)
        assert source.needs == [a.digest, b.digest, c.digest]
        await value_of(contexts, b)
        assert source.needs[3:] == [b.digest]
        async with contexts.held(a), contexts.held(b), contexts.held(c):
            assert contexts.size_bytes > 25_000
        assert contexts.size_bytes <= 25_000


async def test_a_damaged_context_reaches_no_run() -> None:
    """Bytes of another digest are refused, and leave no memory behind."""
    async with fetching() as (contexts, source):
        spec, other = source.add("right"), source.add("wrong")
        right, source.known[spec.digest] = source.known[spec.digest], source.known[other.digest]
        before = memfds("context")
        with pytest.raises(SandboxFailed, match="its digest is another one"):
            await value_of(contexts, spec)
        assert (memfds("context"), contexts.size_bytes) == (before, 0)
        right.close()


async def test_a_context_that_is_gone_is_refused_and_asked_again() -> None:
    """The next run asks again."""
    async with fetching(sends=False) as (contexts, source):
        spec = source.add("text")
        for _ in range(2):
            with pytest.raises(SandboxFailed, match="does not have the context"):
                await value_of(contexts, spec)
        assert source.needs == [spec.digest] * 2


async def test_pieces_out_of_order_are_refused() -> None:
    async with linked() as (_, at_agent):
        contexts = Contexts(at_agent)
        source = Store()
        spec = source.add("text " * 1_000)
        waiting = asyncio.create_task(value_of(contexts, spec))
        await asyncio.sleep(0)
        (_, first), (second, data), *_ = source.pieces(spec.digest)
        contexts.take(Piece("unknown", 0), first)
        contexts.take(second, data)
        with pytest.raises(SandboxFailed, match="out of order: byte 1,000 came, and 0 was next"):
            await waiting
        contexts.take(second, data)  # what still comes has no effect
        await contexts.aclose()


async def test_a_context_without_memory_fails_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node says that it has no room, so that the run goes elsewhere."""
    async with fetching() as (contexts, source):
        monkeypatch.setattr(module, "free_bytes", lambda: 1_000)
        with pytest.raises(SandboxFailed, match="no memory for a context of 5,008 bytes"):
            await value_of(contexts, source.add("x" * 5_000))
        assert source.needs == []


async def test_a_context_that_does_not_come_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for bytes has an end."""
    monkeypatch.setattr(module, "STALL_S", 0.05)
    async with linked() as (_, at_agent):
        contexts, source = Contexts(at_agent), Store()
        with pytest.raises(SandboxFailed, match="sent nothing of a context"):
            await value_of(contexts, source.add("text"))
        await contexts.aclose()


async def test_closing_ends_what_is_on_its_way() -> None:
    """Waiting runs are ended, and no descriptor stays."""
    async with linked() as (_, at_agent):
        contexts, source = Contexts(at_agent), Store()
        before = memfds("context")
        with store("text") as stored:
            waiting = asyncio.create_task(value_of(contexts, context_spec(stored)))
            await asyncio.sleep(0)
            await contexts.aclose()
            await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert memfds("context") == before
        assert source.needs == []


def test_a_contradicting_description_is_refused() -> None:
    with store("text") as stored:
        spec = context_spec(stored)
    for wrong in (msgspec.structs.replace(spec, size_bytes=3), msgspec.structs.replace(spec, pieces=(), size_bytes=0)):
        with pytest.raises(ContextRefused, match="contradicts itself"):
            Arrival(wrong)
