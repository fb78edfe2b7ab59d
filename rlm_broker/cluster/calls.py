"""Calls of models that nodes ask for: the orchestrator picks the client, keeps the limits, and pays each call once.

A node is not trusted. It counts the calls, tokens and money of its runs by itself, as a run without a cluster does, and
all of it is counted again here, over all attempts of the run. So a node that lies ruins its own answers, and spends no
more than its run may.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar, get_args

import msgspec

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.messages import Ask, Reply
from rlm_broker.errors import LimitReached, ModelFailed, ProtocolViolation, RlmBrokerError, UnknownModel
from rlm_broker.journal.paid import Attempt, PaidCalls
from rlm_broker.limits import Limits
from rlm_broker.results import Call, ChatMessage, Role
from rlm_broker.run.calls import problem_with
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.request import RunRequest
from rlm_broker.usage import Tally, Usage, UsageSummary
from sandbox_worker.wire.prompts import Part

Key = TypeVar("Key", bound=Hashable)

ROOT = "1"
"""Name under which all calls of a run are counted. Names of child runs come from the node."""

VALUE_CHARS = 64
"""Characters that each value of a call counts in addition to its text, for its object."""

Tallies = defaultdict[tuple[str, int], Tally]
"""Model and depth → usage."""


class RunCalls:
    """The calls of one run, over all of its attempts. Lives on one event loop.

    Args:
        request: The run, with its limits.
        handler: The broker, which makes the calls.
        routing: Routes of the run.
        session: What the broker knows the run by, when sessions take turns.

    Attributes:
        reached: The limit at which a call was refused here; None while there was none.
    """

    def __init__(self, request: RunRequest, handler: Completing, routing: Routing, session: Hashable) -> None:
        self.limits = request.limits
        self.routing = routing
        self.session = session
        self.reached: LimitReached | None = None
        self._request = request
        self._paid = PaidCalls() if request.completing is None else None
        self._charged = _Charged(handler, self)
        self.answered = Tallies(Tally)
        """Usage of the calls that the last attempt got answered."""
        self.charged = Tallies(Tally)
        """Usage of the calls that were sent for any attempt."""

    def attempt(self) -> "AttemptCalls":
        """Return the calls of a new attempt."""
        self.answered = Tallies(Tally)
        paid = self._paid
        return AttemptCalls(
            self, self._request.completed_by(self._charged) if paid is None else paid.attempt(self._charged)
        )

    async def aclose(self) -> None:
        """End the calls that abandoned attempts have left under way."""
        if self._paid is not None:
            await self._paid.aclose()

    @property
    def usage(self) -> Tallies:
        """Usage of the run by model and depth. What an attempt was answered from earlier ones counts once."""
        both = Tallies(Tally)
        for key in self.answered.keys() | self.charged.keys():
            counted = [tallies[key].usage for tallies in (self.answered, self.charged) if key in tallies]
            both[key].add(max(counted, key=lambda usage: usage.total_calls))
        return both

    def usage_summary(self) -> UsageSummary:
        """Return the usage of the run by model."""
        return UsageSummary(_sums((model, tally.usage) for (model, _), tally in self.usage.items()))

    def usage_by_depth(self) -> dict[int, Usage]:
        """Return the usage of the run by depth."""
        sums = _sums((depth, tally.usage) for (_, depth), tally in self.usage.items())
        return {depth: sums[depth] for depth in sorted(sums)}


class AttemptCalls:
    """The calls of one attempt."""

    def __init__(self, run: RunCalls, completing: Completing) -> None:
        self._run = run
        self._completing = completing

    def abandon(self) -> None:
        """Let calls that are under way go on when they are cancelled, for the next attempt to join."""
        if isinstance(self._completing, Attempt):
            self._completing.abandon()

    async def answer(self, ask: Ask, on_text: Callable[[str], None] | None, on_retry: OnRetry) -> Reply:
        """Make a call that a node asks for, and return how it ended.

        Raises:
            ProtocolViolation: No agent asks so.
        """
        run, limits = self._run, self._run.limits
        request = _request(ask, limits, on_text)
        timeout_s = min(ask.timeout_s, limits.call_timeout_s)
        try:
            client = run.routing.pick_for_code(ask.model, ask.depth)
            call = await self._completing.complete(
                client, request, timeout_s, session=(run.session, ask.session), on_retry=on_retry
            )
        except UnknownModel as unknown:
            return Reply(ask.run, ask.call, failure=str(unknown), cause="unknown_model")
        except ModelFailed as failed:
            return Reply(ask.run, ask.call, failure=str(failed), cause=failed.cause)
        except RlmBrokerError as refused:
            return Reply(ask.run, ask.call, failure=str(refused), cause="request")
        usage = call.usage
        run.answered[call.root_model, ask.depth].add(usage)
        used = (usage.total_calls, usage.total_input_tokens, usage.total_output_tokens, usage.total_cost)
        return Reply(
            ask.run,
            ask.call,
            call.root_model,
            call.response,
            used,
            usage.stored_calls,
            usage.cached_input_tokens,
            call.requested_model,
            call.problem,
        )


class _Charged:
    """Stands before the broker, and counts each call that is sent against the limits of its run."""

    def __init__(self, broker: Completing, run: RunCalls) -> None:
        self.routing = broker.routing
        self._broker = broker
        self._run = run
        self._ledger = Ledger(run.limits)

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Make one call, as `Broker.complete` does.

        Raises:
            LimitReached: The run has made its calls, or spent its tokens or its money, over all attempts.
        """
        ledger = self._ledger
        try:
            hold = await ledger.hold(request.chars, request.max_completion_tokens)
            try:
                ledger.charge_call()
                call = await self._broker.complete(client, request, timeout_s, session=session, on_retry=on_retry)
                ledger.settle(hold, ROOT, call.root_model, request.depth, call.usage, len(call.response))
            finally:
                ledger.release(hold)
        except LimitReached as reached:
            self._run.reached = reached
            raise
        self._run.charged[call.root_model, request.depth].add(call.usage)
        return call


def weight_of(ask: Ask) -> int:
    """Return about how many characters of memory a call takes: those of its texts, and some for each value."""
    place = "" if ask.id is None else ask.id.run
    weight = sum(len(text or "") for text in (ask.question, ask.session, ask.model, place))
    left = list[object](ask.messages)
    while left:
        each = left.pop()
        weight += VALUE_CHARS
        if isinstance(each, str):
            weight += len(each)
        elif isinstance(each, list | tuple):
            left.extend(each)
        elif isinstance(each, dict):
            left.extend(each.values())
    return weight


def _request(ask: Ask, limits: Limits, on_text: Callable[[str], None] | None) -> LMRequest:
    """Return the call that a node asks for.

    Raises:
        ProtocolViolation: It is no conversation, or deeper than any run of its tree.
    """
    if not ask.messages or ask.depth > limits.max_depth + 1 or not ask.timeout_s > 0:
        raise ProtocolViolation("an agent has asked for a call that no run makes")
    most, wanted = limits.max_completion_tokens, ask.max_completion_tokens
    return LMRequest(
        tuple(ChatMessage(_role(role), _content(content)) for role, content in ask.messages),
        ask.model,
        min((each for each in (most, wanted) if each is not None), default=None),
        ask.depth,
        ask.question,
        ask.is_loop,
        ask.sample,
        on_text,
        ask.id,
        ask.has_own_prompt,
        ask.temperature,
    )


def _role(role: str) -> Role:
    for known in get_args(Role):
        if role == known:
            return known  # type: ignore[no-any-return]
    raise ProtocolViolation("an agent has asked with a message of no role")


def _content(content: str | list[object]) -> str | list[object]:
    if isinstance(content, str):
        return content
    try:
        problem = problem_with(msgspec.convert(content, list[Part]), None)
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem is not None:  # an agent refuses it, too: an address would be fetched from this machine
        raise ProtocolViolation(f"an agent has asked with content that no run sends: {problem}")
    return content


def _sums(usages: Iterable[tuple[Key, Usage]]) -> dict[Key, Usage]:
    tallies = defaultdict[Key, Tally](Tally)
    for key, usage in usages:
        tallies[key].add(usage)
    return {key: tally.usage for key, tally in tallies.items()}
