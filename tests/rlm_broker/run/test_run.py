"""The handle of a run: followed, stopped, cancelled and awaited."""

import asyncio
import threading
import traceback

import pytest

from rlm_broker import RLM, ConfigurationError, Limits, ModelFailed, RunCancelled, ScriptedClient
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.events.event import (
    BlockPrinted,
    BlockStarted,
    CallStarted,
    Event,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.run.run import Run
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.waiting import WAIT_S

BLOCK = "I look at it.\n```repl\nprint(context)\n```"
DEAF = "```repl\nimport signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf')\nimport time; time.sleep(1000)\n```"
HANGS = "A first guess: 7.\n```repl\nimport time; time.sleep(1000)\n```"


async def until(run: Run, kind: type[Event]) -> Event:
    async for event in run.events():
        if isinstance(event, kind):
            return event
    raise AssertionError(f"there is no {kind.__name__}")


def answers(sandbox: Sandbox, *replies: str) -> RLM:
    return RLM(ScriptedClient(list(replies)), sandbox=sandbox)


async def test_run_awaited_is_its_completion(open_sandbox: Sandbox) -> None:
    run = answers(open_sandbox, BLOCK, "FINAL(yes)").start("text", "Is it?")
    assert (await run).response == "yes"
    assert run.is_done
    assert (await run).response == "yes"  # as often as one likes


async def test_every_follower_gets_every_event_in_order(open_sandbox: Sandbox) -> None:
    run = answers(open_sandbox, BLOCK, "FINAL(yes)").start("text", "Is it?")

    async def followed(after: int = 0) -> list[Event]:
        return [event async for event in run.events(after)]

    first, second = await asyncio.gather(followed(), followed())
    await run
    late = await followed()
    assert first == second == late
    assert [event.n for event in first] == [*range(1, len(first) + 1)]
    assert {event.tree for event in first} == {run.id}
    assert isinstance(first[0], RunStarted)
    assert isinstance(first[-1], RunEnded)
    assert await followed(first[3].n) == first[4:]


async def test_events_rebuild_what_model_and_code_said(open_sandbox: Sandbox) -> None:
    code = "```repl\nprint(tool(3)); print(llm_query('What is it? ' * 20))\n```"

    def tool(number: int) -> int:
        return number + 1

    rlm = RLM(
        ScriptedClient([code, "FINAL(yes)"]), ScriptedClient(["a thing"]), tools={"tool": tool}, sandbox=open_sandbox
    )
    run = rlm.start("text", "Is it?")
    events = [event async for event in run.events()]
    calls = [event for event in events if isinstance(event, CallStarted)]
    assert calls[0].system is not None
    assert "Is it?" in str(calls[0].prompt)
    assert (calls[1].prompt, calls[1].block) == ("What is it? " * 20, 1)
    assert (calls[2].system, calls[2].block) == (None, 0)
    assert "a thing" in str(calls[2].prompt)
    started = next(event for event in events if isinstance(event, ToolStarted))
    ended = next(event for event in events if isinstance(event, ToolEnded))
    assert (started.tool, started.block, ended.result, ended.error) == ("tool", 1, "4", None)
    last = events[-1]
    assert isinstance(last, RunEnded)
    assert (last.kind, last.response, last.limit) == ("answered", "yes", None)


async def test_child_events_name_the_block_that_started_the_child(open_sandbox: Sandbox) -> None:
    def reply(messages: list[dict[str, str]]) -> str:
        is_child = "the part" in messages[1]["content"] and len(messages) == 2
        return "FINAL(1)" if is_child else "```repl\nFINAL(rlm_query('the part'))\n```"

    run = RLM(FunctionClient(reply), limits=Limits(max_depth=2), sandbox=open_sandbox).start("text", "?")
    starts = [event async for event in run.events() if isinstance(event, RunStarted)]
    assert [(event.run, event.block) for event in starts] == [("1", 0), ("1.1", 1)]


async def test_stopped_run_has_the_best_answer_so_far(open_sandbox: Sandbox) -> None:
    run = answers(open_sandbox, HANGS).start("text", "?")
    await until(run, BlockStarted)
    run.stop()
    completion = await run
    assert (completion.response, completion.is_stopped) == ("A first guess: 7.", True)
    ended = await until(run, RunEnded)
    assert isinstance(ended, RunEnded)
    assert ended.kind == "stopped"


@pytest.mark.parametrize("is_refused", [False, True], ids=["a reply", "an error"])
async def test_client_that_catches_the_cancellation_does_not_let_a_stopped_run_go_on(
    open_sandbox: Sandbox, is_refused: bool
) -> None:
    async def reply(messages: list[dict[str, str]]) -> str:
        if len(messages) == 2:
            return "A first guess: 7.\n```repl\nprint(1)\n```"
        assert len(messages) == 4  # of a second turn, and of no third
        run.stop()
        try:
            return await asyncio.Future[str]()
        except asyncio.CancelledError:
            if is_refused:
                raise ModelFailed("the connection was closed", "request") from None
            return "```repl\nprint(2)\n```"

    run = RLM(FunctionClient(reply), sandbox=open_sandbox).start("text", "?")
    completion = await run
    assert (completion.response, completion.is_stopped) == ("A first guess: 7.", True)


async def test_cancelled_run_raises_with_its_partial_results(open_sandbox: Sandbox) -> None:
    run = answers(open_sandbox, HANGS).start("text", "?")
    await until(run, BlockStarted)
    assert not run.was_cancelled
    run.cancel()
    with pytest.raises(RunCancelled) as raised:
        await run
    assert run.was_cancelled
    assert raised.value.partial_answer == "A first guess: 7."
    assert len(raised.value.messages) == 3


async def test_cancelled_run_does_not_wait_for_a_deaf_block(open_sandbox: Sandbox) -> None:
    limits = Limits(interrupt_grace_s=100 * WAIT_S)
    run = RLM(ScriptedClient([DEAF]), limits=limits, sandbox=open_sandbox).start("text", "?")
    await until(run, BlockPrinted)
    run.cancel()
    with pytest.raises(RunCancelled):
        async with asyncio.timeout(WAIT_S):
            await run


async def test_run_left_as_a_context_manager_has_ended(open_sandbox: Sandbox) -> None:
    async with answers(open_sandbox, HANGS).start("text", "?") as run:
        await until(run, BlockStarted)
    assert run.is_done


async def test_cancelling_the_awaiter_cancels_the_run_unless_shielded(open_sandbox: Sandbox) -> None:
    async with answers(open_sandbox, HANGS).start("text", "?") as run:
        await until(run, BlockStarted)
        shielded = asyncio.ensure_future(asyncio.shield(run))
        await asyncio.sleep(0)
        shielded.cancel()
        await asyncio.wait({shielded})
        assert not run.is_done
        awaiter = asyncio.ensure_future(_result(run))
        await asyncio.sleep(0)
        awaiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiter
        assert run.is_done


async def _result(run: Run) -> object:
    return await run


async def test_run_is_followed_from_another_thread_and_loop(open_sandbox: Sandbox) -> None:
    with answers(open_sandbox, BLOCK, "FINAL(yes)") as rlm:  # lives on the background loop
        run = rlm.start("text", "?")
        seen: list[str] = []

        def follow() -> None:
            async def read() -> None:
                seen.extend([type(event).__name__ async for event in run.events()])

            asyncio.run(read())

        thread = threading.Thread(target=follow)
        thread.start()
        assert (await run).response == "yes"
        await asyncio.to_thread(thread.join)
    assert seen[-1] == "RunEnded"


async def test_run_on_the_own_loop_refuses_waiting() -> None:
    async with RLM(ScriptedClient(["FINAL(yes)"])) as rlm:
        run = rlm.start("text", "?")
        with pytest.raises(ConfigurationError, match="write `await run`"):
            run.result()
        await run


async def test_run_of_an_rlm_that_is_not_open_is_waited_for_in_any_way() -> None:
    run = RLM(ScriptedClient(["FINAL(yes)"])).start("text", "?")
    assert run.result(WAIT_S).answer == (await run).answer == "yes"
    assert [type(event) async for event in run.events()][-1] is RunEnded


async def test_cancelled_await_carries_the_partial_answer(open_sandbox: Sandbox) -> None:
    started = asyncio.Event()
    seen = lambda event: started.set() if isinstance(event, BlockStarted) else None  # noqa: E731
    rlm = RLM(ScriptedClient([HANGS]), sandbox=open_sandbox, on_event=seen)
    async with rlm:
        task = asyncio.create_task(rlm.acompletion("text", "?"))
        await started.wait()
        task.cancel()
        await asyncio.wait({task})
    with pytest.raises(asyncio.CancelledError) as ended:
        await task
    assert isinstance(ended.value.__cause__, RunCancelled)
    assert ended.value.__cause__.partial_answer == "A first guess: 7."


def test_error_of_a_run_has_no_frames_of_this_package() -> None:
    rlm = RLM(ScriptedClient([ModelFailed("down")] * 2))
    for call in (rlm.completion, lambda *asked: rlm.start(*asked).result()):
        with pytest.raises(ModelFailed) as failed:
            call("text", "?")
        assert len(traceback.extract_tb(failed.value.__traceback__)) <= 3


def test_result_in_time_or_timeout_error(open_sandbox: Sandbox) -> None:
    run = answers(open_sandbox, HANGS).start("text", "?")
    with pytest.raises(TimeoutError):
        run.result(timeout_s=0.01)
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result()


async def test_run_arguments_hold_for_that_run_only(open_sandbox: Sandbox) -> None:
    said: list[LMRequest] = []

    class Client(ScriptedClient):
        async def complete(self, request: LMRequest) -> LMReply:
            said.append(request)
            return await super().complete(request)

    seen: list[Event] = []
    async with RLM(ScriptedClient(["FINAL(of the RLM)"] * 2), sandbox=open_sandbox) as rlm:
        own = await rlm.start(
            "text",
            "?",
            model=Client(["```repl\nFINAL(double(4))\n```"], "own-model"),
            instructions="Be short.",
            limits=Limits(max_iterations=2),
            tools={"double": lambda number: 2 * number},
            on_event=seen.append,
        )
        other = await rlm.acompletion("text", "?")
    assert (own.response, own.root_model, other.response) == ("8", "own-model", "of the RLM")
    assert str(said[0].messages[0].content) == "Be short."
    started = seen[0]
    assert isinstance(started, RunStarted)
    assert (started.model, started.metadata["limits"]["max_iterations"]) == ("own-model", 2)
    assert {event.tree for event in seen} == {started.tree}


async def test_concurrent_runs_differ_in_their_events(open_sandbox: Sandbox) -> None:
    seen: list[Event] = []
    async with RLM(ScriptedClient(["FINAL(1)"] * 2), on_event=seen.append, sandbox=open_sandbox) as rlm:
        runs = [rlm.start("text", "?") for _ in range(2)]
        await asyncio.gather(*map(_result, runs))
    for run in runs:
        assert [event.n for event in seen if event.tree == run.id] == [*range(1, len(seen) // 2 + 1)]


async def test_leaving_an_rlm_ends_its_runs(open_sandbox: Sandbox) -> None:
    async with answers(open_sandbox, HANGS) as rlm:
        run = rlm.start("text", "?")
        await until(run, BlockStarted)
    assert run.is_done
    with pytest.raises(RunCancelled, match="the run was cancelled") as raised:
        await run
    assert raised.value.partial_answer == "A first guess: 7."


async def test_stream_that_is_left_has_ended(open_sandbox: Sandbox) -> None:
    stream = answers(open_sandbox, HANGS).stream("text", "?")
    async for event in stream:
        if isinstance(event, BlockStarted):
            break
    await stream.aclose()
