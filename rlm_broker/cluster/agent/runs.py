"""The runs of a node: each is composed as a run without a cluster is, and its models and tools are elsewhere."""

import asyncio
import contextlib
import logging
from typing import Any, TypeVar

import msgspec

from rlm_broker.cluster.agent.answers import RemoteType
from rlm_broker.cluster.agent.calls import RemoteCalls
from rlm_broker.cluster.agent.contexts import Contexts
from rlm_broker.cluster.agent.events import EventSender
from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.agent.models import routing_of
from rlm_broker.cluster.agent.sandboxes import Sandboxes
from rlm_broker.cluster.agent.shortening import encoded_outcome
from rlm_broker.cluster.agent.tools import RemoteTools
from rlm_broker.cluster.link import Link, LinkLost
from rlm_broker.cluster.messages import Begin, Ended, FromBroker
from rlm_broker.cluster.outcomes import MESSAGE_CHARS, facts_of
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import IsolationUnavailable, ReplClosed, RlmBrokerError, RunFailed, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.run.engine import root_run
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.request import RunRequest
from rlm_broker.run.run import RunJob

T = TypeVar("T")

MOST_PARTIAL_CHARS = 4 << 20
"""Maximum characters of the best answer of a failed run; of a longer one the rest is cut."""

_log = logging.getLogger("rlm_broker")


class NodeRun:
    """One run on a node, from its `Begin` to its `Ended`.

    Args:
        begin: The run.
        link: Link to the orchestrator.
        contexts: Contexts of the node.
        sandboxes: Sandboxes of the node.

    Attributes:
        exchange: Requests of the run that wait for the orchestrator.
    """

    def __init__(self, begin: Begin, link: Link[FromBroker], contexts: Contexts, sandboxes: Sandboxes) -> None:
        self.exchange = Exchange(link, begin.run)
        self._begin = begin
        self._link = link
        self._contexts = contexts
        self._sandboxes = sandboxes
        self._events = EventSender(link, begin.run)
        self._is_abandoned = False
        self._job = RunJob(EventLoopRef.here(), self._answered, is_followed=False, id=begin.tree)

    def stop(self) -> None:
        """End the run with its best answer so far."""
        self._job.stop()

    def cancel(self) -> None:
        """End the run now."""
        self._job.cancel()

    def abandon(self) -> None:
        """End the run now, and send nothing more of it: the agent leaves."""
        self._is_abandoned = True
        self.cancel()

    async def to_its_end(self) -> None:
        """Run, then send the last events and the outcome. All processes of the run have ended when this returns."""
        ended = await self._ended()
        if self._is_abandoned:
            return
        with contextlib.suppress(LinkLost):
            await self._events.aclose()
            await self._link.send(ended)

    async def _ended(self) -> Ended:
        number = self._begin.run
        try:
            return await self._outcome()
        except RlmBrokerError as error:
            return Ended(number, msgspec.UNSET, *_told(error), is_of_node=isinstance(error, IsolationUnavailable))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the orchestrator must learn of every end
            _log.exception("a run ended by an error of rlm-broker itself")
            failure = SandboxFailed(f"the run ended by an internal error on its node: {type(error).__name__}: {error}")
            return Ended(number, msgspec.UNSET, *_told(failure), is_of_node=True)

    async def _outcome(self) -> Ended:
        """Run, and return how that ended, with all that the run had.

        Raises:
            RlmBrokerError: The run did not begin, or its outcome fits into no message.
        """
        number = self._begin.run
        try:
            self._job.start()
            completion = await self._job.handle
        except RunFailed as failed:
            partial_answer = _cut(failed.partial_answer, MOST_PARTIAL_CHARS)
            is_of_node = isinstance(failed, SandboxFailed) and not isinstance(failed, ReplClosed)
            return Ended(number, encoded_outcome(_had(failed)), *_told(failed), partial_answer, is_of_node)
        return Ended(number, encoded_outcome(completion))

    async def _answered(self, job: RunJob) -> Completion:
        begin, exchange = self._begin, self.exchange
        async with self._contexts.held(begin.context) as context, self._sandboxes.held(begin.engine) as sandbox:
            tools = await asyncio.to_thread(RemoteTools, begin.tools, exchange) if begin.tools.values else None
            routing = routing_of(begin.routing)
            request = RunRequest(
                question=begin.question,
                instructions=_instructions(begin),
                limits=Limits(**begin.limits),
                output_type=None if begin.output_schema is None else RemoteType(begin.output_schema, exchange),
                tools=tools or RemoteTools(begin.tools, exchange),
                is_auto=begin.is_auto,
                receivers=(self._events.add,) if begin.tells_events else (),
                tells_text=begin.tells_text,
            )
            runner = root_run(request, job, context, routing, RemoteCalls(exchange, routing), sandbox)
            return await job.begin(runner).run(context)


def _instructions(begin: Begin) -> Instructions:
    systems = begin.systems
    given: dict[str, Any] = {"profile": begin.profile, "prologue": begin.prologue}
    if len(systems) > 1:
        given["system"] = lambda depth: systems[min(depth, len(systems) - 1)]
    return Instructions(**given) if len(systems) != 1 else Instructions(systems[0], **given)


def _had(failed: RunFailed) -> Completion:
    """Return what a failed run had, as the completion of a run without a response."""
    return Completion(
        response=None,
        root_model=failed.root_model or "",
        depth=0,
        iterations=len(failed.trajectory),
        execution_time=failed.execution_time,
        usage_summary=failed.usage_summary,
        usage_by_depth=failed.usage_by_depth,
        isolation=failed.isolation,
        messages=failed.messages,
        trajectory=failed.trajectory,
        child_traces=failed.child_traces,
    )


def _told(error: RlmBrokerError) -> tuple[str, str, dict[str, Any]]:
    facts = {name: _cut(value, MESSAGE_CHARS) for name, value in facts_of(error).items()}
    return type(error).__name__, _cut(str(error), MESSAGE_CHARS), facts


def _cut(value: T, most: int) -> T:
    """Return a value; of a longer text, its beginning."""
    return value[:most] if isinstance(value, str) else value  # type: ignore[return-value]
