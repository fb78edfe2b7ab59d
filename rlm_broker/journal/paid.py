"""The paid calls of one question: an answer that was paid once is not paid again by a further attempt.

Theory of operation. A question may be attempted several times: by a batch that goes on after a kill, or because the
machine that ran it was lost. Code in a REPL is seeded, so an attempt asks what the one before has asked, up to the
place where that ended. `PaidCalls` keeps every answered call of the question, by its request, and the calls that are
under way. An `Attempt` stands between the run and the broker:

- The first call with some request gets the first answer to that request, the second call the second answer, and so on.
  Equal requests are told apart by their order alone, as in a recording.
- A call that was under way when its attempt was abandoned goes on. The next attempt that asks the same joins it.
- All other calls go to the broker. Its answer is written down before the run gets it, if there is a journal.

A request is found by its digest, so nothing needs to be redacted before a file is written. A failed call is not kept: a
further attempt may have better luck. An answer from here has the usage that it had when it was paid, so the limits of a
run hold over all of its attempts. `replayed` says how much of that was paid before.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping

import msgspec

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import CallId, Client, LMRequest
from rlm_broker.broker.clients.recording import Request, recorded_request
from rlm_broker.broker.routing import Routing
from rlm_broker.journal.answered import Answered, Asking
from rlm_broker.results import Call
from rlm_broker.usage import Tally, Usage, UsageSummary
from sandbox_worker.wire.text_json import encode_escaped

KEY_BYTES = 16
"""Bytes of the digest of a request."""
LARGE_CHARS = 1 << 20
"""Characters of a request beyond which its digest is made in a thread: 60 million take a second."""


class PaidCall(msgspec.Struct, frozen=True):
    """One call that was answered.

    Attributes:
        key: Digest of its request.
        depth: Depth of the call in its tree.
        call: Its answer.
        id: Place of the call in its tree; None where that is not known.
        request: What was asked; None for a call that was read from a file.
    """

    key: bytes
    depth: int
    call: Call
    id: CallId | None = None
    request: Request | None = None


class PaidCalls:
    """The paid calls of one question, over all attempts to answer it. Lives on one event loop.

    Args:
        earlier: Calls that an earlier process has paid, in the order in which they ended.
        keep: Writes down each further call that was answered; awaited before the run gets the answer. None keeps calls
            in memory alone.

    Attributes:
        replayed: Usage of the calls that further attempts took from here.
        answered: Answers of these calls, and calls that abandoned attempts have left under way.
    """

    def __init__(
        self, earlier: Iterable[PaidCall] = (), keep: Callable[[PaidCall], Awaitable[None]] | None = None
    ) -> None:
        self.replayed = Tally()
        self._paid = defaultdict[tuple[str, int], Tally](Tally)
        self._keep = keep
        self.answered = Answered[Call]()
        for paid in earlier:
            self._add(paid)

    def attempt(self, broker: Completing) -> "Attempt":
        """Return what completes the calls of a new attempt."""
        return Attempt(self, broker)

    @property
    def summary(self) -> UsageSummary:
        """Usage of all calls that were paid, by this process and by earlier ones, by model."""
        sums: dict[str, Usage] = {}
        for (model, _), tally in self._paid.items():
            sums[model] = sums.get(model, Usage()) + tally.usage
        return UsageSummary(sums)

    @property
    def by_depth(self) -> Mapping[int, Usage]:
        """The same usage by depth."""
        sums: dict[int, Usage] = {}
        for (_, depth), tally in sorted(self._paid.items(), key=lambda each: each[0][1]):
            sums[depth] = sums.get(depth, Usage()) + tally.usage
        return sums

    async def aclose(self) -> None:
        """End the calls of abandoned attempts, which no further attempt will join."""
        await self.answered.aclose()

    # -- what attempts do with it ------------------------------------------------------------------------------------

    def answer(self, key: bytes, number: int) -> Call | None:
        """Return the answer to a request's call of that number, from 0; None if it was not paid yet."""
        answer = self.answered.answer(key, number)
        if answer is not None:
            self.replayed.add(answer.usage)
        return answer

    async def add(self, paid: PaidCall) -> None:
        """Keep a call that was answered and paid, and wait until it is written down."""
        self._add(paid)
        if self._keep is not None:
            await self._keep(paid)

    def _add(self, paid: PaidCall) -> None:
        self._paid[paid.call.root_model, paid.depth].add(paid.call.usage)
        self.answered.add(paid.key, paid.call)


class Attempt:
    """Completes the calls of one attempt: from what was paid before, else by the broker. `PaidCalls.attempt` makes it.

    Attributes:
        routing: Routes of the broker.
    """

    def __init__(self, paid: PaidCalls, broker: Completing) -> None:
        self._paid = paid
        self._broker = broker
        self._asking = Asking(paid.answered)
        self.routing: Routing = broker.routing

    def abandon(self) -> None:
        """Let calls that are under way go on when they are cancelled, for the next attempt to join."""
        self._asking.is_abandoned = True

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
        asked = recorded_request(request)
        key = _key(asked) if request.chars <= LARGE_CHARS else await asyncio.to_thread(_key, asked)
        if (answer := self._paid.answer(key, self._asking.number(key))) is not None:
            return _told(answer, request)
        if (joined := self._paid.answered.join(key)) is not None:
            return _told(await self._asking.ended(key, joined), request)

        async def called() -> Call:
            mine = self._while_wanted(request)
            call = await self._broker.complete(client, mine, timeout_s, session=session, on_retry=on_retry)
            await self._paid.add(PaidCall(key, request.depth, call, request.id, asked))
            return call

        return await self._asking.ended(key, asyncio.get_running_loop().create_task(called()))

    def _while_wanted(self, request: LMRequest) -> LMRequest:
        """Return the request with pieces of the reply that no more come once the attempt is abandoned."""
        on_text = request.on_text
        if on_text is None:
            return request

        def told(text: str) -> None:
            if not self._asking.is_abandoned:
                on_text(text)

        return msgspec.structs.replace(request, on_text=told)


def _key(asked: Request) -> bytes:
    return hashlib.blake2b(encode_escaped(asked), digest_size=KEY_BYTES).digest()


def _told(answer: Call, request: LMRequest) -> Call:
    if request.on_text is not None and answer.response:
        request.on_text(answer.response)
    return answer
