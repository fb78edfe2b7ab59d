import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ContextRefused, SandboxFailed
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.watch.board import BOARD, ENDED_S, MOST_ENDED, QUESTION_CHARS, Board
from tests.support.stand_ins import Hanging

ANSWERS = "```repl\nFINAL(len(context))\n```"


@pytest.fixture
def board() -> Iterator[Board]:
    """The board of this process, on as with a control socket."""
    BOARD.is_on = True
    yield BOARD
    BOARD.clear()


async def test_run_is_listed_from_start_to_end(board: Board) -> None:
    client = Hanging()
    async with RLM(client) as rlm, rlm.start("abc", "How long?") as run:
        (entry,) = board.runs
        assert (entry.id, entry.state, entry.status().doing) == (run.id, "running", "reads the context")
        board.set_owner(run.id, "key 1")
        await client.asked.wait()
        status = entry.status()
        assert (status.question, status.model, status.turn) == ("How long?", "hanging", 1)
        assert (status.doing, status.owner, status.runs) == ("calls hanging", "key 1", 1)
        run.cancel()
        await run.ended()
        ended = entry.status()
    assert (ended.state, ended.doing, ended.runs) == ("cancelled", "", 0)
    assert ended.ended is not None


async def test_repl_of_a_run_names_it(board: Board) -> None:
    client = Hanging()
    async with Sandbox() as sandbox, RLM(client, sandbox=sandbox) as rlm, sandbox.repl() as own:
        async with rlm.start("abc", "How long?") as run:
            await client.asked.wait()
            alone, of_run = (entry.status() for entry in board.repls)
            assert (alone.run, of_run.run) == (None, run.id)
            assert (alone.state, of_run.state) == ("idle", "idle")
            assert all(entry.pid is not None for entry in board.repls)
        (left,) = board.repls
        assert left.pid == own.pid
    assert board.repls == []


async def test_repl_is_busy_while_a_block_runs(board: Board) -> None:
    async with Sandbox() as sandbox, sandbox.repl() as repl:
        (entry,) = board.repls
        ran = asyncio.Event()
        loop = asyncio.get_running_loop()

        def printed(stream: str, text: str) -> None:
            del stream, text
            loop.call_soon_threadsafe(ran.set)

        block = asyncio.create_task(repl.aexecute("print(1)\nwhile True: pass", on_output=printed))
        await ran.wait()
        assert entry.status().state == "busy"
        rests = asyncio.wrap_future(entry.rests())
        await entry.stop(now=False)
        await rests
        assert (await block).status == "interrupted"
        assert entry.status().state == "idle"
        await entry.stop(now=True)
        assert repl.is_closed
        assert entry.state == "closed"


async def test_repl_that_cannot_open_is_not_listed(board: Board) -> None:
    sandbox = Sandbox()
    async with sandbox:
        repl = sandbox.repl("abc")
    with pytest.raises(SandboxFailed):
        async with repl:
            pass
    assert board.repls == []


def test_board_is_empty_without_a_control_socket() -> None:
    assert not BOARD.is_on
    RLM(ScriptedClient([ANSWERS]), sandbox="strict").completion("abc", "How long?")
    assert BOARD.runs == []


def test_completion_keeps_events_for_followers(board: Board) -> None:
    with RLM(ScriptedClient([ANSWERS])) as rlm:
        assert rlm.completion("abc", "How long?").response == "3"
    (entry,) = board.runs
    assert entry.state == "answered"
    assert entry.log is not None

    async def events() -> list[str]:
        assert entry.log is not None
        return [type(event).__name__ async for event in entry.log.follow()]

    assert asyncio.run(events())[-1] == "RunEnded"


def test_run_that_fails_before_its_first_event_has_ended(board: Board) -> None:
    with pytest.raises(ContextRefused), RLM(ScriptedClient([])) as rlm:
        rlm.completion(Path("/nonexistent"), "How long?")
    (entry,) = board.runs
    assert (entry.state, entry.status().doing) == ("context", "")


def test_ended_runs_are_few_and_go(board: Board) -> None:
    """Each keeps its events, which may be 16 million characters."""
    with RLM(ScriptedClient([ANSWERS] * 6)) as rlm:
        for _ in range(MOST_ENDED + 2):
            rlm.completion("abc", "How long?")
    ended = board.runs
    assert len(ended) == MOST_ENDED
    for entry in ended:
        entry.ended = (entry.ended or 0.0) - ENDED_S - 1
    assert board.runs == []


async def test_secrets_are_replaced_in_a_question_and_a_queued_run_is_stopped(board: Board) -> None:
    """A question has no secret, also before the first event."""
    key = "sk-proj-" + "a1B2" * 12
    async with RLM(Hanging()) as rlm:
        run = rlm.start("abc", f"{'x' * (QUESTION_CHARS - 20)} {key}")
        (entry,) = board.runs
        board.set_queued(run.id, True)
        status = entry.status()
        assert (status.state, status.doing) == ("queued", "waits for its turn")
        assert key[:12] not in str(status.question)
        assert len(str(status.question)) <= QUESTION_CHARS
        entry.stop(now=True)
        await run.ended()
        assert (entry.state, entry.status().doing) == ("cancelled", "")


async def test_repl_gets_the_id_and_end_of_its_container(board: Board) -> None:
    ended: list[bool] = []

    async def end(now: bool) -> None:
        ended.append(now)

    async with Sandbox() as sandbox, sandbox.repl() as repl:
        entry = board.add_repl(repl, id="cntr_1", owner="key 1", end=end)
        assert board.repls == [entry]
        status = entry.status(5)
        assert (status.id, status.owner, status.memory_bytes) == ("cntr_1", "key 1", 5)
        await entry.stop(now=False)
        assert ended == [False]
    assert board.repls == []
