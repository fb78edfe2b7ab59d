"""The way to one client: in turn, at its pace, again where that may help."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from rlm_broker.clients.base import BaseClient, Client, LMReply, LMRequest, estimate_tokens
from rlm_broker.concurrency.deadline import Late, in_time
from rlm_broker.concurrency.fair_semaphore import FairSemaphore
from rlm_broker.concurrency.rate_window import Entry, RateWindow
from rlm_broker.errors import ModelFailed, RlmBrokerError
from rlm_broker.redaction import in_words
from rlm_broker.results import Usage
from rlm_broker.stats import ClientStats

BACKOFF_S, MOST_BACKOFF_S = 0.5, 30.0
FAILURES_TO_COOL = 3
OnRetry = Callable[[int, float, str], None]
"""Told of each further attempt: its number from 2, the seconds until then, and why."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How a client is to be called.

    Attributes:
        max_concurrent: Calls at the same time; None is what the client says itself.
        requests_per_minute, tokens_per_minute: Of any minute; calls beyond are queued.
        max_retries: Further attempts after a failure that may pass.
        attempt_timeout_s: Seconds of one attempt; None leaves them to the limit of the call.
        fallbacks: Who is asked in its place, in this order, when it fails by no fault of the request's.
        cooldown_s: After so many calls in a row that failed (`FAILURES_TO_COOL`), how long its fallbacks are asked
            first.
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
        limit_s: Its time. Only what providers take counts, and not the waiting for a turn.
        session: On whose behalf: sessions take turns.
        spent_s: Of its time.
    """

    request: LMRequest
    limit_s: float
    session: Hashable = None
    on_retry: OnRetry | None = None
    spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.spent_s)


class ClientQueue:
    """One client, and how it is doing. Lives on one event loop."""

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
        """Whether its last calls failed, or it wants to be left alone, so that another may do better."""
        return time.monotonic() < max(self._cool_until, self._opens_at)

    def stats(self) -> ClientStats:
        """How the client is doing now."""
        places = self._places
        return ClientStats(self.client.model_name, places.taken, places.waiting, self.is_cooling)

    async def run(self, pending: PendingCall, others: int = 0) -> LMReply:
        """Make the call, as often as it takes and its time allows.

        Args:
            others: Who may be asked afterwards: time is left for them.

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
        raise AssertionError

    def _used(self, usage: Usage, entry: Entry) -> None:
        """Put what a call took in the place of what it was thought to take."""
        self._tokens.correct(entry, usage.total_input_tokens + usage.total_output_tokens or entry.amount)
        self._output_tokens += (usage.total_output_tokens - self._output_tokens) / 8

    async def _left_alone(self, pending: PendingCall) -> None:
        """Wait until the provider wants to be asked again; that is the call's own time.

        Raises:
            ModelFailed: It wants to be left alone for longer than the call may take.
        """
        while (alone_s := self._opens_at - time.monotonic()) > 0:
            if alone_s > pending.left_s:
                name = self.client.model_name
                raise ModelFailed(f"{name}: the provider wants to be left alone for {alone_s:.1f} s", "transient")
            wait_s = alone_s * random.uniform(1, 1.1)  # not all who wait at the same moment
            pending.spent_s += wait_s
            await asyncio.sleep(wait_s)

    async def _admitted(self, pending: PendingCall) -> Entry:
        """Wait until its rates allow the call, one after the other, in turn. That is nobody's time.

        Returns:
            The tokens that the call is thought to take.
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
        """Before the next attempt. If the provider says how long, nobody asks it before."""
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
    """One attempt. Clients are anybody's code: whatever they do, it ends in time, in a reply or an error of ours.

    Raises:
        ModelFailed: It failed, or took too long.
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
    """Whether a CancelledError is meant for the task that runs, and is no stray one of a client."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked(reply: object, client: BaseClient) -> LMReply:
    """What is no reply, or counts what cannot be, is found here, and not where it is added up or written."""
    if not isinstance(reply, LMReply):
        raise ModelFailed(f"{client.model_name}: the client returned {type(reply).__name__}, not LMReply")
    usage = reply.usage
    if not isinstance(reply.text, str):
        raise _wrong_type(client, "text", reply.text, str)
    if not isinstance(usage, Usage):
        raise _wrong_type(client, "usage", usage, Usage)
    inputs, outputs, cost = usage.total_input_tokens, usage.total_output_tokens, usage.total_cost
    are_counts = type(inputs) is int and inputs >= 0 and type(outputs) is int and outputs >= 0
    if are_counts and (cost is None or 0 <= cost < math.inf):
        return reply
    inputs, outputs = (each if type(each) is int and each > 0 else 0 for each in (inputs, outputs))
    return msgspec.structs.replace(reply, usage=Usage(1, inputs, outputs, None))


def _wrong_type(client: BaseClient, name: str, value: object, wanted: type) -> ModelFailed:
    found = type(value).__name__
    return ModelFailed(f"{client.model_name}: the {name} of the client's reply is {found}, not {wanted.__name__}")
