"""State machines of what is shared: never overspent, no lost wake-up, no session starved, in any order of events."""

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from rlm_broker.broker import client_queue
from rlm_broker.broker.client_queue import ClientQueue, PendingCall, Serving
from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.transport.session import Session, State
from rlm_broker.concurrency import deadline
from rlm_broker.concurrency.turns import SPAN_S, FairSemaphore, RateWindow
from rlm_broker.errors import LimitReached, ModelFailed, ProtocolViolation
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage
from rlm_broker.run.ledger import Hold, Ledger
from rlm_broker.usage import Usage
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Message, Output, Query, Ready, Reply, Result, Slot, encode

SETTINGS = settings(stateful_step_count=30, derandomize=True)
STEPS = 20
"""Turns of the loop after which everything that can go on has gone on."""
SESSIONS = st.sampled_from("abcd")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a number that the machine sets."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run what can run at this time."""
        for _ in range(STEPS):
            self.call_soon(self.stop)
            self.run_forever()


class OnLoop(RuleBasedStateMachine):
    """A machine whose subject lives on an event loop with virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self.loop.create_task(work)
        self.tasks.append(task)
        return task

    def teardown(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.loop.settle()
        for task in self.tasks:
            assert task.done()
            if not task.cancelled():
                task.exception()
        self.loop.close()


# -- fair turns --------------------------------------------------------------------------------------------------------


class FairTurns(OnLoop):
    """Sessions that take places, wait for them, give them back, and give up at any moment."""

    @initialize(places=st.integers(1, 3))
    def begin(self, places: int) -> None:
        self.places = places
        self.slots = FairSemaphore(places)
        self.held: list[str] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.overtaken: dict[str, Counter[str]] = {}

    @rule(session=SESSIONS)
    def ask(self, session: str) -> None:
        task = self.start(self.slots.acquire(session))
        self.waiting.append((session, task))
        self._settle()

    @rule(session=SESSIONS)
    def take(self, session: str) -> None:
        if self.slots.take():
            assert not self.waiting, "a place was taken past those who wait"
            self.held.append(session)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.held.remove(data.draw(st.sampled_from(self.held)))
        self.slots.release()
        self._settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), release_too=st.booleans())
    def give_up(self, data: st.DataObject, release_too: bool) -> None:
        """Cancel a wait, perhaps in the same step in which its place comes."""
        session, task = data.draw(st.sampled_from(self.waiting))
        if release_too and self.held:
            self.held.pop()
            self.slots.release()
        task.cancel()
        self.loop.settle()
        self.waiting.remove((session, task))
        assert task.cancelled()
        self.overtaken.pop(session, None)  # its session's turn may have come just then, and is used up
        self._settle()

    def _settle(self) -> None:
        self.loop.settle()
        granted = [entry for entry in self.waiting if entry[1].done()]
        self.waiting = [entry for entry in self.waiting if not entry[1].done()]
        still = {session for session, _ in self.waiting}
        for session, _ in granted:
            self.held.append(session)
            self.overtaken.pop(session, None)
            for other in still - {session}:
                self.overtaken.setdefault(other, Counter())[session] += 1
        self.overtaken = {session: count for session, count in self.overtaken.items() if session in still}

    @invariant()
    def never_more_than_there_are(self) -> None:
        assert len(self.held) <= getattr(self, "places", math.inf)

    @invariant()
    def no_place_is_free_while_a_session_waits(self) -> None:
        if getattr(self, "waiting", None):
            assert len(self.held) == self.places

    @invariant()
    def no_session_is_passed_twice_by_another(self) -> None:
        for session, passed in getattr(self, "overtaken", {}).items():
            assert max(passed.values()) <= 1, (session, passed)


# -- the ledger --------------------------------------------------------------------------------------------------------

TOKENS, COST_USD, MAX_OUTPUT = 20, 0.5, 10
"""Resources that each call really uses, and the most output that it may have."""


class Spending(OnLoop):
    """Calls that set aside what they may cost, wait for what is left, settle, fail, or are given up."""

    @initialize(
        calls=st.none() | st.integers(1, 12),
        tokens=st.none() | st.integers(1, 200),
        budget=st.none() | st.floats(0.1, 5),
    )
    def begin(self, calls: int | None, tokens: int | None, budget: float | None) -> None:
        self.limits = Limits(max_llm_calls=calls, max_tokens=tokens, max_budget_usd=budget)
        self.ledger = Ledger(self.limits)
        self.waiting: list[asyncio.Task[Hold]] = []
        self.open: list[Hold] = []
        self.settled = self.charged = 0

    @rule(is_bounded=st.booleans())
    def hold(self, is_bounded: bool) -> None:
        # Ten tokens of input, and ten of output at most: what is thought to be used is what is used.
        self.waiting.append(self.start(self.ledger.hold(30, MAX_OUTPUT if is_bounded else None)))
        self._settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.settled += 1
        self.ledger.settle(self._taken(data), "1", "m", 0, Usage(1, TOKENS - MAX_OUTPUT, MAX_OUTPUT, COST_USD), 0)
        self._settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        hold = self._taken(data)
        for _ in range(2):
            self.ledger.release(hold)
        self._settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting)).cancel()
        self._settle()

    @rule()
    def charge(self) -> None:
        try:
            self.ledger.charge_call()
            self.charged += 1
        except LimitReached:
            assert self._is_spent() or self.charged == self.limits.max_llm_calls

    def _taken(self, data: st.DataObject) -> Hold:
        return self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))

    def _settle(self) -> None:
        self.loop.settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if task.cancelled():
                continue
            if isinstance(task.exception(), LimitReached):
                assert self._is_spent()
            else:
                self.open.append(task.result())

    def _is_spent(self) -> bool:
        tokens, budget = self.limits.max_tokens, self.limits.max_budget_usd
        return (tokens is not None and self.settled * TOKENS >= tokens) or (
            budget is not None and self.settled * COST_USD >= budget - 1e-9
        )

    @invariant()
    def overspent_by_one_call_at_most(self) -> None:
        if not hasattr(self, "limits"):
            return
        together = self.settled + len(self.open) - 1  # as if all but one had been enough
        if self.limits.max_tokens is not None and self.settled + len(self.open):
            assert together * TOKENS < self.limits.max_tokens
        if self.limits.max_budget_usd is not None and self.settled + len(self.open):
            assert together * COST_USD < self.limits.max_budget_usd
        if self.limits.max_llm_calls is not None:
            assert self.ledger.calls == self.charged <= self.limits.max_llm_calls

    @invariant()
    def no_call_waits_for_nothing(self) -> None:
        assert not getattr(self, "waiting", None) or self.open

    @invariant()
    def what_was_used_is_what_was_settled(self) -> None:
        if hasattr(self, "ledger"):
            used = self.ledger.summary().total
            assert used.total_input_tokens + used.total_output_tokens == self.settled * TOKENS


# -- rates -------------------------------------------------------------------------------------------------------------


class Rates(RuleBasedStateMachine):
    """Amounts that pass as soon as they fit, and are corrected downwards afterwards."""

    entries = Bundle("entries")

    @initialize(most=st.integers(1, 20))
    def begin(self, most: int) -> None:
        self.most = most
        self.window = RateWindow(most)
        self.now = 0.0
        self.passed: list[list[float]] = []

    @rule(target=entries, amount=st.integers(1, 25), waits=st.booleans())
    def use(self, amount: int, waits: bool) -> Any:
        wait_s = self.window.wait_s(amount, self.now)
        if wait_s > 0:
            assert wait_s <= SPAN_S
            assert self.window.wait_s(amount, self.now + wait_s / 2) > 0, "it would have fitted before"
            if not waits:
                return None
            self.now += wait_s
            assert self.window.wait_s(amount, self.now) <= 0, "it does not fit when it was said to"
        self.passed.append([self.now, amount])
        return self.window.use(amount, self.now), self.passed[-1]

    @rule(seconds=st.integers(0, 80))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(entry=consumes(entries), share=st.sampled_from([0, 0.5, 1]))
    def correct(self, entry: Any, share: float) -> None:
        if entry is not None:
            entered, passed = entry
            passed[1] *= share
            self.window.correct(entered, passed[1])

    @invariant()
    def within_the_bound_in_any_minute(self) -> None:
        for when, _ in getattr(self, "passed", []):
            within = [amount for other, amount in self.passed if when - SPAN_S < other <= when]
            assert sum(within) <= self.most or len([amount for amount in within if amount]) == 1


# -- client queues -----------------------------------------------------------------------------------------------------


class Commanded(BaseClient):
    """A client whose calls end as the machine says."""

    model_name = "commanded"

    def __init__(self) -> None:
        self.open: list[asyncio.Future[LMReply]] = []
        self.started: list[float] = []

    async def complete(self, _request: LMRequest) -> LMReply:
        answer: asyncio.Future[LMReply] = asyncio.get_running_loop().create_future()
        self.open.append(answer)
        self.started.append(asyncio.get_running_loop().time())
        try:
            return await answer
        finally:
            self.open.remove(answer)


class Queue(OnLoop):
    """Calls on their way to one client: bounded, paced, retried, cancelled and timed out."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimpleNamespace(monotonic=self.loop.time)
        self.patched = [mock.patch.object(module, "time", self.clock) for module in (client_queue, deadline)]
        for each in self.patched:
            each.start()

    def teardown(self) -> None:
        """All that wait come to an end when the client answers and time passes: no wake-up is lost."""
        calls = [task for task in self.tasks if not task.done()]
        for _ in range(40 * (len(calls) + 1)):
            for answer in list(self.client.open):
                if not answer.done():
                    answer.set_result(LMReply("done", Usage(1, 1, 1)))
            self.loop.now += 10
            self.loop.settle()
            self.within_its_bounds()
        try:
            assert all(task.done() for task in calls)
            assert self.queue._places.take()
        finally:
            super().teardown()
            for each in self.patched:
                each.stop()

    @initialize(most=st.integers(1, 3), per_minute=st.none() | st.integers(2, 6), retries=st.integers(0, 2))
    def begin(self, most: int, per_minute: int | None, retries: int) -> None:
        self.most, self.per_minute = most, per_minute
        self.client = Commanded()
        self.queue = ClientQueue(
            self.client, Serving(max_concurrent=most, requests_per_minute=per_minute, max_retries=retries)
        )

    @rule(session=SESSIONS, limit_s=st.sampled_from([5, 1e6]))
    def call(self, session: str, limit_s: float) -> None:
        request = LMRequest((ChatMessage("user", "?"),))
        self.start(self.queue.run(PendingCall(request, limit_s, session)))
        self.loop.settle()

    @precondition(lambda self: self.client.open)
    @rule(data=st.data(), outcome=st.sampled_from(["reply", "transient", "provider", "busy"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        answer = data.draw(st.sampled_from(self.client.open))
        if outcome == "reply":
            answer.set_result(LMReply("done", Usage(1, 1, 1)))
        elif outcome == "busy":
            answer.set_exception(ModelFailed("busy", "transient", 7.0))
        else:
            answer.set_exception(ModelFailed("it failed", outcome))  # type: ignore[arg-type]
        self.loop.settle()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tasks)).cancel()
        self.loop.settle()

    @rule(seconds=st.sampled_from([0.1, 1, 6, 30, 61]))
    def pass_time(self, seconds: float) -> None:
        self.loop.now += seconds
        self.loop.settle()

    @invariant()
    def within_its_bounds(self) -> None:
        if hasattr(self, "client"):
            assert len(self.client.open) <= self.most
            for when in self.client.started if self.per_minute else ():
                assert sum(when - SPAN_S < each <= when for each in self.client.started) <= (self.per_minute or 0)


# -- a session ---------------------------------------------------------------------------------------------------------


class Conversation(RuleBasedStateMachine):
    """A REPL that says anything at any time, cut anywhere, and an orchestrator that executes and replies."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(10_000)
        self.block = self.number = 0
        self.open: set[str] = set()
        self.is_ready = self.is_running = self.is_closed = False

    def hear(self, message: Message, is_legal: bool, cut: int) -> None:
        stream = encode_frame(encode(message), 10_000)
        if self.is_closed:
            return
        try:
            heard = []
            for part in (stream[:cut], stream[cut:]):
                self.session.feed(part)
                while (each := self.session.next_message()) is not None:
                    heard.append(each)
        except ProtocolViolation:
            assert not is_legal
            self._end()
        else:
            assert is_legal
            assert [type(each) for each in heard] == [type(message)]

    @precondition(lambda self: not self.is_ready)
    @rule(cut=st.integers(0, 30))
    def ready(self, cut: int) -> None:
        self.hear(Ready(RELEASE), True, cut)
        self.is_ready = True

    @precondition(lambda self: self.is_running)
    @rule(cut=st.integers(0, 80))
    def query(self, cut: int) -> None:
        self.number += 1
        name = f"{self.block}:{self.number}"
        self.hear(Query(id=name, want="llm", prompts=["?"]), True, cut)
        if not self.is_closed:
            self.open.add(name)

    @precondition(lambda self: self.is_running)
    @rule(cut=st.integers(0, 50))
    def output(self, cut: int) -> None:
        self.hear(Output(block=self.block, stream="stdout", text="x"), True, cut)

    @precondition(lambda self: self.is_running)
    @rule(cut=st.integers(0, 50))
    def result(self, cut: int) -> None:
        self.hear(Result(block=self.block, status="ok"), True, cut)
        self.is_running = False

    @rule(cut=st.integers(0, 50), is_daring=st.integers(0, 9), data=st.data())
    def speak_out_of_turn(self, cut: int, is_daring: int, data: st.DataObject) -> None:
        """Break the rules once in ten times: it is the end of the conversation."""
        wrong: list[Message] = [
            Query(id=f"{self.block - 1}:1", want="llm", prompts=["?"]),
            Output(block=self.block + 1, stream="stdout", text="x"),
            *([Ready(RELEASE)] if self.is_ready else []),
            *([] if self.is_running else [Result(block=self.block, status="ok")]),
            *(Query(id=name, want="llm", prompts=["?"]) for name in sorted(self.open)[:1]),
        ]
        if is_daring == 9:
            self.hear(data.draw(st.sampled_from(wrong)), False, cut)

    @precondition(lambda self: self.is_ready and not self.is_running)
    @rule()
    def execute(self) -> None:
        try:
            self.session.execute("1")
        except ProtocolViolation:
            assert self.is_closed
        else:
            assert not self.is_closed
            self.block, self.is_running = self.block + 1, True

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.session.reply(Reply(id=name, slots=[Slot(text="!")]))
        self.open.discard(name)

    @rule()
    def reply_to_nothing(self) -> None:
        try:
            self.session.reply(Reply(id="0:0", slots=[]))
        except ProtocolViolation:
            return
        raise AssertionError

    def _end(self) -> None:
        self.is_closed, self.is_running = True, False
        self.open.clear()

    @invariant()
    def what_is_open_is_known_and_weighed(self) -> None:
        assert set(self.session.open_queries) == self.open
        assert self.session.open_weight == sum(self.session.open_queries.values())
        assert (self.session.state is State.CLOSED) == self.is_closed


TestFairTurns = FairTurns.TestCase
TestSpending = Spending.TestCase
TestRates = Rates.TestCase
TestQueue = Queue.TestCase
TestConversation = Conversation.TestCase
for _case in (TestFairTurns, TestSpending, TestRates, TestQueue, TestConversation):
    _case.settings = SETTINGS
del _case
