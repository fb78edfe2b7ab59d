"""The user's functions, called for nodes."""

import asyncio

import pytest

from rlm_broker.cluster import tools as module
from rlm_broker.cluster.messages import ToolReply, UseTool
from rlm_broker.cluster.tools import AttemptTools, RunTools
from rlm_broker.run.tools import Tools
from tests.support.waiting import until


class Counter:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def use(name: str = "count", *, is_of_child: bool = False, timeout_s: float = 60.0) -> UseTool:
    return UseTool(1, 1, name, '{"args": [], "kwargs": {}}', timeout_s, is_of_child)


async def test_equal_calls_are_told_apart_by_their_order() -> None:
    """A further attempt gets the first result first, then the second, and then calls anew."""
    counter = Counter()
    run = RunTools(Tools({"count": counter}), 60.0)
    first = AttemptTools(run)
    assert [(await first.answer(use())).text for _ in range(2)] == ["1", "2"]
    second = AttemptTools(run)
    assert [(await second.answer(use())).text for _ in range(3)] == ["1", "2", "3"]
    assert counter.calls == 3


async def test_children_have_their_own_functions() -> None:
    """A function of children is another one, also under the same name."""
    run = RunTools(Tools({"count": Counter()}, {"other": Counter()}), 60.0)
    attempt = AttemptTools(run)
    assert (await attempt.answer(use("other", is_of_child=True))).text == "1"
    assert (await attempt.answer(use("other"))).error == "there is no tool 'other'; there are: count"


async def test_the_shorter_time_holds() -> None:
    """A node cannot give a function more time than the run does."""

    async def waits() -> None:
        await asyncio.Event().wait()

    attempt = AttemptTools(RunTools(Tools({"waits": waits}), 0.05))
    reply = await attempt.answer(use("waits", timeout_s=1e9))
    assert "took longer than" in (reply.error or "")


async def test_results_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_CHARS", 1)
    counter = Counter()
    run = RunTools(Tools({"count": counter}), 60.0)
    first = AttemptTools(run)
    assert [(await first.answer(use())).text for _ in range(2)] == ["1", "2"]
    second = AttemptTools(run)
    assert [(await second.answer(use())).text for _ in range(2)] == ["1", "3"]


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_a_cancelled_call_goes_on_if_abandoned(is_abandoned: bool) -> None:
    """A call ends with its caller, unless its node was lost: then the next attempt joins it, or the run's end ends it."""
    ended: list[str] = []
    begun = asyncio.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    run = RunTools(Tools({"waits": waits}), 60.0)
    attempt = AttemptTools(run)
    task: asyncio.Task[ToolReply] = asyncio.ensure_future(attempt.answer(use("waits")))
    await begun.wait()
    if is_abandoned:
        attempt.abandon()
    task.cancel()
    await asyncio.wait({task})
    assert ended == ([] if is_abandoned else ["ended"])
    await run.aclose()
    await until(lambda: ended == ["ended"])


async def test_result_between_attempts_is_given_once() -> None:
    """The second equal call of the next attempt is a call of its own."""
    gate, counter = asyncio.Event(), Counter()

    async def waits() -> int:
        number = counter()
        await gate.wait()
        return number

    run = RunTools(Tools({"waits": waits}), 60.0)
    first = AttemptTools(run)
    task = asyncio.ensure_future(first.answer(use("waits")))
    await until(lambda: counter.calls == 1)
    first.abandon()
    task.cancel()
    await asyncio.wait({task})
    gate.set()
    key_of_call = next(iter(run.answered._under_way))
    await until(lambda: run.answered.answer(key_of_call, 0) is not None)
    second = AttemptTools(run)
    assert [(await second.answer(use("waits"))).text for _ in range(2)] == ["1", "2"]
