"""`AsyncResource`: its loop, and openings and closings whose callers are cancelled, interrupted or gone."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import anyio
import pytest

from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.errors import SandboxFailed
from tests.support.tables import table
from tests.support.waiting import WAIT_S, turns, until, until_now


class Thing(AsyncResource):
    """Notes what happens to it. Opening waits for `may_open`, closing takes some turns of the loop."""

    def __init__(self, is_held: bool = False) -> None:
        self.story: list[str] = []
        self.opening, self.may_open = threading.Event(), threading.Event()
        if not is_held:
            self.may_open.set()
        self.is_deaf = self.fails = False

    async def begun(self) -> "asyncio.Task[Thing]":
        """Return an opening, once it is under way."""
        opening = asyncio.create_task(self.__aenter__())
        await until(self.opening.is_set)
        return opening

    async def _open(self) -> None:
        self.story.append("opens")
        self.opening.set()
        while not self.may_open.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                if not self.is_deaf:
                    raise
        if self.fails:
            raise SandboxFailed("no")
        self.story.append("opened")

    async def _close(self) -> None:
        await turns()
        self.story.append("closed")


class Interrupted(BaseException):
    """Exception that a signal handler of the user raises."""


class Interrupts:
    """Interrupts of the main thread, each of which is raised before the next one is sent."""

    def __init__(self) -> None:
        self._raised = threading.Semaphore(0)

    def on_signal(self, *_: object) -> None:
        self._raised.release()
        raise Interrupted

    def then(self, is_time: Callable[[], object], times: int, call: Callable[[], object]) -> threading.Thread:
        """Interrupt the main thread when it is time, and then make a call."""

        def send() -> None:
            until_now(is_time)
            for _ in range(times):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                assert self._raised.acquire(timeout=WAIT_S)
            call()

        sender = threading.Thread(target=send)
        sender.start()
        return sender


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    made = Interrupts()
    before = signal.signal(signal.SIGUSR1, made.on_signal)
    yield made
    signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def held_up(loop: EventLoopRef) -> Iterator[threading.Event]:
    """Keep a loop busy inside the block, or until the event."""
    is_busy, ends = threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        ends.wait(WAIT_S)

    loop.call_soon(be_busy)
    assert is_busy.wait(WAIT_S)
    try:
        yield ends
    finally:
        ends.set()


# -- its loop ------------------------------------------------------------------------------------------------------------


async def loop_of() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_object_stays_on_its_loop() -> None:
    there, here = Thing(), Thing()
    with there:
        assert there.bind_loop() is EventLoopRef.background()
    async with here:
        assert await here.bind_loop().arun(loop_of()) is asyncio.get_running_loop()
    assert there.story == here.story == ["opens", "opened", "closed"]


@table("end", ["closed", "failed", "cancelled", "lent"])
def test_object_may_be_opened_again_on_another_loop(end: str) -> None:
    """A loop that has ended does not keep an object, however its opening there has ended."""
    thing = Thing()

    async def first() -> None:
        thing.fails = end == "failed"
        if end == "cancelled":
            thing.may_open.clear()
            opening = asyncio.create_task(thing.__aenter__())
            await until(thing.opening.is_set)
            opening.cancel()
            await asyncio.wait({opening})
            return
        with contextlib.suppress(SandboxFailed):
            async with thing.borrowed() if end == "lent" else thing:
                pass

    async def second() -> None:
        thing.fails = False
        thing.may_open.set()
        async with thing:
            assert await thing.bind_loop().arun(loop_of()) is asyncio.get_running_loop()

    asyncio.run(first())
    assert thing.event_loop is None
    asyncio.run(second())
    assert thing.story[-3:] == ["opens", "opened", "closed"]


# -- openings ------------------------------------------------------------------------------------------------------------


async def test_opening_that_fails_is_taken_back() -> None:
    thing = Thing()
    thing.fails = True
    with pytest.raises(SandboxFailed):
        await thing.__aenter__()
    assert (thing.story, thing.is_open) == (["opens", "closed"], False)


@pytest.mark.parametrize("is_here", [True, False])
async def test_opening_that_succeeds_for_a_cancelled_caller_is_closed(is_here: bool) -> None:
    thing = Thing(is_held=True)
    thing.is_deaf = True
    if not is_here:
        thing.bind_loop()
    opening = await thing.begun()
    opening.cancel()
    await turns()
    thing.may_open.set()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert (thing.story[-1], thing.is_open) == ("closed", False)


def test_opening_that_succeeds_for_an_interrupted_caller_is_closed(interrupts: Interrupts) -> None:
    thing = Thing(is_held=True)
    thing.is_deaf = True
    sender = interrupts.then(thing.opening.is_set, 1, thing.may_open.set)
    with pytest.raises(Interrupted):
        thing.__enter__()
    sender.join()
    assert (thing.story[-1], thing.is_open) == ("closed", False)


async def test_close_overtakes_an_opening() -> None:
    thing = Thing(is_held=True)
    opening = await thing.begun()
    await thing.aclose()
    with pytest.raises(SandboxFailed, match="closed while it was being opened"):
        await opening
    assert (thing.story[-1], thing.is_open, thing.event_loop) == ("closed", False, None)


async def test_second_caller_waits_for_the_opening_of_the_first() -> None:
    """Callers that enter at the same time open once. One that is cancelled closes nothing of the other's."""
    thing = Thing(is_held=True)
    first = await thing.begun()
    second, third = (asyncio.create_task(thing.__aenter__()) for _ in range(2))
    await turns()
    third.cancel()
    await asyncio.wait({third})
    thing.may_open.set()
    await first
    await second
    assert (thing.story, thing.is_open) == (["opens", "opened"], True)
    await thing.aclose()


# -- closings ------------------------------------------------------------------------------------------------------------


@table("late_turns", range(12))
async def test_scope_that_cancels_at_each_await_leaves_nothing_open(late_turns: int) -> None:
    """anyio cancels again at each await, also at those of `__aexit__`."""
    thing, loop = Thing(), asyncio.get_running_loop()
    thing.bind_loop()

    def cancel_in(left: int) -> None:
        if left:
            loop.call_soon(cancel_in, left - 1)
        else:
            scope.cancel()

    with anyio.CancelScope() as scope:
        cancel_in(late_turns)
        async with thing:
            await asyncio.sleep(WAIT_S)
    assert not thing.is_open
    assert thing.story.count("opens") == thing.story.count("closed")


async def test_close_that_is_cancelled_beside_a_busy_loop_goes_on() -> None:
    thing = Thing()
    with thing:
        with held_up(thing.bind_loop()):
            closing = asyncio.create_task(thing.aclose())
            await turns()
            closing.cancel()
            await turns()
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert (thing.story[-1], thing.is_open) == ("closed", False)


@pytest.mark.parametrize("times", [1, 2])
def test_close_that_is_interrupted_goes_on(interrupts: Interrupts, times: int) -> None:
    """An interrupt waits for the end of the closing. A second one gives up waiting, and the closing goes on."""
    thing = Thing()
    thing.__enter__()
    loop = thing.bind_loop()
    with held_up(loop) as ends:
        let_go = ends.set if times == 1 else lambda: None
        has_begun = lambda: "CleanUp._start" in str(list(loop._loop._ready))  # type: ignore[attr-defined]  # noqa: E731
        sender = interrupts.then(has_begun, times, let_go)
        with pytest.raises(Interrupted):
            thing.close()
        assert thing.is_open is (times == 2)
    sender.join()
    until_now(lambda: thing.story[-1] == "closed")
    assert not thing.is_open


def test_closing_outlives_the_end_of_asyncio_run() -> None:
    """`asyncio.run` cancels all tasks of its loop when it ends, and waits for a closing that goes on."""
    thing = Thing()

    async def leave_it() -> None:
        await thing.__aenter__()
        closing = asyncio.create_task(thing.aclose())
        await asyncio.sleep(0)
        assert not closing.done()

    asyncio.run(leave_it())
    assert (thing.story[-1], thing.is_open) == ("closed", False)


async def test_last_borrower_closes_what_its_owner_has_not_opened() -> None:
    thing = Thing()
    async with thing.borrowed():
        async with thing.borrowed():
            assert thing.is_open
        assert thing.is_open
    assert not thing.is_open
    async with thing:
        async with thing.borrowed():
            pass
        assert thing.is_open
    async with contextlib.AsyncExitStack() as owner:
        async with thing.borrowed():
            await owner.enter_async_context(thing)
        assert thing.is_open
    assert not thing.is_open
