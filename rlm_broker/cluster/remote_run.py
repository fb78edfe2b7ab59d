"""A run on a cluster: placed on a node, and placed again on another one when that is lost.

Theory of operation. `RemoteRun` stands where `Runner` stands for a run on this machine: it is run, stopped, cancelled
and asked for partial results in the same way. Each attempt has a node (`placement`), and answers the requests of the
run there (`attempt`). What holds for the run as a whole is kept here, over all attempts:

- A call that was answered is not made again, and one that is under way is joined (`journal.paid`, `calls`, `tools`).
- The limits of calls, tokens and money (`calls`). The time of the run goes on from attempt to attempt.
- Events have one order, and each thing begins and ends once (`events`).

The node keeps the limits of time, too, and brings the partial results of a run that it ends. So the orchestrator waits
`END_S` longer than the run may take, and so long after a cancellation, before it ends the run without the node's word.
"""

import asyncio
import time
from dataclasses import replace

import msgspec

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.attempt import NodeAttempt, NodeLost
from rlm_broker.cluster.calls import RunCalls
from rlm_broker.cluster.contexts import Contexts
from rlm_broker.cluster.described import limits_spec, routing_spec, system_prompts, tools_spec
from rlm_broker.cluster.events import RunEvents
from rlm_broker.cluster.messages import Begin, ContextSpec, Ended, EngineSpec
from rlm_broker.cluster.node import Node
from rlm_broker.cluster.outcomes import is_of_node, read_error
from rlm_broker.cluster.placement import Placement
from rlm_broker.cluster.tools import AttemptTools, RunTools
from rlm_broker.concurrency.deadline import Late, StopRequested, to_its_end, within
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import (
    ClusterFailed,
    ConfigurationError,
    LimitReached,
    ModelFailed,
    OutputInvalid,
    RlmBrokerError,
    RunFailed,
)
from rlm_broker.events.event import TreeEvents
from rlm_broker.results import Completion
from rlm_broker.run.request import RunRequest
from sandbox_worker.wire.errors import FrameTooLarge

MOST_LOST = 3
"""Attempts of a run that may be lost. A run that loses as many nodes may be what ends them, if one was proven or there
is no other: nodes that have answered no run may be one hostile agent under many names."""
MOST_LOST_IN_ALL = 12
"""Attempts that may be lost in any case."""
END_S = 10.0
"""Seconds that a node has to end a run and to send its partial results, after a limit, a stop or a cancellation."""


class RemoteRun:
    """One run on the nodes of a cluster. `run` answers the question. Lives on one event loop.

    Args:
        request: The run.
        routing: Routes of the run.
        handler: The broker, which makes its calls.
        engine: Settings of its sandbox.
        events: Events of its tree, with their receivers.
        placement: Places it on nodes.
        contexts: Sends its context to nodes.
    """

    def __init__(
        self,
        request: RunRequest,
        *,
        routing: Routing,
        handler: Completing,
        engine: EngineSpec,
        events: TreeEvents,
        placement: Placement,
        contexts: Contexts,
    ) -> None:
        if request.repl is not None:
            raise ConfigurationError("a run on a cluster has its REPL on a node: it takes no repl")
        self._request = request
        self._routing = routing
        self._engine = engine
        self._tree = events.tree
        self._events = RunEvents(events)
        self._placement = placement
        self._contexts = contexts
        self._calls = RunCalls(request, handler, routing, events.tree)
        self._tools = RunTools(request.tools, request.limits.tool_timeout_s)
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started: float | None = None
        self._ended: Completion | None = None
        """Completion that the node sent at the end of the last attempt."""
        self._partial_answer: str | None = None
        self._failed_on: list[str] = []
        """Names of the nodes of lost attempts."""
        self._has_failed_proven = False

    # -- what a runner does ------------------------------------------------------------------------------------------

    async def run(self, context: StoredContext) -> Completion:
        """Answer the question about `context`.

        Raises:
            ClusterFailed: There was no node, or too many were lost.
            RlmBrokerError: The run failed, with the same errors as one on this machine.
        """
        failure: BaseException | None = None
        try:
            async with self._contexts.lent(context) as spec:
                completion = await self._attempts(await self._begin(spec))
        except StopRequested:  # before a node had it
            completion = replace(self._completion(), is_stopped=True)
        except BaseException as error:
            failure = error
            if isinstance(error, RunFailed):
                self.hand_to(error)
            raise
        finally:
            await to_its_end(self._close)
            if failure is not None:
                self._events.end(self._completion(), failure, _kind_of(failure))
        self._events.end(completion, None, "stopped" if completion.is_stopped else "answered")
        return completion

    def stop(self) -> None:
        """End the run with the best answer so far. Harmless after its end."""
        if not self._stop.done():
            self._stop.set_result(None)

    def hand_to(self, failure: RunFailed) -> None:
        """Put the partial results of the run into the error that ends it."""
        failure.take(replace(self._completion(), response=None), self._partial_answer)

    # -- its attempts ------------------------------------------------------------------------------------------------

    async def _begin(self, context: ContextSpec) -> Begin:
        """Return the message that begins each attempt, with the number 0."""
        request = self._request
        return Begin(
            run=0,
            tree=self._tree,
            engine=self._engine,
            question=request.question,
            context=context,
            limits=limits_spec(request.limits),
            routing=await routing_spec(self._routing),
            tools=tools_spec(request.tools),
            systems=system_prompts(request.instructions, request.limits),
            profile=request.instructions.profile,
            prologue=request.instructions.prologue,
            output_schema=None if request.output_type is None else request.output_type.schema,
            is_auto=self._request.is_auto,
            tells_events=self._events.is_wanted,
            tells_text=request.tells_text and self._events.is_wanted,
        )

    async def _attempts(self, begin: Begin) -> Completion:
        """Attempt the run on one node after the other, until an attempt is not lost."""
        while True:
            lost = len(self._failed_on)
            with self._placement.asked(self._failed_on, is_again=lost > 0, is_last=lost >= MOST_LOST - 1) as place:
                try:
                    node = await within(self._left_s(), place.taken(), self._stop)
                except Late:
                    raise self._late() from None
                try:
                    completion = await self._attempt(node, begin)
                except _Lost as why:
                    self._lose(node, why)
                except RlmBrokerError:  # the run failed, and not its node
                    node.faults = 0
                    raise
                else:
                    node.faults = 0
                    self._placement.prove(node)
                    return completion

    def _lose(self, node: Node, lost: "_Lost") -> None:
        """Note that an attempt was lost.

        Raises:
            RlmBrokerError: It was the last one that the run may lose.
        """
        self._placement.lose(node)
        self._failed_on.append(node.name)
        self._has_failed_proven |= node.is_proven
        if lost.failure is not None:
            node.faults += 1
        number = len(self._failed_on)
        is_of_run = self._has_failed_proven or not self._placement.has_other(self._failed_on)
        if number >= (MOST_LOST if is_of_run else MOST_LOST_IN_ALL):
            nodes = ", ".join(dict.fromkeys(self._failed_on))
            raise lost.failure or ClusterFailed(
                f"the run was lost with its node {number} times ({nodes}), the last time since {lost.why}"
            )

    async def _attempt(self, node: Node, begin: Begin) -> Completion:
        """Run on one node.

        Raises:
            _Lost: The node was lost, or failed the run.
            RlmBrokerError: The run failed.
        """
        request = self._request
        if self._started is None:
            self._started = time.monotonic() - request.spent_s
        if request.limits.run_timeout_s is not None:
            limits = request.limits.model_copy(update={"run_timeout_s": self._left_s()})
            begin = msgspec.structs.replace(begin, limits=limits_spec(limits))
        answer_type = None if request.output_type is None else request.output_type.again()
        self._events.begin()
        calls, tools = self._calls.attempt(), AttemptTools(self._tools)
        begin = msgspec.structs.replace(begin, run=node.number())
        attempt = NodeAttempt(node, begin, request.limits, calls, tools, answer_type, self._events)
        try:
            async with attempt:
                ended = await self._end_of(attempt)
        except NodeLost as lost:
            raise _Lost(str(lost)) from None
        except FrameTooLarge as too_large:
            raise ConfigurationError(f"the run cannot be sent to a node: {too_large}") from None
        return self._outcome(ended, attempt)

    async def _end_of(self, attempt: NodeAttempt) -> Ended:
        """Wait for the end of an attempt, and pass a stop and a cancellation on to its node.

        Raises:
            NodeLost: The node is lost.
            LimitReached: The time of the run is up, and the node does not say so.
        """

        async def waits() -> Ended | None:
            return await attempt.ended()

        left_s = self._left_s()
        try:
            ended = await within(None if left_s is None else left_s + END_S, waits(), self._stop)
        except Late:
            raise self._late() from None
        except StopRequested:
            attempt.stop()
            ended = await attempt.ended(END_S)
        except asyncio.CancelledError:
            attempt.cancel()
            await to_its_end(lambda: self._last_words(attempt))
            raise
        if ended is None:
            raise StopRequested
        return ended

    async def _last_words(self, attempt: NodeAttempt) -> None:
        """Wait until the node has ended the cancelled run, and keep what the run had."""
        try:
            ended = await attempt.ended(END_S)
        except NodeLost:
            return
        if ended is not None:
            self._keep(ended, attempt)

    # -- its outcome -------------------------------------------------------------------------------------------------

    def _keep(self, ended: Ended, attempt: NodeAttempt) -> None:
        """Keep the results that a node has sent at the end of a run, also of one that failed."""
        self._partial_answer = ended.partial_answer
        self._ended = attempt.completion or self._ended

    def _outcome(self, ended: Ended, attempt: NodeAttempt) -> Completion:
        """Return the completion of an attempt, with the usage that was counted here.

        Raises:
            _Lost: The node is at fault.
            RlmBrokerError: The run failed.
        """
        self._keep(ended, attempt)
        if ended.error is not None:
            failure = self._failure(read_error(ended), attempt)
            if is_of_node(ended):
                raise _Lost(str(failure), failure)
            raise failure
        completion = self._completion()
        if self._request.output_type is None or completion.is_stopped or completion.response is None:
            return completion
        if attempt.parsed is None or attempt.parsed[0] != completion.response:
            raise ClusterFailed("the node has ended the run with an answer that was not judged")
        return replace(completion, parsed=attempt.parsed[1])

    def _failure(self, failure: RlmBrokerError, attempt: NodeAttempt) -> RlmBrokerError:
        """Return the error of a run as it is on this machine: with the limits of the whole run, and the own error of
        the judge."""
        if isinstance(failure, LimitReached) and failure.limit == "run_timeout_s":
            return self._late()
        reached = self._calls.reached
        if isinstance(failure, ModelFailed) and reached is not None and str(failure) == str(reached):
            return reached  # the agent got it as the failure of a call
        if isinstance(failure, OutputInvalid) and attempt.invalid is not None:
            return attempt.invalid
        return failure

    def _completion(self) -> Completion:
        """Return what the run has, as far as it is known here."""
        usage, by_depth = self._calls.usage_summary(), self._calls.usage_by_depth()
        taken_s = 0.0 if self._started is None else time.monotonic() - self._started
        name = self._routing.pick(None, 0).model_name
        known = self._ended or Completion(None, name, 0, 0, taken_s, usage)
        return replace(known, root_model=name, execution_time=taken_s, usage_summary=usage, usage_by_depth=by_depth)

    def _late(self) -> LimitReached:
        limit_s = self._request.limits.run_timeout_s or 0.0
        return LimitReached("run_timeout_s", limit_s, limit_s)

    def _left_s(self) -> float | None:
        """Seconds that the run has left, from the moment when a node had it first; None is without a bound."""
        limit_s = self._request.limits.run_timeout_s
        if limit_s is None or self._started is None:
            return None
        return max(0.001, self._started + limit_s - time.monotonic())

    async def _close(self) -> None:
        await self._calls.aclose()
        await self._tools.aclose()


class _Lost(Exception):
    """An attempt was lost, and the run may be attempted again. `failure` is the error if the node lives and failed."""

    def __init__(self, why: str, failure: RlmBrokerError | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.failure = failure


def _kind_of(failure: BaseException) -> str:
    return "cancelled" if isinstance(failure, asyncio.CancelledError) else getattr(failure, "kind", "failed")
