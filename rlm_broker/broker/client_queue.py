"""The queue before one client: calls take turns, keep its pace, and are repeated if that may help.

Theory of operation. The broker has chosen the client. A call then passes these stations, in this order:

1. A place (`_places`), of `max_concurrent`. Waiting sessions get places in turn, however many calls each of them has.
   The call keeps its place from the first attempt to the last, so a retry does not queue again.
2. The rates (`_admitted`), if there are any. One call at a time waits for them, behind a gate (`_gate`). If all slept
   and then looked again, small calls would overtake a large one each time.
3. The end of the provider's `retry-after` (`_opens_at`). It holds for all calls of this client, not for the refused
   one alone.
4. One attempt (`ask`), within `attempt_timeout_s` and the rest of the call's time.
5. After a transient failure: a pause, doubled with each attempt, then stations 2 to 4 again.

Only stations 3 to 5 take the call's time. If the waits for places and rates did, the end of a long batch would turn
into errors. An attempt is not a call: the ledger and `max_llm_calls` count a call once.

After `FAILURES_TO_COOL` failed calls in a row a client is cooling for `cooldown_s`: the broker asks its fallbacks
first. Unlike behind a circuit breaker, a cooling client still takes calls, since it may have no fallback.

A random part of each pause spreads calls after a common failure ("equal jitter": M. Brooker, "Exponential Backoff and
Jitter", AWS Architecture Blog, 2015).

Clients are code of the user's or of a library. They may raise anything, cancel their own task, or return another type.
`ask` and `_checked` turn all of that into `ModelFailed`, within the time limit.
"""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from rlm_broker.broker.clients.base import BaseClient, Client, LMReply, LMRequest, estimate_tokens
from rlm_broker.concurrency.deadline import Late, in_time
from rlm_broker.concurrency.turns import FairSemaphore, RateEntry, RateWindow
from rlm_broker.errors import ModelFailed, RlmBrokerError
from rlm_broker.events.redaction import in_words
from rlm_broker.usage import Usage
from rlm_broker.values.stats import ClientStats

BACKOFF_S, MOST_BACKOFF_S = 0.5, 30.0
"""Seconds of the first pause between two attempts, and of the longest: each is twice the one before, less a random
part."""
FAILURES_TO_COOL = 3
"""Failed calls in a row after which a client is cooling for `Serving.cooldown_s`."""
OnRetry = Callable[[int, float, str], None]
"""Called before each further attempt with its number from 2, the seconds until then, and the reason."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Bounds and retries of a client's calls.

    Example:
        ```python
        with LMHandler(OpenAICompatibleClient("http://localhost:8000/v1", "qwen3")) as handler:
            handler.serve(handler.get_client(), Serving(max_concurrent=4, max_retries=1))
            handler.completion("Say a word.")
        ```

    Attributes:
        max_concurrent: Calls at the same time; further ones wait. None takes the client's own bound.
        requests_per_minute, tokens_per_minute: Most within any 60 s; further calls wait. None sets no bound.
        max_retries: Further attempts after a transient failure.
        attempt_timeout_s: Seconds of one attempt; None leaves them to the limit of the call.
        fallbacks: Clients asked in its place, in this order, if it fails and the request is not at fault.
        cooldown_s: Seconds for which the fallbacks are asked first, after `FAILURES_TO_COOL` failed calls in a row.
    """

    max_concurrent: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_retries: int = 4
    attempt_timeout_s: float | None = None
    fallbacks: tuple[Client, ...] = ()
    cooldown_s: float = 30.0


class PendingCall(msgspec.Struct):
    """One call on its way to its client.

    Attributes:
        limit_s: Seconds it may take. Attempts and pauses count; waiting for places and rates does not.
        session: Its run: sessions take turns.
        spent_s: Used seconds of `limit_s`.
    """

    request: LMRequest
    limit_s: float
    session: Hashable = None
    on_retry: OnRetry | None = None
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Remaining seconds of `limit_s`."""
        return max(0.0, self.limit_s - self.spent_s)


class ClientQueue:
    """One client, its queue, and how it is doing. Lives on one event loop."""

    def __init__(self, client: BaseClient, serving: Serving) -> None:
        self.client = client
        self.serving = serving
        self._places = FairSemaphore(serving.max_concurrent or client.max_concurrent)
        self._gate = FairSemaphore(1)
        self._requests = RateWindow(serving.requests_per_minute)
        self._tokens = RateWindow(serving.tokens_per_minute)
        self._is_paced = not (serving.requests_per_minute is None and serving.tokens_per_minute is None)
        self._output_tokens = 0.0
        self._opens_at = 0.0
        self._failures = 0
        self._cool_until = 0.0

    @property
    def is_cooling(self) -> bool:
        """Whether the last calls failed, or the provider wants no request just now. A fallback may do better."""
        return time.monotonic() < max(self._cool_until, self._opens_at)

    def stats(self) -> ClientStats:
        """Return counts of the client's present calls."""
        places = self._places
        return ClientStats(self.client.model_name, places.taken, places.waiting, self.is_cooling)

    async def run(self, pending: PendingCall, others: int = 0) -> LMReply:
        """Make the call, with as many attempts as `max_retries` and its time allow.

        Args:
            others: Number of fallbacks to ask afterwards: each keeps an equal share of the time.

        Raises:
            ModelFailed: The last attempt failed.
        """
        if not self._places.take():
            await self._places.acquire(pending.session)
        attempt_s = self.serving.attempt_timeout_s
        if attempt_s is None and others:
            attempt_s = pending.left_s / (others + 1)
        try:
            for attempt in itertools.count(1):
                entry = await self._admitted(pending) if self._is_paced else None
                if self._opens_at:
                    await self._left_alone(pending)
                try:
                    reply = await ask(self.client, pending, attempt_s)
                except ModelFailed as failed:
                    await self._wait_or_raise(pending, attempt, failed)
                else:
                    self._failures, self._cool_until = 0, 0.0
                    if entry is not None:
                        self._used(reply.usage, entry)
                    return reply
        finally:
            self._places.release()
        raise AssertionError  # never reached, since `count` has no end; the type checker does not see it

    def _used(self, usage: Usage, entry: RateEntry) -> None:
        """Replace the estimate of a call's tokens by its usage, and move the mean output by an eighth."""
        self._tokens.correct(entry, usage.total_input_tokens + usage.total_output_tokens or entry.amount)
        self._output_tokens += (usage.total_output_tokens - self._output_tokens) / 8

    async def _left_alone(self, pending: PendingCall) -> None:
        """Wait until the provider takes requests again. This wait takes the call's own time.

        Raises:
            ModelFailed: The wait is longer than the rest of the call's time.
        """
        while (alone_s := self._opens_at - time.monotonic()) > 0:
            if alone_s > pending.left_s:
                name = self.client.model_name
                raise ModelFailed(f"{name}: the provider takes no request for another {alone_s:.1f} s", "transient")
            wait_s = alone_s * random.uniform(1, 1.1)  # so that the waiting calls do not all come at one moment
            pending.spent_s += wait_s
            await asyncio.sleep(wait_s)

    async def _admitted(self, pending: PendingCall) -> RateEntry:
        """Wait until the rates admit the call, one call at a time, in turn. This wait takes no time of the call.

        Returns:
            Estimate of the call's tokens.
        """
        request = pending.request
        tokens = estimate_tokens(request.chars) + (request.max_completion_tokens or self._output_tokens)
        await self._gate.acquire(pending.session)
        try:
            while True:
                now = time.monotonic()
                wait_s = max(self._requests.wait_s(1, now), self._tokens.wait_s(tokens, now))
                if wait_s <= 0:
                    self._requests.use(1, now)
                    return self._tokens.use(tokens, now)
                await asyncio.sleep(wait_s)
        finally:
            self._gate.release()

    async def _wait_or_raise(self, pending: PendingCall, attempt: int, failed: ModelFailed) -> None:
        """Wait before the next attempt, at least until the provider's time for it; or raise `failed`."""
        backoff_s = min(MOST_BACKOFF_S, BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
        wait_s = max(backoff_s, failed.retry_after_s or 0.0)
        if failed.retry_after_s:
            self._opens_at = max(self._opens_at, time.monotonic() + min(failed.retry_after_s, pending.limit_s))
        if failed.cause != "transient" or attempt > self.serving.max_retries or wait_s >= pending.left_s:
            if failed.cause != "request":
                self._failures += 1
                if self._failures >= FAILURES_TO_COOL:
                    self._cool_until = time.monotonic() + self.serving.cooldown_s
            raise failed
        if pending.on_retry is not None:
            pending.on_retry(attempt + 1, wait_s, str(failed))
        started = time.monotonic()
        try:
            await asyncio.sleep(wait_s)
        finally:
            pending.spent_s += time.monotonic() - started


async def ask(client: BaseClient, pending: PendingCall, attempt_timeout_s: float | None) -> LMReply:
    """Make one attempt. However the client behaves, it ends in time, in a reply or in an error of ours.

    Raises:
        ModelFailed: The attempt failed, or took too long.
    """
    limit_s = pending.left_s if attempt_timeout_s is None else min(pending.left_s, attempt_timeout_s)
    started = time.monotonic()
    try:
        reply = await in_time(limit_s, client.complete(pending.request))
    except RlmBrokerError:
        raise
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        raise ModelFailed(f"{client.model_name}: the client cancelled its own call") from None
    except Late:
        if limit_s == attempt_timeout_s:
            raise ModelFailed(f"{client.model_name}: no answer within {limit_s:g} s", "transient") from None
        raise ModelFailed(f"llm_query timed out after {pending.limit_s:g}s", "transient") from None
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # the last three would end the loop
        raise ModelFailed(f"{client.model_name}: {in_words(error)}") from error
    finally:
        pending.spent_s += time.monotonic() - started
    return _checked(reply, client)


def _is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for this task, and did not come from a client that cancelled its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked(reply: object, client: BaseClient) -> LMReply:
    """Check a reply for the ledger and the recording. An impossible number of tokens becomes 0, without a cost.

    Raises:
        ModelFailed: The client returned another type.
    """
    if not isinstance(reply, LMReply):
        raise ModelFailed(f"{client.model_name}: the client returned {type(reply).__name__}, not LMReply")
    usage = reply.usage
    if not isinstance(reply.text, str):
        raise _wrong_type(client, "text", reply.text, str)
    if not isinstance(usage, Usage):
        raise _wrong_type(client, "usage", usage, Usage)
    inputs, outputs, cost = usage.total_input_tokens, usage.total_output_tokens, usage.total_cost
    cached = usage.cached_input_tokens
    are_counts = type(inputs) is type(outputs) is type(cached) is int and inputs >= 0 and outputs >= 0 and cached >= 0
    if are_counts and (cost is None or 0 <= cost < math.inf):
        return reply
    inputs, outputs = (each if type(each) is int and each > 0 else 0 for each in (inputs, outputs))
    return msgspec.structs.replace(reply, usage=Usage(1, inputs, outputs, None))


def _wrong_type(client: BaseClient, name: str, value: object, wanted: type) -> ModelFailed:
    found = type(value).__name__
    return ModelFailed(f"{client.model_name}: the {name} of the client's reply is {found}, not {wanted.__name__}")
