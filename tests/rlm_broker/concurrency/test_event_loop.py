"""`EventLoopRef` and `Job`: calls from threads and other loops, and what Ctrl+C does."""

import asyncio
import gc
import signal
import threading

import pytest

from rlm_broker.concurrency.event_loop import LOOP_ENDED, EventLoopRef
from rlm_broker.concurrency.forks import FORKING
from rlm_broker.errors import ConfigurationError, ModelFailed
from tests.support.forked_child import in_child
from tests.support.forked_python import Python
from tests.support.waiting import WAIT_S, turns, until_now


async def loop_of() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_work_of_any_thread_shares_the_background_loop() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    threads = [
        threading.Thread(target=lambda: loops.append(EventLoopRef.background().run(loop_of()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(loops) == 4
    assert len(set(loops)) == 1


async def test_the_plain_form_works_while_another_loop_is_running() -> None:
    assert EventLoopRef.background().run(loop_of()) is not asyncio.get_running_loop()
    assert await EventLoopRef.background().arun(loop_of()) is not asyncio.get_running_loop()
    assert await EventLoopRef.here().arun(loop_of()) is asyncio.get_running_loop()


async def test_waiting_for_the_own_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="use the async form"):
        EventLoopRef.here().run(loop_of())


async def fail() -> None:
    raise ModelFailed("why")


def test_work_error_is_raised_unchanged() -> None:
    with pytest.raises(ModelFailed, match="why"):
        EventLoopRef.background().run(fail())


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
def test_work_that_leaves_the_process_before_its_first_wait_ends_its_caller_alone(
    leaving: type[BaseException],
) -> None:
    async def leave() -> None:
        raise leaving

    job = EventLoopRef.background().job(leave())
    job.start()
    assert isinstance(job.outcome.exception(WAIT_S), leaving)
    assert EventLoopRef.background().run(loop_of())


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelling_waits_for_work_on_the_other_loop(fails: bool) -> None:
    """An error on its way out is not reported."""
    started, ended, reported = threading.Event(), threading.Event(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turns()
            ended.set()
            if fails:
                await fail()

    task = asyncio.create_task(EventLoopRef.background().arun(work()))
    await asyncio.to_thread(started.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)
    assert ended.is_set()
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_early_cancellation_is_not_lost() -> None:
    """A cancellation that comes before the work began is not lost."""
    for _ in range(50):
        task = asyncio.create_task(EventLoopRef.background().arun(asyncio.Event().wait()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, WAIT_S)


CTRL_C = """
import asyncio, sys
from rlm_broker.concurrency import event_loop
from rlm_broker.concurrency.event_loop import LOOP_ENDED, EventLoopRef
async def work():
    print("running", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("ending", flush=True)
        await (asyncio.sleep(0) if sys.argv[1] == "ends" else asyncio.Event().wait())
        print("ended", flush=True)
try:
    EventLoopRef.background().run(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("signals", "said"), [(1, ["ending", "ended", "interrupted"]), (2, ["ending", "interrupted"])])
def test_second_ctrl_c_does_not_wait(signals: int, said: list[str]) -> None:
    ending = "ends" if signals == 1 else "hangs"
    with Python(["-c", CTRL_C, ending]) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            heard = [process.stdout.readline().strip()]
            if signals == 2:
                process.send_signal(signal.SIGINT)
            heard += process.stdout.read().split()
        finally:
            process.kill()
    assert heard == said


def test_thread_does_not_wait_for_a_loop_that_was_closed() -> None:
    """Work that a loop was given before it was closed will never run, and its caller is told so."""
    loop = asyncio.new_event_loop()
    ref, errors = EventLoopRef(loop), list[ConfigurationError]()

    def call() -> None:
        try:
            ref.run(loop_of())
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until_now(lambda: loop._ready)  # type: ignore[attr-defined]
    loop.close()
    thread.join(WAIT_S)
    assert [str(error) for error in errors] == [LOOP_ENDED]


def test_process_that_is_forked_while_the_loop_starts_has_one_of_its_own() -> None:
    def started() -> bool:
        signal.alarm(int(WAIT_S))
        return EventLoopRef.background().is_alive

    with FORKING:
        assert in_child(started)
