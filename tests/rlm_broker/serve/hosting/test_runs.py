"""Runs of many owners: places, fairness, followers, money, and the end of all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rlm_broker import RLM, ConfigurationError, LMReply, LMRequest, RunCancelled, ScriptedClient, Usage
from rlm_broker.events.event import CallStarted, RunEnded
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.serve.hosting.owner import Busy, MoneySpent, NotAllowed, Owner, UnknownHandle
from rlm_broker.serve.hosting.runs import HostedRun, HostedRuns, RunState
from tests.support.stand_ins import Gate
from tests.support.waiting import until

ANN, BOB = Owner("ann"), Owner("bob")
LOOK = "A first guess: 7.\n```repl\nprint(context)\n```"


def state(hosted: HostedRun) -> RunState:
    """Return the state as mypy cannot foresee it."""
    return hosted.state


@contextlib.asynccontextmanager
async def hosting(sandbox: Sandbox, model: object, **settings: object) -> AsyncIterator[HostedRuns]:
    async with RLM(model, sandbox=sandbox) as rlm:  # type: ignore[arg-type]
        runs = HostedRuns(rlm, **settings)  # type: ignore[arg-type]
        try:
            yield runs
        finally:
            await runs.drain(0)


async def test_run_is_answered_and_kept_for_its_owner(open_sandbox: Sandbox) -> None:
    """The run is known as paid from its first call."""
    async with hosting(open_sandbox, ScriptedClient(["FINAL(yes)"])) as runs:
        hosted = runs.begin(ANN, "text", "Is it?")
        assert (state(hosted), hosted.is_paid) == ("queued", False)
        async with hosted.joined():
            async for event in hosted.run.events():
                assert hosted.is_paid or not isinstance(event, CallStarted)
            assert (await hosted.completion()).response == "yes"
        assert state(hosted) == "ended"
        assert runs.get(ANN, hosted.id) is hosted
        assert runs.of(ANN) == [hosted]
        assert not runs.of(BOB)
        with pytest.raises(UnknownHandle, match="there is no run"):
            runs.get(BOB, hosted.id)
        assert [event async for event in hosted.run.events()][-1].__class__ is RunEnded


async def test_places_go_round_the_owners(open_sandbox: Sandbox) -> None:
    """An owner with many requests delays another owner by one run, and not by all of them."""
    gate = Gate()
    async with hosting(open_sandbox, gate, max_runs=1) as runs:
        anns = [runs.begin(ANN, "text", f"ann {number}") for number in range(5)]
        await until(lambda: gate.asked)
        bobs = runs.begin(BOB, "text", "bob")
        await until(lambda: runs.queued == 5)
        gate.is_open.set()
        await asyncio.gather(*(hosted.completion() for hosted in (*anns, bobs)))
        assert gate.asked.index("bob") <= 2


async def test_full_queue_refuses_and_says_when(open_sandbox: Sandbox) -> None:
    """An owner without a run in the queue may wait with one, also where another owner has filled it."""
    async with hosting(open_sandbox, Gate(), max_runs=1, max_queue=1) as runs:
        first = runs.begin(ANN, "text", "1")
        await until(lambda: state(first) == "running")
        runs.begin(ANN, "text", "2")
        runs.begin(BOB, "text", "bob's first")
        for owner in (ANN, BOB):
            with pytest.raises(Busy, match="1 runs wait") as refused:
                runs.begin(owner, "text", "more")
            assert refused.value.retry_after_s > 0
    async with hosting(open_sandbox, Gate(), max_runs=3, max_queue=0) as runs:
        three = [runs.begin(ANN, "text", str(number)) for number in range(3)]
        for owner in (ANN, BOB):
            with pytest.raises(Busy):
                runs.begin(owner, "text", "4")
        await until(lambda: all(state(hosted) == "running" for hosted in three))


async def waits_for_client(runs: HostedRuns, hosted: HostedRun) -> None:
    async with runs.away(hosted):
        await asyncio.Event().wait()


async def test_run_that_waits_for_its_client_gives_its_place(open_sandbox: Sandbox) -> None:
    gate = Gate()
    async with hosting(open_sandbox, gate, max_runs=1) as runs:
        first = runs.begin(ANN, "text", "first")
        await until(lambda: len(gate.asked) == 1)
        async with runs.away(first), runs.away(first):
            second = runs.begin(BOB, "text", "second")
            await until(lambda: len(gate.asked) == 2)
            assert first.is_away
            second.run.cancel()
            await second.run.ended()
        assert first.has_place
        gate.is_open.set()
        await first.completion()
        assert runs.running == 0
        await runs.begin(ANN, "text", "third").completion()  # no place was lost or made


async def test_cancelled_wait_for_a_client_takes_a_place_again(open_sandbox: Sandbox) -> None:
    """A block that is interrupted while it waits does not make its run one that counts for no place."""
    gate = Gate()
    async with hosting(open_sandbox, gate, max_runs=1) as runs:
        first = runs.begin(ANN, "text", "first")
        await until(lambda: len(gate.asked) == 1)
        waiting = asyncio.ensure_future(waits_for_client(runs, first))
        await until(lambda: first.is_away)
        waiting.cancel()
        await until(lambda: first.has_place)
        second = runs.begin(BOB, "text", "second")
        await until(lambda: runs.queued == 1)
        assert not first.run.is_done
        first.run.cancel()
        await until(lambda: len(gate.asked) == 2)
        assert state(second) == "running"
        waiting = asyncio.ensure_future(waits_for_client(runs, second))  # a run that ends so frees no second place
        await until(lambda: second.is_away)
        waiting.cancel()
        second.run.cancel()
        await second.run.ended()
        two = [runs.begin(ANN, "text", str(number)) for number in range(2)]
        await until(lambda: len(gate.asked) == 3)
        assert sorted(map(state, two)) == ["queued", "running"]


async def test_last_follower_ends_the_run(open_sandbox: Sandbox) -> None:
    """Also a run that waits in the queue."""
    gate = Gate()
    async with hosting(open_sandbox, gate, max_runs=1) as runs:
        hosted = runs.begin(ANN, "text", "first")
        async with hosted.joined():
            async with hosted.joined():
                await until(lambda: gate.asked)
            assert not hosted.run.is_done
            waiting = runs.begin(ANN, "text", "waiting")
            async with waiting.joined():
                assert state(waiting) == "queued"
            assert (state(waiting), runs.queued) == ("ended", 0)
        assert hosted.run.is_done
        assert (gate.cancelled, gate.asked) == (1, ["first"])


async def test_run_may_outlive_its_followers(open_sandbox: Sandbox) -> None:
    gate = Gate()
    async with hosting(open_sandbox, gate) as runs:
        lasting, brief = (runs.begin(ANN, "text", "Is it?") for _ in range(2))
        lasting.outlive(None)
        brief.outlive(0.01)
        async with lasting.joined(), brief.joined():
            await until(lambda: len(gate.asked) == 2)
        with pytest.raises(RunCancelled):
            await brief.completion()
        assert not lasting.run.is_done
        gate.is_open.set()
        assert (await lasting.completion()).response == "yes"


async def test_same_key_joins_the_run_that_exists(open_sandbox: Sandbox) -> None:
    async with hosting(open_sandbox, ScriptedClient(lambda _: "FINAL(yes)"), most_kept=1) as runs:
        hosted = runs.begin(ANN, "text", "Is it?", repeat=("k", "f"))
        assert runs.begin(ANN, "text", "Is it?", repeat=("k", "f")) is hosted
        await hosted.completion()
        assert runs.begin(ANN, "text", "Is it?", repeat=("k", "f")) is hosted
        with pytest.raises(ConfigurationError, match="Idempotency-Key was used for another request"):
            runs.begin(ANN, "text", "Other?", repeat=("k", "g"))
        other = runs.begin(BOB, "text", "Is it?", repeat=("k", "f"))
        assert other is not hosted
        await other.completion()  # it takes the room of the first one, whose key is free then
        assert runs.begin(ANN, "text", "Other?", repeat=("k", "g")) is not hosted


async def test_spent_money_stops_all_runs_of_the_owner(open_sandbox: Sandbox) -> None:
    """The owner's other runs stop, and it may begin none; another owner's run goes on."""
    rich = Owner("rich", usd_a_day=1.0)
    gate, costly = Gate(), Gate(Usage(1, 1, 1, 2.0))
    costly.is_open.set()
    async with RLM(gate, models={"costly": costly}, sandbox=open_sandbox) as rlm:
        runs = HostedRuns(rlm)
        mine, bobs = (runs.begin(owner, "text", "waits") for owner in (rich, BOB))
        await until(lambda: len(gate.asked) == 2)
        assert (await runs.begin(rich, "text", "spend", model="costly").completion()).response == "yes"
        assert (await mine.completion()).is_stopped
        with pytest.raises(MoneySpent):
            runs.begin(rich, "text", "again")
        with pytest.raises(NotAllowed):
            runs.begin(Owner("poor", frozenset({"small"})), "text", "?", model="costly")
        assert not bobs.run.is_done
        await runs.drain(0)


async def test_drain_waits_then_stops_with_the_best_answer(open_sandbox: Sandbox) -> None:
    gate = Gate()
    replies = iter([LOOK])

    async def reply(request: LMRequest) -> LMReply:
        text = next(replies, None)
        return LMReply(text, Usage(1)) if text is not None else await gate.complete(request)

    class Slow(Gate):
        async def complete(self, request: LMRequest) -> LMReply:
            return await reply(request)

    async with hosting(open_sandbox, Slow(), max_runs=1) as runs:
        hosted = runs.begin(ANN, "text", "Is it?")
        await until(lambda: gate.asked)
        queued = runs.begin(ANN, "text", "Later?")
        draining = asyncio.ensure_future(runs.drain(3_600))
        await until(lambda: queued.run.is_done)
        assert not hosted.run.is_done
        with pytest.raises(Busy, match="about to end"):
            runs.begin(ANN, "text", "New?")
        await runs.drain(0)
        await draining
        completion = await hosted.completion()
        assert completion.is_stopped
        assert "A first guess: 7." in (completion.response or "")


async def test_ended_runs_are_forgotten_beyond_their_number(open_sandbox: Sandbox) -> None:
    async with hosting(open_sandbox, ScriptedClient(["FINAL(yes)"] * 3), most_kept=1) as runs:
        for _ in range(2):
            ended = runs.begin(ANN, "text", "?")
            await ended.completion()
        last = runs.begin(ANN, "text", "?")
        assert runs.of(ANN) == runs.all() == [ended, last]
        await last.completion()
