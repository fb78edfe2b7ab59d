"""The paid calls of one question: an answer that was paid once is not paid again by a further attempt.

Theory of operation. A question may be attempted several times: by a batch that goes on after a kill, or because the
machine that ran it was lost. Code in a REPL is seeded, so an attempt asks what the one before has asked, up to the
place where that ended. `PaidCalls` keeps every answered call of the question, by its request, and the calls that are
under way. An `Attempt` stands between the run and the broker:

- The first call with some request gets the first answer to that request, the second call the second answer, and so on.
  Equal requests are told apart by their order alone, as in a recording.
- A call that was under way when its attempt was abandoned goes on. The next attempt that asks the same joins it.
- All other calls go to the broker.

A failed call is not kept: a further attempt may have better luck. An answer from here has the usage that it had when it
was paid, so the limits of a run hold over all of its attempts. `replayed` says how much of that was paid before.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable

from rlm_broker.clients.base import Client, LMRequest
from rlm_broker.clients.recorded import recorded_request
from rlm_broker.clients.recording import CallId, Counted, Recorded, Request, without_secrets
from rlm_broker.handler.client_queue import OnRetry
from rlm_broker.handler.completing import Completing
from rlm_broker.handler.routing import Routing
from rlm_broker.results import Call
from rlm_broker.usage import Tally, Usage
from sandbox_worker.wire.text_json import encode_escaped

NO_ID = CallId("?", 0, 0)
"""Place of a call that has none."""


class PaidCalls:
    """The paid calls of one question, over all attempts to answer it. Lives on one event loop.

    Args:
        earlier: Calls that an earlier process has paid, in the order in which they ended.
        keep: Writes down each further call that was answered; None keeps calls in memory alone.

    Attributes:
        replayed: Usage of the calls that further attempts took from here.
        paid: Usage of all calls that were paid, by this process and by earlier ones.
    """

    def __init__(self, earlier: Iterable[Recorded] = (), keep: Callable[[Recorded], None] | None = None) -> None:
        self.replayed = Tally()
        self.paid = Tally()
        self._keep = keep
        self._answered = defaultdict[bytes, list[Call]](list)
        self._under_way = defaultdict[bytes, list[asyncio.Task[Call]]](list)
        """Calls of abandoned attempts, by their request."""
        for recorded in earlier:
            call = _call_of(recorded)
            self._answered[_key(recorded.request)].append(call)
            self.paid.add(call.usage)

    def attempt(self, broker: Completing) -> "Attempt":
        """Return what completes the calls of a new attempt."""
        return Attempt(self, broker)

    async def aclose(self) -> None:
        """End the calls of abandoned attempts, which no further attempt will join."""
        left = [task for tasks in self._under_way.values() for task in tasks]
        self._under_way.clear()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    # -- what attempts do with it ------------------------------------------------------------------------------------

    def request_of(self, request: LMRequest) -> Request:
        """Return the parts of a request by which its answer is found. Those that are written down have no secrets."""
        asked = recorded_request(request)
        return asked if self._keep is None else without_secrets(asked)

    def answer(self, key: bytes, number: int) -> Call | None:
        """Return the answer to a request's call of that number, from 0; None if it was not paid yet."""
        answers = self._answered.get(key, ())
        if number >= len(answers):
            return None
        self.replayed.add(answers[number].usage)
        return answers[number]

    def add(self, key: bytes, request: Request, id: CallId, call: Call) -> None:
        """Keep a call that was answered and paid."""
        usage = call.usage
        self.paid.add(usage)
        self._answered[key].append(call)
        if self._keep is not None:
            used = Counted(usage.total_input_tokens, usage.total_output_tokens, usage.total_cost)
            self._keep(Recorded(id, request, call.root_model, call.response, call.problem, used=used))

    def join(self, key: bytes) -> "asyncio.Task[Call] | None":
        """Return a call with that request that an abandoned attempt has left under way; None if there is none."""
        left = self._under_way.get(key)
        return left.pop(0) if left else None

    def leave(self, key: bytes, call: "asyncio.Task[Call]") -> None:
        """Keep a call that is under way for a further attempt to join."""
        self._under_way[key].append(call)


class Attempt:
    """Completes the calls of one attempt: from what was paid before, else by the broker. `PaidCalls.attempt` makes it.

    Attributes:
        routing: Routes of the broker.
    """

    def __init__(self, paid: PaidCalls, broker: Completing) -> None:
        self._paid = paid
        self._broker = broker
        self._asked = Counter[bytes]()
        self._is_abandoned = False
        self.routing: Routing = broker.routing

    def abandon(self) -> None:
        """Let calls that are under way go on when they are cancelled, for the next attempt to join."""
        self._is_abandoned = True

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Make one call, as `Broker.complete` does, unless it was paid before."""
        asked = self._paid.request_of(request)
        key = _key(asked)
        number = self._asked[key]
        self._asked[key] += 1
        if (answer := self._paid.answer(key, number)) is not None:
            if request.on_text is not None and answer.response:
                request.on_text(answer.response)
            return answer

        async def called() -> Call:
            call = await self._broker.complete(client, request, timeout_s, session=session, on_retry=on_retry)
            self._paid.add(key, asked, request.id or NO_ID, call)
            return call

        under_way = self._paid.join(key) or asyncio.get_running_loop().create_task(called())
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            if under_way.done():
                raise
            if self._is_abandoned:
                self._paid.leave(key, under_way)
            else:
                under_way.cancel()
                await asyncio.wait({under_way})
            raise


def _key(request: Request) -> bytes:
    return hashlib.blake2b(encode_escaped(request), digest_size=16).digest()


def _call_of(recorded: Recorded) -> Call:
    used = recorded.used
    usage = Usage(1, used.input_tokens, used.output_tokens, used.cost_usd)
    return Call(recorded.model, recorded.text, usage, 0.0, problem=recorded.problem)
