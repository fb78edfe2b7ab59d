"""The calls of one item: an answer paid for once is not paid for again by a further process.

Theory of operation. Code in a REPL is seeded, so a run that begins again asks what the one before has asked, up to the
place where that ended. `ItemCalls` stands between the run and the broker. The first call with some request gets the
first answer to that request, the second call the second answer, and so on: equal requests differ by their order
alone, as in a recording. All other calls go to the broker, within the means of the batch, and the journal has the
answer before the run gets it. A failed call is not kept: a further process may have better luck.

A request is found by its digest, so no prompt is written down. An answer from the journal has the usage it had
when it was paid, so the limits of a run hold over all processes. `replayed` says how much of that was paid before.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from functools import partial

from rlm_broker.batch.budget import Spending
from rlm_broker.batch.journal import AnsweredCall
from rlm_broker.broker.broker import Completing
from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.clients.recording import request_digests
from rlm_broker.limits import Limits
from rlm_broker.results import Call, ChatMessage
from rlm_broker.run.ledger import NOTHING, Ledger
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.remembered import Remembered

NO_LIMITS = Limits()
"""Limits of a ledger that only counts: no call asks it."""


class Turns:
    """The turns of one run: its conversation, and the answer to each turn."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.answers: list[Call] = []
        self._before: list[ChatMessage] = []
        self._last: tuple[ChatMessage, ...] = ()

    def add(self, request: LMRequest, answer: Call) -> None:
        """Take a turn. A request with fewer messages than the one before begins after a summary."""
        if len(request.messages) < len(self._last):
            self._before += self.messages[len(self._before) :]
        self._last = request.messages
        self.answers.append(answer)

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, with the last answer."""
        return [*self._before, *self._last, ChatMessage("assistant", self.answers[-1].response)]


class ItemCalls:
    """Completes the calls of one item: from the journal, else by the broker. Lives on one event loop.

    Args:
        earlier: Calls paid by earlier processes, in the order in which they ended.
        keep: Writes down each further answered call; awaited before the run gets the answer. None keeps none.
        sample: Number of the sample of the item, from 0.
        turns: Keeps the turns of each run, by its name; None keeps none.
        spending: Means of the batch; None is without a bound.

    Attributes:
        replayed: Usage of the calls answered from the journal.
    """

    def __init__(
        self,
        earlier: Iterable[AnsweredCall] = (),
        keep: Callable[[AnsweredCall], Awaitable[None]] | None = None,
        sample: int = 0,
        turns: dict[str, Turns] | None = None,
        spending: Spending | None = None,
    ) -> None:
        self.replayed = Usage()
        self._keep = keep
        self._sample = sample
        self._turns = turns
        self._spending = spending
        self._paid = Ledger(NO_LIMITS)
        self._answers = Remembered[bytes, Call]()
        for each in earlier:
            self._answers.add(each.key, each.call)
            self._add(each)

    def before(self, broker: Completing) -> "ItemCalls":
        """Stand before a broker, for the run of the item."""
        self._broker = broker
        self.routing = broker.routing
        return self

    @property
    def summary(self) -> UsageSummary:
        """Usage of all paid calls, by this process and by earlier ones, by model."""
        return self._paid.summary()

    @property
    def by_depth(self) -> Mapping[int, Usage]:
        """The same usage by depth."""
        return self._paid.by_depth()

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
        if self._sample:
            request = request.in_sample(self._sample)
        (key,) = await request_digests([request])
        if (call := self._answers.take(key)) is not None:
            self.replayed += call.usage
        else:
            make = partial(self._broker.complete, client, request, timeout_s, session=session, on_retry=on_retry)
            call = await (make() if self._spending is None else self._spending.made(request, make))
            answered = AnsweredCall(key, request.depth, call)
            self._add(answered)
            if self._keep is not None:
                await self._keep(answered)
        if self._turns is not None and request.id is not None and (request.is_loop or not request.id.block):
            self._turns.setdefault(request.id.run, Turns(request.depth)).add(request, call)
        return call

    def _add(self, answered: AnsweredCall) -> None:
        call = answered.call
        self._paid.settle(NOTHING, "", call.root_model, answered.depth, call.usage, len(call.response))
