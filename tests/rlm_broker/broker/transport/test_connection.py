"""`Connection`: a session on a socket, whose worker is played by the test."""

import asyncio
import gc
import itertools
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from msgspec.structs import replace

from rlm_broker.broker.transport.connection import (
    ENDED,
    MESSAGES_IN_A_ROW,
    MOST_BACKGROUND_WEIGHT,
    MOST_OPEN_WEIGHT,
    MOST_UNREAD_BYTES,
    Connection,
    QueryHandler,
    QueryLoad,
    refuse,
)
from rlm_broker.broker.transport.session import BYTE_WEIGHT, Session
from rlm_broker.errors import ModelFailed, ProtocolViolation, WorkerDied
from sandbox_worker import RELEASE
from sandbox_worker.wire.messages import (
    MAX_PROMPTS,
    DisplayMessage,
    Execute,
    FromWorker,
    Output,
    Query,
    Ready,
    Reply,
    Result,
    Slot,
    Want,
    decode_from_orchestrator,
    encode,
)
from tests.support.socket_peer import MAX_FRAME_BYTES, WAIT_S, Peer
from tests.support.waiting import for_ever, turns, until

IN_FLIGHT = 4
SMALL_FRAME_BYTES = 1 << 16


class Worker(Peer):
    """The worker's end: sends what a REPL would send, and reads what it would read."""

    def say(self, message: FromWorker) -> None:
        self.send(encode(message))

    async def hear(self) -> Execute | Reply:
        message = decode_from_orchestrator(await self.receive())
        assert isinstance(message, Execute | Reply)
        return message


def query(number: int, *prompts: str) -> Query:
    return Query(id=f"1:{number}", want="llm", prompts=list(prompts or ("p",)))


def answering(*slots: Slot) -> QueryHandler:
    """Answers each query with these slots."""

    async def answer(_query: Query) -> list[Slot]:
        return [*slots]

    return answer


class Waiting:
    """Answers no query: it waits until it is cancelled, and then tidies up until it may end."""

    def __init__(self, *, may_end: bool = True) -> None:
        self.asked, self.tidying, self.may_end, self.ended = (asyncio.Event() for _ in range(4))
        if may_end:
            self.may_end.set()

    async def __call__(self, _query: Query) -> list[Slot]:
        self.asked.set()
        try:
            return await for_ever()
        finally:
            self.tidying.set()
            await turns()  # the end of the socket arrives here, too
            await self.may_end.wait()
            self.ended.set()


@asynccontextmanager
async def connected(max_frame_bytes: int, in_flight: int = IN_FLIGHT) -> AsyncIterator[tuple[Connection, Worker]]:
    """Both ends. The test fails if a task of the connection ends with an error that was never retrieved."""
    unheard: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    ours, theirs = socket.socketpair()
    connection = Connection(Session(max_frame_bytes), in_flight)
    await loop.connect_accepted_socket(lambda: connection, ours)
    async with Worker(*await asyncio.open_connection(sock=theirs)) as worker:
        yield connection, worker
    await connection.close()
    gc.collect()  # asyncio reports a task's error when the task is collected
    assert unheard == []


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Connection, Worker]]:
    async with connected(SMALL_FRAME_BYTES) as both:
        yield both


async def running(
    pair: tuple[Connection, Worker], answer: QueryHandler = refuse, heard: list[Output | DisplayMessage] | None = None
) -> "asyncio.Future[Result]":
    """A block that runs in the worker."""
    connection, worker = pair
    worker.say(Ready(RELEASE))
    await asyncio.wait_for(connection.ready(), WAIT_S)
    block = connection.execute("code", answer, (lambda _: None) if heard is None else heard.append)
    assert await worker.hear() == Execute(block=1, code="code")
    return block


async def test_a_block_runs_prints_and_ends(pair: tuple[Connection, Worker]) -> None:
    heard: list[Output | DisplayMessage] = []
    block = await running(pair, heard=heard)
    pair[1].say(Output(block=1, stream="stdout", text="hello\n"))
    pair[1].say(Result(block=1, status="ok", final_answer="42"))
    assert (await asyncio.wait_for(block, WAIT_S)).final_answer == "42"
    assert heard == [Output(block=1, stream="stdout", text="hello\n")]
    assert pair[0].block == 1


async def test_queries_are_answered_when_ready(pair: tuple[Connection, Worker]) -> None:
    release = asyncio.Event()

    async def answer(asked: Query) -> list[Slot]:
        if asked.prompts == ["slow"]:
            await release.wait()
        return [Slot(text=prompt.upper()) for prompt in asked.texts]

    await running(pair, answer)
    pair[1].say(query(1, "slow"))
    pair[1].say(query(2, "a", "b"))
    assert await pair[1].hear() == Reply(id="1:2", slots=[Slot(text="A"), Slot(text="B")])
    release.set()
    assert await pair[1].hear() == Reply(id="1:1", slots=[Slot(text="SLOW")])


async def test_query_gets_its_reply_despite_any_error(pair: tuple[Connection, Worker]) -> None:
    failures: dict[str, Exception] = {
        "the provider is down": ModelFailed("the provider is down"),
        "RuntimeError: a bug": RuntimeError("a bug"),
    }

    async def answer(asked: Query) -> list[Slot]:
        (prompt, _) = asked.texts
        if prompt in failures:
            raise failures[prompt]
        return [Slot(text="only one")]

    await running(pair, answer)
    for number, reason in enumerate([*failures, "1 answers to 2 prompts"]):
        pair[1].say(query(number, reason, "b"))
        assert await pair[1].hear() == Reply(id=f"1:{number}", slots=[Slot(error=reason)] * 2)


async def test_too_large_reply_says_so_in_its_place(pair: tuple[Connection, Worker]) -> None:
    await running(pair, answering(Slot(text="x" * SMALL_FRAME_BYTES)))
    pair[1].say(query(1))
    reply = await pair[1].hear()
    assert isinstance(reply, Reply)
    assert (reply.slots[0].error or "").startswith("the reply is too large: frame of 65,")


async def test_query_with_oversized_errors_ends_the_connection(pair: tuple[Connection, Worker]) -> None:
    block = await running(pair)
    pair[1].say(query(1, *[""] * 10_000))
    with pytest.raises(ProtocolViolation, match="the errors of 10,000 prompts do not fit into a reply"):
        await asyncio.wait_for(block, WAIT_S)
    assert await pair[1].is_hung_up_on()


async def test_query_above_any_batch_is_not_counted() -> None:
    asked: list[Query] = []

    async def answer(seen: Query) -> list[Slot]:
        asked.append(seen)
        return []

    async with connected(MAX_FRAME_BYTES) as both:
        block = await running(both, answer)
        both[1].say(query(1, *[""] * (MAX_PROMPTS + 1)))
        with pytest.raises(ProtocolViolation, match="length <= 65536"):
            await asyncio.wait_for(block, WAIT_S)
    assert asked == []


async def test_query_too_large_is_answered_and_the_connection_goes_on() -> None:
    """Hostile code that sends one all the same: it is not decoded, no handler sees it, and it is answered."""
    asked: list[Query] = []

    async def answer(seen: Query) -> list[Slot]:
        asked.append(seen)
        return [Slot(text="fine")]

    async with connected(64 << 20) as both:
        connection, worker = both
        block = await running(both, answer)
        for number, end in enumerate([b'x"]}', b"\xff[[[["]):
            begin = b'{"type":"query","id":"1:%d","want":"llm","prompts":["' % number
            worker.send(begin + b"x" * (40 << 20) + end)
            reply = await worker.hear()
            assert isinstance(reply, Reply)
            assert reply.id == f"1:{number}"
            assert "pass a large text as a context" in (reply.slots[0].error or "")
        worker.say(query(9))
        assert await worker.hear() == Reply(id="1:9", slots=[Slot(text="fine")])
        worker.say(Result(block=1, status="ok"))
        assert (await asyncio.wait_for(block, WAIT_S)).status == "ok"
        assert connection._session.open_weight == connection._load.weight == 0
    assert [each.id for each in asked] == ["1:9"]


async def test_worker_breaking_the_protocol_ends_its_block(pair: tuple[Connection, Worker]) -> None:
    block = await running(pair)
    pair[1].say(Result(block=2, status="ok"))
    with pytest.raises(ProtocolViolation, match="Result of block 2 while block 1 runs"):
        await asyncio.wait_for(block, WAIT_S)
    assert await pair[1].is_hung_up_on()
    with pytest.raises(ProtocolViolation):
        pair[0].execute("more", refuse, lambda _: None)


async def test_worker_that_hangs_up_ends_its_block(pair: tuple[Connection, Worker]) -> None:
    answer = Waiting()
    block = await running(pair, answer)
    pair[1].say(query(1))
    await asyncio.wait_for(answer.asked.wait(), WAIT_S)
    pair[1].writer.transport.abort()
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(block, WAIT_S)
    await asyncio.wait_for(answer.ended.wait(), WAIT_S)


async def test_a_result_that_came_before_the_end_counts(pair: tuple[Connection, Worker]) -> None:
    block = await running(pair)
    pair[1].say(Result(block=1, status="ok"))
    pair[1].writer.close()
    assert (await asyncio.wait_for(block, WAIT_S)).status == "ok"


async def test_settling_cancels_and_awaits_open_answers(pair: tuple[Connection, Worker]) -> None:
    answer = Waiting()
    block = await running(pair, answer)
    pair[1].say(query(1))
    await asyncio.wait_for(answer.asked.wait(), WAIT_S)
    pair[1].say(Result(block=1, status="ok"))
    await asyncio.wait_for(block, WAIT_S)
    await asyncio.wait_for(pair[0].settle(), WAIT_S)
    assert answer.ended.is_set()
    assert await pair[1].hear() == Reply(id="1:1", slots=[Slot(error="cancelled, the block that asked has ended")])


async def test_reading_pauses_at_the_bound_of_open_queries(pair: tuple[Connection, Worker]) -> None:
    release = asyncio.Semaphore(0)
    asked: list[str] = []

    async def answer(seen: Query) -> list[Slot]:
        asked.append(seen.id)
        await release.acquire()
        return [Slot(text="ok")]

    await running(pair, answer)
    flood = 2_000
    padding = "x" * 2_000
    for number in range(flood):
        pair[1].say(query(number, padding))
    await until(lambda: len(asked) >= IN_FLIGHT)
    await turns(200)  # several times as many as reading all queries would take
    # One read may complete several queries; the next read waits.
    assert len(asked) < flood / 4
    for _ in range(flood):
        release.release()
    replies = [await pair[1].hear() for _ in range(flood)]
    assert {reply.id for reply in replies if isinstance(reply, Reply)} == {f"1:{n}" for n in range(flood)}


async def test_worker_that_reads_no_replies_is_not_read(pair: tuple[Connection, Worker]) -> None:
    answered = 0

    async def answer(_query: Query) -> list[Slot]:
        nonlocal answered
        answered += 1
        return [Slot(text="x" * 60_000)]

    await running(pair, answer)
    pair[1].reader._transport.pause_reading()  # type: ignore[attr-defined]
    flood = 1_000
    for number in range(flood):
        pair[1].say(query(number, "x" * 1_000))
    await until(lambda: answered)
    await turns(200)  # several times as many as reading all queries would take
    assert answered < flood / 4


async def test_closing_waits_for_the_end_of_answers(pair: tuple[Connection, Worker]) -> None:
    answer = Waiting()
    block = await running(pair, answer)
    pair[1].say(query(1))
    await asyncio.wait_for(answer.asked.wait(), WAIT_S)
    await asyncio.wait_for(pair[0].close(), WAIT_S)
    assert answer.ended.is_set()
    with pytest.raises(WorkerDied, match="the connection was closed"):
        block.result()
    assert await pair[1].is_hung_up_on()
    await pair[0].close()
    with pytest.raises(WorkerDied, match="the connection was closed"):
        await pair[0].ready()


async def test_worker_after_the_closing_is_disconnected() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(Session(SMALL_FRAME_BYTES), IN_FLIGHT)
    await connection.close()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
    async with Worker(*await asyncio.open_connection(sock=theirs)) as worker:
        assert await worker.is_hung_up_on()


async def test_queries_of_more_than_their_weight_wait_for_replies() -> None:
    prompt_chars = 500_000
    most_open = MOST_OPEN_WEIGHT // (BYTE_WEIGHT * prompt_chars)
    go_on = asyncio.Event()
    asked: list[Query] = []

    async def slow(seen: Query) -> list[Slot]:
        asked.append(seen)
        await go_on.wait()
        return [Slot(text="done")]

    many = most_open + 4
    async with connected(64 << 20, in_flight=1000) as both:
        connection, worker = both
        await running(both, slow)
        frames = [encode(query(number, "x" * prompt_chars)) for number in range(many)]
        saying = asyncio.create_task(_say_all(worker, frames))
        await until(lambda: len(asked) >= most_open and _is_waiting(connection))
        assert len(asked) == most_open
        go_on.set()
        await until(lambda: len(asked) == many)
        await saying


async def _say_all(worker: Worker, frames: list[bytes]) -> None:
    for each in frames:
        worker.send(each)
        await worker.writer.drain()


def _is_waiting(connection: Connection) -> bool:
    return connection._transport is not None and not connection._transport.is_reading()


async def test_thousands_of_messages_leave_turns_to_others(pair: tuple[Connection, Worker]) -> None:
    connection, worker = pair
    printed: list[Output | DisplayMessage] = []
    worker.say(Ready(RELEASE))
    await connection.ready()
    result = connection.execute("1", refuse, printed.append)
    await worker.hear()
    for _ in range(500):
        worker.say(Output(block=1, stream="stdout", text="x"))
    worker.say(Result(block=1, status="ok"))
    steps = [0]
    while not result.done():
        await asyncio.sleep(0)
        steps.append(len(printed))
    assert len(printed) == 500
    assert max(later - before for before, later in itertools.pairwise(steps)) <= MESSAGES_IN_A_ROW


async def test_unread_replies_become_errors_and_take_no_memory() -> None:
    answered = 0

    async def large(_query: Query) -> list[Slot]:
        nonlocal answered
        answered += 1
        return [Slot(text="x" * 16_000_000)]

    async with connected(64 << 20, in_flight=100) as both:
        connection, worker = both
        await running(both, large)
        worker.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(20):
            worker.say(query(number))
        await until(lambda: answered == 20 and not connection._session.open_queries)
        transport = connection._transport
        assert transport is not None
        assert transport.get_write_buffer_size() <= MOST_UNREAD_BYTES + 17_000_000
        worker.reader._transport.resume_reading()  # type: ignore[attr-defined]
        replies = [await worker.hear() for _ in range(20)]
        errors = [reply.slots[0].error for reply in replies if isinstance(reply, Reply)]
        assert errors[0] is None
        assert "still unread" in (errors[-1] or "")


async def test_result_behind_a_full_query_is_heard() -> None:
    async with connected(64 << 20, in_flight=2) as both:
        connection, worker = both
        result = await running(both, Waiting())
        for number in range(6):
            worker.say(query(number))
        worker.say(Result(block=1, status="interrupted"))
        await until(lambda: _is_waiting(connection))
        assert not result.done()
        connection.let_go()
        assert (await asyncio.wait_for(result, WAIT_S)).status == "interrupted"


def test_connections_proceed_in_order_within_the_weight() -> None:
    load, resumed = QueryLoad(most=100), list[str]()

    def resume(name: str) -> None:
        resumed.append(name)
        load.weight += 60

    load.weight += 150
    for name in ("a", "b", "c"):
        load.wait(name, lambda name=name: resume(name))  # type: ignore[misc]
    load.lighten(40)
    assert (load.is_high, resumed) == (True, [])
    load.lighten(20)
    assert (load.weight, resumed) == (150, ["a"])
    load.forget("b")
    load.lighten(150)
    assert resumed == ["a", "c"]


def test_queries_of_many_connections_answered_at_once_do_not_exhaust_the_stack() -> None:
    load, many = QueryLoad(most=100), 2 * sys.getrecursionlimit()
    for number in range(many):
        load.wait(number, lambda: load.lighten(1))
    load.weight = 100 + many
    load.lighten(many + 1)
    assert load.weight == 99 - many


async def test_without_models_every_prompt_is_refused_in_words(pair: tuple[Connection, Worker]) -> None:
    await running(pair)
    pair[1].say(query(1, "a", "b"))
    no_model = "llm_query is not available: no model is connected to this sandbox"
    assert await pair[1].hear() == Reply(id="1:1", slots=[Slot(error=no_model)] * 2)


async def test_cleanup_after_a_lost_worker_completes(pair: tuple[Connection, Worker]) -> None:
    answer = Waiting(may_end=False)
    await running(pair, answer)
    pair[1].say(query(1))
    await asyncio.wait_for(answer.asked.wait(), WAIT_S)
    pair[1].writer.transport.abort()
    await asyncio.wait_for(answer.tidying.wait(), WAIT_S)
    settled = asyncio.gather(pair[0].settle(), pair[0].close())
    await asyncio.sleep(0)
    answer.may_end.set()
    await asyncio.wait_for(settled, WAIT_S)
    assert answer.ended.is_set()


# -- queries in the background ---------------------------------------------------------------------------------------


def background(number: int, want: Want = "rlm", prompt: str = "p") -> Query:
    return Query(id=f"1:{number}", want=want, prompts=[prompt], background=True)


class Children:
    """Answers background queries when it is told to, and queries of other kinds at once."""

    def __init__(self) -> None:
        self.may_answer: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.ended: list[str] = []

    async def __call__(self, query: Query) -> list[Slot]:
        try:
            if query.background:
                await self.may_answer[query.id].wait()
            return [Slot(query.id)]
        finally:
            await turns()
            self.ended.append(query.id)


async def started(pair: tuple[Connection, Worker], *numbers: int) -> Children:
    connection, worker = pair
    children = Children()
    worker.say(Ready(RELEASE))
    await connection.ready()
    connection.execute("code", children, lambda _: None)
    assert isinstance(await worker.hear(), Execute)
    for number in numbers:
        worker.say(background(number))
    return children


async def test_background_query_outlives_its_block_and_is_waited_for(pair: tuple[Connection, Worker]) -> None:
    connection, worker = pair
    children = await started(pair, 1, 2, 3)
    worker.say(query(4))
    assert await worker.hear() == Reply("1:4", [Slot("1:4")])  # three are open, and the others have their room
    worker.say(Result(block=1, status="ok"))
    await until(lambda: connection._result is not None and connection._result.done())
    await connection.settle()
    children.may_answer["1:2"].set()
    assert await worker.hear() == Reply("1:2", [Slot("1:2")])
    connection.execute("code", children, lambda _: None)
    assert isinstance(await worker.hear(), Execute)
    ids = ["1:1", "1:2", "1:3", "1:99"]
    looked = Query(id="2:1", want="wait", prompts=ids)
    assert await connection.answered(looked) == [Slot(), Slot("done"), Slot(), Slot("done")]
    waits = asyncio.create_task(connection.answered(replace(looked, count=3)))
    late = replace(looked, count=4, timeout_s=0.001)
    assert [slot.text for slot in await connection.answered(late)] == ["", "done", "", "done"]
    children.may_answer["1:1"].set()
    assert await worker.hear() == Reply("1:1", [Slot("1:1")])
    assert [slot.text for slot in await waits] == ["done", "done", "", "done"]
    await asyncio.gather(connection.end_background(["1:3", "1:99"]), connection.end_background(["1:3"]))
    assert await worker.hear() == Reply("1:3", [Slot(error=ENDED)])
    assert children.ended == ["1:4", "1:2", "1:1", "1:3"]


async def test_block_that_computes_beside_its_children_does_not_wait(pair: tuple[Connection, Worker]) -> None:
    """Such a block would answer a request for its variables when it waits next, perhaps at its end."""
    connection, worker = pair
    children = await started(pair, 1)
    await until(lambda: len(children.may_answer) == 1)
    assert not connection.waits
    waiting = Waiting()
    connection._answer = waiting
    worker.say(query(2))
    await waiting.asked.wait()
    assert connection.waits


async def test_lost_connection_ends_background_queries(pair: tuple[Connection, Worker]) -> None:
    connection, worker = pair
    children = await started(pair, 1, 2)
    await until(lambda: len(children.may_answer) == 2)
    worker.say(Ready(RELEASE))  # breaks the protocol
    await connection.close()
    assert sorted(children.ended) == ["1:1", "1:2"]


async def test_surplus_background_query_is_refused_in_words(pair: tuple[Connection, Worker]) -> None:
    connection, worker = pair
    children = await started(pair, *range(IN_FLIGHT))
    for number, want, said in [
        (10, "rlm", "4 children of this code are open already"),
        (11, "llm", "llm cannot run in the background"),
        (12, "tool", "tool cannot run in the background"),
    ]:
        worker.say(background(number, cast("Want", want)))
        reply = await worker.hear()
        assert isinstance(reply, Reply)
        assert said in (reply.slots[0].error or "")
    for number in range(IN_FLIGHT):
        children.may_answer[f"1:{number}"].set()
        await worker.hear()
    assert connection._background_weight == 0


async def test_long_tasks_in_the_background_are_bounded_together() -> None:
    async with connected(MAX_FRAME_BYTES) as both:
        _, worker = both
        await started(both)
        for number in range(3):
            worker.say(background(number, prompt="x" * (MOST_BACKGROUND_WEIGHT // BYTE_WEIGHT // 2)))
        reply = await worker.hear()
        assert isinstance(reply, Reply)
        assert (reply.id, reply.slots[0].error) == (
            "1:1",
            "the tasks of children that are open take too much memory: hand long texts over as contexts",
        )
