"""The queue before a client: its attempts, its pace and its fallbacks."""

import asyncio
import itertools
import random
import time
from typing import Any, cast

import pytest

from rlm_broker.broker.client_queue import BACKOFF_S, ClientQueue, PendingCall, Serving
from rlm_broker.broker.clients.base import BaseClient, Client, LMReply, LMRequest
from rlm_broker.concurrency.turns import SPAN_S
from rlm_broker.errors import FailureCause, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from rlm_broker.values.stats import ClientStats
from tests.support.waiting import for_ever, turns

REQUEST = LMRequest((ChatMessage("user", "hello"),))


pytestmark = pytest.mark.usefixtures("leaping_clock")


class Failing:
    """Fails as it is told, then answers; notes when it was asked."""

    def __init__(self, *failures: ModelFailed | FailureCause, name: str = "failing", tokens: int = 0) -> None:
        self.model_name = name
        self.asked: list[float] = []
        self._failures = list(failures)
        self._tokens = tokens

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        self.asked.append(time.monotonic())
        if self._failures:
            failure = self._failures.pop(0)
            raise failure if isinstance(failure, ModelFailed) else ModelFailed(f"{self.model_name}: no", failure)
        return LMReply(self.model_name, Usage(1, self._tokens // 2, self._tokens // 2))

    async def aclose(self) -> None:
        """Close no connection: there is none."""


def times(number: int, cause: FailureCause) -> list[FailureCause]:
    return [cause] * number


class Answering(Failing):
    """Answers each call with one object, raises it if it is an error, or awaits what it returns."""

    def __init__(self, answer: object) -> None:
        super().__init__(name="answering")
        self._answer = answer

    async def complete(self, request: LMRequest) -> LMReply:
        await super().complete(request)
        if isinstance(self._answer, BaseException):
            raise self._answer
        answer: Any = await self._answer() if callable(self._answer) else self._answer
        return cast("LMReply", answer)


def handler_of(client: Client, serving: Serving) -> LMHandler:
    handler = LMHandler(client)
    handler.serve(client, serving)
    return handler


def queue_of(client: Client, serving: Serving) -> ClientQueue:
    return ClientQueue(cast("BaseClient", client), serving)


async def test_transient_failure_is_retried_as_often_as_allowed() -> None:
    told: list[tuple[int, float, str]] = []
    client = Failing("transient", "transient")
    call = await LMHandler(client).complete(client, REQUEST, on_retry=lambda *what: told.append(what))
    assert call.response == "failing"
    assert len(client.asked) == 3
    assert [(attempt, why) for attempt, _, why in told] == [(2, "failing: no"), (3, "failing: no")]
    stubborn = Failing("transient", "transient", "transient")
    with pytest.raises(ModelFailed, match="no"):
        await handler_of(stubborn, Serving(max_retries=1)).complete(stubborn, REQUEST)
    assert len(stubborn.asked) == 2


@pytest.mark.parametrize("cause", ["request", "provider"])
async def test_permanent_failure_is_not_retried(cause: FailureCause) -> None:
    client = Failing(cause)
    with pytest.raises(ModelFailed):
        await LMHandler(client).complete(client, REQUEST)
    assert len(client.asked) == 1


async def test_waits_grow_and_differ() -> None:
    waits: list[float] = []
    for _ in range(8):
        client = Failing("transient", "transient", "transient")
        await LMHandler(client).complete(client, REQUEST, on_retry=lambda _, wait_s, __: waits.append(wait_s))
    assert len(waits) == 24
    for number, wait_s in enumerate(waits):
        assert 0.5 * BACKOFF_S * 2 ** (number % 3) <= wait_s <= BACKOFF_S * 2 ** (number % 3)
    assert len(set(waits)) == 24


async def test_call_waits_for_the_providers_time() -> None:
    client = Failing(ModelFailed("slow down", "transient", retry_after_s=30))
    handler = LMHandler(client)
    first = asyncio.create_task(handler.complete(client, REQUEST))
    while not client.asked:
        await asyncio.sleep(0)
    await turns()
    await asyncio.gather(first, *(handler.complete(client, REQUEST) for _ in range(5)))
    assert len(client.asked) == 7
    assert all(when - client.asked[0] >= 30 for when in client.asked[1:])


async def test_wait_above_the_calls_time_fails_at_once() -> None:
    client = Failing(ModelFailed("come back tomorrow", "transient", retry_after_s=86_400))
    before = time.monotonic()
    with pytest.raises(ModelFailed, match="come back tomorrow"):
        await LMHandler(client).complete(client, REQUEST, 5)
    assert len(client.asked) == 1
    assert time.monotonic() == before


async def test_slow_attempt_is_followed_by_another() -> None:
    class Slow(Failing):
        async def complete(self, request: LMRequest) -> LMReply:
            if not self.asked:
                self.asked.append(0)
                await for_ever()
            return await super().complete(request)

    client = Slow()
    call = await handler_of(client, Serving(attempt_timeout_s=5)).complete(client, REQUEST, 60)
    assert call.response == "failing"


async def test_time_in_the_queue_is_not_the_calls_time() -> None:
    class Short(Failing):
        async def complete(self, request: LMRequest) -> LMReply:
            await asyncio.sleep(10)
            return await super().complete(request)

    client = Short()
    handler = handler_of(client, Serving(max_concurrent=1))
    calls = await asyncio.gather(*(handler.complete(client, REQUEST, 50) for _ in range(10)))
    assert len(calls) == 10


async def test_requests_over_their_rate_wait_and_are_not_refused() -> None:
    client = Failing()
    handler = handler_of(client, Serving(requests_per_minute=5))
    await asyncio.gather(*(handler.complete(client, REQUEST) for _ in range(15)))
    for start in client.asked:
        assert sum(start <= when < start + SPAN_S - 0.001 for when in client.asked) <= 5


async def test_rate_is_used_up_and_sessions_take_turns_at_it() -> None:
    client = Failing()
    queue = queue_of(client, Serving(requests_per_minute=2, max_concurrent=9))
    began, order = time.monotonic(), list[str]()

    async def call(session: str) -> None:
        await queue.run(PendingCall(REQUEST, 60, session))
        order.append(session)

    for _ in range(2):
        await call("many")
    await asyncio.sleep(SPAN_S - 0.5)
    await asyncio.gather(*(call("many") for _ in range(8)), *(call("few") for _ in range(2)))
    after_s = [when - began for when in client.asked]
    assert after_s == pytest.approx([minute * SPAN_S for minute in range(6) for _ in range(2)], abs=0.02)
    assert order == ["many"] * 4 + ["few", "many", "few"] + ["many"] * 5


async def test_mean_output_moves_by_an_eighth() -> None:
    queue = queue_of(Failing(tokens=160), Serving(tokens_per_minute=10_000, max_concurrent=1))
    for mean in (10, 18.75):
        await queue.run(PendingCall(REQUEST, 60))
        assert queue._output_tokens == mean
    assert queue.stats() == ClientStats("failing", 0, 0, False)


async def test_success_forgets_the_failures_before_it() -> None:
    client = Failing(*times(2, "provider"))
    queue = queue_of(client, Serving(max_concurrent=1))
    for failures in (2, 2, 3):
        client._failures = [*times(failures, "provider")]
        for _ in range(failures):
            assert not queue.is_cooling
            with pytest.raises(ModelFailed):
                await queue.run(PendingCall(REQUEST, 60))
        assert queue.is_cooling == (failures == 3)
        await queue.run(PendingCall(REQUEST, 60))


async def test_token_rate_counts_what_was_really_used() -> None:
    client = Failing(tokens=50)
    handler = handler_of(client, Serving(tokens_per_minute=100, max_concurrent=1))
    await asyncio.gather(*(handler.complete(client, REQUEST) for _ in range(6)))
    assert len(client.asked) == 6
    for start in client.asked:
        assert sum(start <= when < start + SPAN_S - 0.001 for when in client.asked) <= 2


async def test_fallback_answers_unless_the_request_is_faulty() -> None:
    spare = Failing(name="spare")
    broken = Failing("provider", "provider", "request", name="broken")
    handler = handler_of(broken, Serving(fallbacks=(spare,)))
    call = await handler.complete(broken, REQUEST)
    assert (call.root_model, call.response) == ("spare", "spare")
    assert handler.get_usage_summary().model_usage_summaries.keys() == {"spare"}
    await handler.complete(broken, REQUEST)
    with pytest.raises(ModelFailed, match="broken: no"):
        await handler.complete(broken, REQUEST)
    assert len(spare.asked) == 2


async def test_when_all_fail_the_error_names_each() -> None:
    one, other = Failing("provider", name="one"), Failing("provider", name="other")
    with pytest.raises(ModelFailed, match=r"^one: no; other: no$"):
        await handler_of(one, Serving(fallbacks=(other,))).complete(one, REQUEST)


async def test_sessions_take_turns_at_a_client_that_is_busy() -> None:
    order: list[object] = []

    class Noting(Failing):
        async def complete(self, request: LMRequest) -> LMReply:
            order.append(request.messages[0].content)
            await asyncio.sleep(0)
            return await super().complete(request)

    client = Noting()
    handler = handler_of(client, Serving(max_concurrent=1))

    async def ask(session: str) -> None:
        await handler.complete(client, LMRequest((ChatMessage("user", session),)), session=session)

    await asyncio.gather(*(ask("many") for _ in range(100)), *(ask("few") for _ in range(5)))
    assert order[:11].count("few") == 5


async def test_provider_that_asks_for_a_pause_is_skipped() -> None:
    spare = Failing(name="spare")
    busy = Failing(ModelFailed("later", "transient", retry_after_s=3600), name="busy")
    handler = handler_of(busy, Serving(fallbacks=(spare,)))
    before = time.monotonic()
    for _ in range(3):
        call = await handler.complete(busy, REQUEST, 60)
        assert call.root_model == "spare"
    assert time.monotonic() == before
    assert len(busy.asked) == 1


async def test_waiting_for_a_provider_counts_as_the_calls_time() -> None:
    client = Failing(*[ModelFailed("later", "transient", retry_after_s=60)] * 6)
    handler = LMHandler(client)
    started = time.monotonic()
    done = await asyncio.gather(*(handler.complete(client, REQUEST, 100) for _ in range(6)), return_exceptions=True)
    assert time.monotonic() - started <= 110  # waits differ by a tenth
    assert any(isinstance(each, ModelFailed) for each in done)


async def test_counts_that_cannot_be_are_unknown() -> None:
    impossible = [
        Usage(1, -1000, 5, 0.1),
        Usage(1, 10, 5, -3.0),
        Usage(1, 10, 5, float("nan")),
        Usage(1, 10, 5, float("inf")),
        Usage(1, 10, 5, 0.1, cached_input_tokens=-1),
        Usage(1, 2.5, 5, 0.1),  # type: ignore[arg-type]
    ]
    for usage in impossible:
        client = Answering(LMReply("x", usage))
        counted = (await LMHandler(client).complete(client, REQUEST)).usage
        assert counted.total_cost is None
        assert counted.total_input_tokens in (0, 10)
        assert counted.total_output_tokens == 5
    for usage in (Usage(1, 0, 0, 0.0), Usage(1, 1, 1, None), Usage(1, 9, 9, 0.5, cached_input_tokens=9)):
        client = Answering(LMReply("x", usage))
        assert (await LMHandler(client).complete(client, REQUEST)).usage == usage


async def test_whatever_a_client_does_is_a_reply_or_a_failure() -> None:
    cases: list[tuple[object, str]] = [
        ("text", "the client returned str, not LMReply"),
        (LMReply(5, Usage(1)), "the text of the client's reply is int, not str"),  # type: ignore[arg-type]
        (LMReply("x", None), "the usage of the client's reply is NoneType, not Usage"),  # type: ignore[arg-type]
        (asyncio.CancelledError(), "the client cancelled its own call"),
        (ZeroDivisionError("of theirs"), "ZeroDivisionError: of theirs"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit("now"), "GeneratorExit: now"),
    ]
    for answer, said in cases:
        client = Answering(answer)
        with pytest.raises(ModelFailed, match=f"^answering: {said}$"):
            await LMHandler(client).complete(client, REQUEST)
        assert len(client.asked) == 1


async def test_call_that_is_cancelled_is_no_failure() -> None:
    client = Answering(for_ever)
    call = asyncio.create_task(LMHandler(client).complete(client, REQUEST))
    while not client.asked:
        await asyncio.sleep(0)
    await turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_end_of_the_time_says_whose_time_it_was() -> None:
    client = Answering(for_ever)
    with pytest.raises(ModelFailed, match=r"^answering: no answer within 5 s$") as late:
        await handler_of(client, Serving(attempt_timeout_s=5, max_retries=0)).complete(client, REQUEST, 60)
    assert late.value.cause == "transient"
    with pytest.raises(ModelFailed, match=r"^llm_query timed out after 7s$") as late:
        await handler_of(client, Serving(attempt_timeout_s=8)).complete(client, REQUEST, 7)
    assert late.value.cause == "transient"


async def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    waits: list[float] = []
    client = Failing(*times(9, "transient"))
    handler = handler_of(client, Serving(max_retries=9))
    await handler.complete(client, REQUEST, 1_000, on_retry=lambda _, wait_s, __: waits.append(wait_s))
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [after - before for before, after in itertools.pairwise(client.asked)] == pytest.approx(waits, abs=0.01)


async def test_failing_call_is_attempted_five_times_by_default() -> None:
    client = Failing(*times(9, "transient"))
    with pytest.raises(ModelFailed, match="failing: no"):
        await LMHandler(client).complete(client, REQUEST, 1_000)
    assert len(client.asked) == 5


async def test_client_is_cooling_for_half_a_minute_by_default() -> None:
    spare, broken = Failing(name="spare"), Failing(*times(3, "provider"), name="broken")
    handler = handler_of(broken, Serving(fallbacks=(spare,)))
    for after_s, answers in ((0, "spare"), (0, "spare"), (0, "spare"), (29.5, "spare"), (1, "broken")):
        await asyncio.sleep(after_s)
        assert (await handler.complete(broken, REQUEST)).root_model == answers
    assert len(broken.asked) == 4


async def test_call_that_cannot_outwait_the_provider_fails_at_once() -> None:
    client = Failing(ModelFailed("slow down", "transient", retry_after_s=30))
    handler = LMHandler(client)
    first = asyncio.create_task(handler.complete(client, REQUEST, 100))
    while not client.asked:
        await asyncio.sleep(0)
    await turns()
    before = time.monotonic()
    with pytest.raises(ModelFailed, match=r"^failing: the provider takes no request for another 30\.0 s$") as refused:
        await handler.complete(client, REQUEST, 29)
    assert (time.monotonic(), refused.value.cause) == (before, "transient")
    assert (await first).response == "failing"


@pytest.mark.parametrize(("fallbacks", "share_s"), [(1, 20), (3, 10)])
async def test_fallbacks_have_equal_shares_of_the_time(fallbacks: int, share_s: float) -> None:
    spares = [Failing("provider", name=f"spare {number}") for number in range(fallbacks - 1)]
    hanging, last = Answering(for_ever), Failing(name="last")
    handler = handler_of(hanging, Serving(fallbacks=(*spares, last), max_retries=0))
    before = time.monotonic()
    assert (await handler.complete(hanging, REQUEST, 40)).root_model == "last"
    assert last.asked[0] - before == pytest.approx(share_s, abs=0.01)


async def test_time_of_an_attempt_goes_before_a_share() -> None:
    hanging, spare = Answering(for_ever), Failing(name="spare")
    handler = handler_of(hanging, Serving(fallbacks=(spare,), max_retries=0, attempt_timeout_s=5))
    before = time.monotonic()
    assert (await handler.complete(hanging, REQUEST, 40)).root_model == "spare"
    assert spare.asked[0] - before == pytest.approx(5, abs=0.01)


def test_time_that_is_spent_is_not_left() -> None:
    left_s = {0: 5, 4: 1, 5: 0, 7: 0}
    assert {spent_s: PendingCall(REQUEST, 5, spent_s=spent_s).left_s for spent_s in left_s} == left_s


async def test_announced_tokens_count_before_the_call() -> None:
    """A call is expected to use all of the tokens that it allows."""
    client = Answering(lambda: asyncio.sleep(90, LMReply("x", Usage(1, 10))))
    handler = handler_of(client, Serving(tokens_per_minute=100))
    asked = LMRequest(REQUEST.messages, max_completion_tokens=60)
    await asyncio.gather(*(handler.complete(client, asked) for _ in range(2)))
    assert client.asked[1] - client.asked[0] >= SPAN_S - 0.001


async def test_fallback_that_takes_over_is_logged_once_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    broken, spare = Failing("provider", "provider", name="broken"), Failing(name="spare")
    handler = handler_of(broken, Serving(fallbacks=(spare,), cooldown_s=1))
    for _ in range(3):
        await handler.complete(broken, REQUEST)
    broken._failures.append(ModelFailed("broken: again", "provider"))
    await handler.complete(broken, REQUEST)
    said = "spare answers in the place of broken; until that answers, this is not logged again: broken: "
    assert [record.getMessage() for record in caplog.records] == [f"{said}no", f"{said}again"]
