"""The calls of one tree: their number at a time, their order, their cost."""

import asyncio
from typing import Any

import pytest

from rlm_broker.broker.clients.base import PICTURE_CHARS, LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.errors import LimitReached, ModelFailed
from rlm_broker.events.event import CallEnded, CallStarted, Event, TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.results import Call, ChatMessage
from rlm_broker.run import calls as module
from rlm_broker.run.calls import MOST_ANSWER_BYTES, BlockCalls, Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.prompts import ImagePart, ImageUrl, MessagePart, Part, Prompt, TextPart
from tests.support.clock import Clock
from tests.support.stand_ins import Hanging
from tests.support.waiting import WAIT_S, for_ever, turns

CALLER = Caller("1", 1, "the question")
ROOT = Caller("1", 0, "the question")


def query(*prompts: str, **fields: Any) -> Query:
    return Query(id="1:1", want="llm", prompts=list(prompts), **fields)


class Counting:
    """Notes how many calls run at a time, and every request."""

    model_name = "counting"

    def __init__(self) -> None:
        self.running = self.most = 0
        self.requests: list[LMRequest] = []

    async def complete(self, request: LMRequest) -> LMReply:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await turns(3)
        finally:
            self.running -= 1
        text = str(request.messages[-1].content)
        if text == "boom":
            raise ModelFailed("the provider is down")
        return LMReply(text.upper(), Usage(1, 3, 2, 0.5))

    async def aclose(self) -> None:
        """Close no connection: there is none."""


def calls_with(client: Counting, limits: Limits, events: list[Event] | None = None) -> tuple[TreeCalls, Ledger]:
    ledger = Ledger(limits)
    return TreeCalls(
        LMHandler(client), ledger, TreeEvents("t", [(events if events is not None else []).append])
    ), ledger


async def test_batch_keeps_order_and_slots_of_failures() -> None:
    calls, ledger = calls_with(Counting(), Limits())
    slots = await calls.slots(CALLER, query("a", "boom", "c"))
    assert slots == [Slot(text="A"), Slot(error="the provider is down"), Slot(text="C")]
    assert ledger.summary().model_usage_summaries == {"counting": Usage(2, 6, 4, 1.0)}


async def test_tree_bounds_calls_of_all_its_runs() -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits(max_concurrent_calls=3))
    await asyncio.gather(*(calls.slots(CALLER, query(*"abcdefgh")) for _ in range(4)))
    assert client.most == 3


async def test_query_may_lower_its_concurrency_only() -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits(max_concurrent_calls=4))
    await calls.slots(CALLER, query(*"abcdefgh", max_concurrent=2))
    assert client.most == 2
    await calls.slots(CALLER, query(*"abcdefgh", max_concurrent=1000))
    assert client.most == 4


async def test_a_batch_stops_exactly_at_the_number_of_calls() -> None:
    client = Counting()
    calls, ledger = calls_with(client, Limits(max_llm_calls=5))
    slots = await calls.slots(CALLER, query(*"abcdefgh"))
    assert [slot.error is None for slot in slots] == [True] * 5 + [False] * 3
    assert all("max_llm_calls" in (slot.error or "") for slot in slots[5:])
    assert len(client.requests) == ledger.calls == 5
    with pytest.raises(LimitReached):
        await calls.turn(ROOT, [ChatMessage("user", "x")])


async def test_request_carries_data_of_code_and_orchestrator() -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits(max_completion_tokens=100))
    await calls.slots(CALLER, query("p", system="be brief", max_completion_tokens=500))
    await calls.slots(CALLER, query("p", max_completion_tokens=5))
    first, second = client.requests
    assert [message.role for message in first.messages] == ["system", "user"]
    assert (first.max_completion_tokens, second.max_completion_tokens) == (100, 5)
    assert (first.depth, first.question, first.is_loop) == (1, "the question", False)


async def test_call_start_and_end_are_reported() -> None:
    events: list[Event] = []
    calls, _ = calls_with(Counting(), Limits(), events)
    await calls.slots(CALLER, query("boom"))
    started, ended = events
    assert isinstance(started, CallStarted)
    assert isinstance(ended, CallEnded)
    assert (started.call, started.prompt, ended.error) == (1, "boom", "the provider is down")
    assert ended.duration_s > 0


async def test_batch_calls_are_reported_with_number_and_total() -> None:
    events: list[Event] = []
    calls, _ = calls_with(Counting(), Limits(max_concurrent_calls=2), events)
    await calls.slots(CALLER, query("alone"))
    await calls.slots(CALLER, query("a", "boom", "c", "a"))
    await calls.slots(CALLER, query("alone", timeout_s=WAIT_S))
    await calls.slots(CALLER, query("d", "d", samples=True))
    started = [(event.batch, event.of) for event in events if isinstance(event, CallStarted)]
    ended = [(event.batch, event.done, event.of) for event in events if isinstance(event, CallEnded)]
    assert started == [(0, 0), *[(1, 3)] * 3, (0, 0), *[(2, 2)] * 2]  # the same prompt twice is one call
    assert ended == [(0, 0, 0), (1, 1, 3), (1, 2, 3), (1, 3, 3), (0, 0, 0), (2, 1, 2), (2, 2, 2)]


async def test_cancelled_call_is_reported_and_frees_its_place() -> None:
    events: list[Event] = []
    hanging = asyncio.Event()
    replies = iter([hanging.wait])

    async def reply(_messages: list[dict[str, Any]]) -> str:
        for wait in replies:
            await wait()
        return "ok"

    ledger = Ledger(Limits(max_concurrent_calls=1))
    calls = TreeCalls(LMHandler(FunctionClient(reply)), ledger, TreeEvents("t", [events.append]))
    task = asyncio.create_task(calls.slots(CALLER, query("x")))
    while not events:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(events[-1], CallEnded)
    assert events[-1].error
    assert await asyncio.wait_for(calls.slots(CALLER, query("y")), WAIT_S) == [Slot(text="ok")]


async def test_equal_prompts_in_a_batch_are_sent_once() -> None:
    client = Counting()
    calls, ledger = calls_with(client, Limits())
    assert await calls.slots(CALLER, query("a", "b", "a")) == [Slot(text="A"), Slot(text="B"), Slot(text="A")]
    assert len(client.requests) == ledger.calls == 2
    await calls.slots(CALLER, query("a", "b", "a", samples=True))
    assert len(client.requests) == ledger.calls == 5


async def test_late_prompt_is_an_error_in_its_slot(leaping_clock: Clock) -> None:
    del leaping_clock
    cancelled = 0

    async def reply(messages: list[dict[str, Any]]) -> str:
        nonlocal cancelled
        if messages[-1]["content"] == "slow":
            try:
                await for_ever()
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return "quick"

    calls = TreeCalls(LMHandler(FunctionClient(reply)), Ledger(Limits()), TreeEvents("t", []))
    slots = await calls.slots(CALLER, query("slow", "fast", timeout_s=20))
    assert slots == [Slot(error="not done within timeout_s = 20"), Slot(text="quick")]
    assert cancelled == 1


async def test_no_prompts_are_no_calls() -> None:
    calls, ledger = calls_with(Counting(), Limits())
    assert await calls.slots(CALLER, query()) == []
    assert ledger.calls == 0


def test_content_parts_count_like_text() -> None:
    def chars(content: Any) -> int:
        return LMRequest((ChatMessage("system", "ab"), ChatMessage("user", content))).chars

    assert chars("x" * 300) == chars([{"type": "text", "text": "x" * 300}]) == 302
    assert chars([{"type": "image_url", "image_url": {"url": "data:"}}]) == 2 + PICTURE_CHARS


async def test_answers_that_batches_hold_are_bounded() -> None:
    class Verbose(Counting):
        async def complete(self, request: LMRequest) -> LMReply:
            self.requests.append(request)
            return LMReply("x" * (MOST_ANSWER_BYTES // 4), Usage(1, 1, 1, None))

    calls, _ = calls_with(Verbose(), Limits())
    for _ in range(2):  # what the first batch held is given back
        slots = await calls.slots(CALLER, query(*"abcdef"))
        kept = [slot for slot in slots if slot.error is None]
        assert 2 <= len(kept) <= 4
        assert all("was dropped" in (slot.error or "") for slot in slots if slot not in kept)


async def test_waiting_batches_are_data_and_leave_at_once() -> None:
    client = Hanging()
    calls = TreeCalls(
        LMHandler(client), Ledger(Limits(max_concurrent_calls=4)), TreeEvents("t", [list[Event]().append])
    )
    before = len(asyncio.all_tasks())
    batches = [asyncio.create_task(calls.slots(CALLER, query(*map(str, range(100))))) for _ in range(500)]
    await client.asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) - before <= 500 + 8  # a task for each batch, and for each call that runs
    for batch in batches:
        batch.cancel()
    await asyncio.wait(batches)
    assert calls._places.waiting == 0
    assert calls._places.take()


# -- prompts of code, as they reach a client and the events -----------------------------------------------------------

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ASKED = Query(
    "1:1",
    "llm",
    [
        [
            MessagePart("system", "brief"),
            MessagePart("user", "a"),
            MessagePart("assistant", "b"),
            MessagePart("user", [TextPart("c"), ImagePart(ImageUrl("data:image/png;base64,AA=="))]),
        ]
    ],
    temperature=0.5,
)


async def test_messages_reach_the_client_with_their_roles() -> None:
    client = Counting()
    calls, _ = calls_with(client, Limits())
    await calls.slots(CALLER, ASKED)
    await calls.slots(CALLER, Query("1:2", "llm", [[TextPart("a")]], system="s"))
    first, second = client.requests
    assert first.messages == (
        ChatMessage("system", "brief"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b"),
        ChatMessage("user", [{"type": "text", "text": "c"}, PICTURE]),
    )
    assert second.messages == (ChatMessage("system", "s"), ChatMessage("user", [{"type": "text", "text": "a"}]))
    assert (first.temperature, second.temperature) == (0.5, None)


async def test_event_has_the_whole_conversation_that_code_asks_with() -> None:
    events: list[Event] = []
    calls, _ = calls_with(Counting(), Limits(), events)
    caller = type(CALLER)("1", 1, None, block=1)
    await calls.slots(caller, ASKED)
    await calls.slots(caller, Query("1:2", "llm", ["a"], system="s"))
    told = [(event.prompt, event.system) for event in events if isinstance(event, CallStarted)]
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, PICTURE]},
    ]
    assert told == [(conversation, None), ("a", "s")]


REMOTE: list[Part] = [ImagePart(ImageUrl("http://169.254.169.254/"))]


async def test_prompt_that_is_not_sent_fills_its_slot() -> None:
    cases: list[tuple[Prompt, str | None, str]] = [
        ([MessagePart("user", "a"), TextPart("b")], None, "content parts or chat messages, not both"),
        ([MessagePart("system", "a"), MessagePart("user", "b")], "s", "takes no system prompt beside it"),
        ([MessagePart("user", REMOTE)], None, "an image is given as data:"),
        ([*REMOTE], None, "an image is given as data:"),
    ]
    for prompt, system, said in cases:
        client = Counting()
        calls, _ = calls_with(client, Limits())
        first, second = await calls.slots(CALLER, Query("1:1", "llm", [prompt, "fine"], system=system))
        assert said in (first.error or "")
        assert second.text == "FINE"
        assert len(client.requests) == 1


# -- what a killed block has paid for --------------------------------------------------------------------------------


def asked(text: Any, **fields: Any) -> LMRequest:
    return LMRequest((ChatMessage("user", text),), depth=1, **fields)


def answer(text: str, extra: dict[str, Any] | None = None) -> Call:
    return Call("m", text, Usage(1, 10, 20), 0.1, extra=extra)


async def test_killed_block_has_the_calls_of_all_runs_below_it() -> None:
    """Also those of ended blocks of children; but not those of its siblings, nor those of the block that waits for it."""
    paid = BlockCalls()
    for run in ("1", "1.1", "1.2"):
        paid.begin(run)
    for run in ("1", "1.1", "1.2", "1.1.1"):
        paid.add(run, asked(run), answer(f"in {run}"))
    paid.add("1.10", asked("loop"), answer("turn of another child"))
    assert (await paid.remember("1.1"), paid.remembered) == (2, 2)
    paid.end("1.1")
    paid.end("1.2")
    for text, found in (("1.2", None), ("1.1", "in 1.1"), ("1.1", None)):
        call = await paid.take(asked(text))
        assert (call and call.response) == found
    assert await paid.remember("1") == 3
    paid.end("1")
    assert {(await paid.take(asked(text)) or answer("")).response for text in ("1", "1.2", "loop", "1.1.1")} == {
        *("in 1", "in 1.2", "turn of another child", "in 1.1.1")
    }
    assert (paid.open, paid.remembered, paid.taken, paid._size) == ({}, 0, 5, 0)


async def test_paid_calls_are_bounded_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, pictures, answers and what a server gives beside them count until the block ends, then answers alone."""
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6_000}}]
    monkeypatch.setattr(module, "MOST_PAID_BYTES", 10_000)
    paid = BlockCalls()
    for text, reply, extra in (
        ("p" * 6_000, "", None),
        (picture, "", None),
        ("p", "r" * 6_000, None),
        ("p", "", {"a": 1}),
    ):
        paid.begin("1")
        for _ in range(10):
            paid.add("1", asked(text), answer(reply, extra))
        assert len(paid.open["1"]) == (4 if extra else 1)
        paid.end("1")
        assert paid._size == 0
    shared = (ChatMessage("system", "s" * 6_000), ChatMessage("user", "p"))
    paid.begin("1")
    for _ in range(10):
        paid.add("1.1", LMRequest(shared, is_loop=True), answer("r"))
    assert await paid.remember("1") == 10  # a child's turns share their messages
    assert paid._size < 1_000
    paid.end("1")
    assert paid._size < 1_000


async def test_remembered_call_is_not_counted_and_waits_for_no_means() -> None:
    client = Counting()
    calls, ledger = calls_with(client, Limits(max_llm_calls=2, max_tokens=1_000, max_completion_tokens=5))
    calls.paid.begin("1")
    await calls.slots(CALLER, query("a", "b"))
    assert await calls.paid.remember("1") == 2
    assert await calls.slots(CALLER, query("b", "a", "c")) == [
        *(Slot("B"), Slot("A"), Slot(error="the limit max_llm_calls = 2 was reached, 2 used"))
    ]
    assert (ledger.calls, ledger.summary().total, len(client.requests)) == (2, Usage(2, 6, 4, 1.0), 2)
