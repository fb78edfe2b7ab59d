"""One attempt of a run: the orchestrator's half of a run on one node.

The node asks for models, functions and verdicts, each under a number of its choice, and this answers. What a node may
have open at the same time is bounded, and each message is checked before it has an effect.
"""

import asyncio
import contextlib
import contextvars
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from rlm_broker.cluster.calls import AttemptCalls, weight_of
from rlm_broker.cluster.events import RunEvents
from rlm_broker.cluster.link import LinkLost
from rlm_broker.cluster.messages import (
    Ask,
    Begin,
    Cancel,
    Ended,
    Happened,
    Judge,
    Judged,
    Leave,
    Message,
    Reply,
    ReplyText,
    Retried,
    Stop,
    ToolReply,
    UseTool,
)
from rlm_broker.cluster.node import Node, OfARun
from rlm_broker.cluster.outcomes import is_of_node, read_completion
from rlm_broker.cluster.tools import AttemptTools
from rlm_broker.errors import OutputInvalid, ProtocolViolation
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.run.output_type import AnswerType
from sandbox_worker.wire.errors import FrameTooLarge

MOST_TOOL_CALLS = 4_096
"""Maximum calls of functions that one run has open. An agent has fewer, since its REPLs have fewer threads."""
MOST_ASKED_OF_RUN = 1 << 26
"""Maximum weight of the calls of models that one run has open, see `calls.weight_of`. One call may have any weight."""
MOST_ASKED_OF_NODE = 1 << 28
"""The same for all runs of a node."""
MOST_JUDGED = 16
"""Maximum verdicts that one run waits for. An agent waits for one."""
TOO_MANY = "more requests at the same time than a run may have"


class NodeLost(Exception):
    """The node of an attempt is lost; the text says why."""


class NodeAttempt:
    """A run on one node. Make it in the run's task. Lives on one event loop.

    Args:
        begin: Message that begins the run there.
        calls, tools: What answers its requests.
        answer_type: Type that its answer must have; None takes any text.
        events: Takes its events.

    Attributes:
        begin: The message.
        completion: What the node has sent at the end of the run; None if it has sent none.
        parsed: The last answer that was taken, and its value; None if there was none.
        invalid: Error of the last answer that was refused for good; None if there was none.
    """

    def __init__(
        self,
        node: Node,
        begin: Begin,
        limits: Limits,
        calls: AttemptCalls,
        tools: AttemptTools,
        answer_type: AnswerType | None,
        events: RunEvents,
    ) -> None:
        self.begin = begin
        self.completion: Completion | None = None
        self.parsed: tuple[str, Any] | None = None
        self.invalid: OutputInvalid | None = None
        self._node = node
        self._limits = limits
        self._calls = calls
        self._tools = tools
        self._answer_type = answer_type
        self._events = events
        self._open: dict[int, asyncio.Task[None]] = {}
        """Number of a request that the node waits for → the task that answers it."""
        self._tasks: set[asyncio.Task[None]] = set()
        """These tasks, and those of requests that the node has left, which are ending."""
        self._counts = Counter[type[Message]]()
        self._asked_chars = 0
        """Weight of the calls that are open."""
        self._context = contextvars.copy_context()
        """Context variables of the run, which functions of the user's find. The messages come in another task."""
        self._has_ended = False
        self._outcome: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    # -- its life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "NodeAttempt":
        """Begin the run on the node.

        Raises:
            NodeLost: The node is lost.
            FrameTooLarge: The message that begins the run is larger than a frame may be.
        """
        self._node.begin(self)
        try:
            await self._node.link.send(self.begin)
        except LinkLost as lost:
            self._leave()
            raise NodeLost(str(lost)) from None
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._outcome.done():
            self.cancel()
        self._leave()
        await self._close()

    def _leave(self) -> None:
        """Take no further message, and have no outcome to wait for."""
        self._node.end(self)
        if not self._outcome.cancel():
            self._outcome.exception()  # read, so that asyncio does not report it as never retrieved

    async def ended(self, timeout_s: float | None = None) -> Ended | None:
        """Wait for the end of the run, and return it; None if it has not ended in time.

        Raises:
            NodeLost: The node is lost.
        """
        await asyncio.wait({self._outcome}, timeout=timeout_s)
        return self._outcome.result() if self._outcome.done() else None

    def stop(self) -> None:
        """Wish that the run ends with its best answer so far."""
        self._node.link.post(Stop(self.begin.run))

    def cancel(self) -> None:
        """Wish that the run ends now."""
        self._node.link.post(Cancel(self.begin.run))

    # -- called by the node ------------------------------------------------------------------------------------------

    def take(self, message: OfARun) -> None:
        """Take a message of the run.

        Raises:
            ProtocolViolation: No agent sends such a message.
        """
        if self._has_ended or self._outcome.done():
            return
        match message:
            case Leave():
                if (task := self._open.pop(message.call, None)) is not None:
                    task.cancel()
            case Happened():
                self._events.take(message.events)
            case Ended():
                self._has_ended = True
                task = asyncio.get_running_loop().create_task(self._read(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                self._take_request(message)

    def lose(self, why: str) -> None:
        """Learn that the node is lost: calls that are under way go on, for the next attempt to join."""
        self._abandon()
        if not self._has_ended and not self._outcome.done():
            self._outcome.set_exception(NodeLost(why))

    async def _read(self, ended: Ended) -> None:
        """Read the outcome of the run in a thread: reading a large one takes a second."""
        if ended.completion is not msgspec.UNSET:
            try:
                self.completion = await asyncio.to_thread(read_completion, ended.completion)
            except ProtocolViolation as violation:
                self._node.link.close(str(violation))
                self._has_ended = False
                self.lose(str(violation))
                return
        if is_of_node(ended):
            self._abandon()
        if not self._outcome.done():
            self._outcome.set_result(ended)

    # -- its requests ------------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """Let calls that are under way go on, for the next attempt to join."""
        self._calls.abandon()
        self._tools.abandon()

    def _has_no_room(self, weight: int) -> bool:
        if self._counts[Ask] >= 4 * self._limits.max_concurrent_calls:
            return True
        of_run, of_node = self._asked_chars, self._node.asked_chars
        return (of_run > 0 and of_run + weight > MOST_ASKED_OF_RUN) or (
            of_node > 0 and of_node + weight > MOST_ASKED_OF_NODE
        )

    def _take_request(self, request: Ask | UseTool | Judge) -> None:
        open_already = self._counts[type(request)]
        weight = weight_of(request) if isinstance(request, Ask) else 0
        match request:
            case Ask() if self._has_no_room(weight):
                self._node.link.post(Reply(request.run, request.call, failure=TOO_MANY, cause="transient"))
            case UseTool() if open_already >= MOST_TOOL_CALLS:
                self._node.link.post(ToolReply(request.run, request.call, error=TOO_MANY))
            case Judge() if open_already >= MOST_JUDGED:
                raise ProtocolViolation(f"a run waits for more than {MOST_JUDGED} verdicts")
            case Ask():
                self._begin(request, self._called(request), weight)
            case UseTool():
                self._begin(request, self._tools.answer(request))
            case Judge():
                self._begin(request, self._judged(request))

    def _begin(self, request: Ask | UseTool | Judge, work: Coroutine[Any, Any, Message], weight: int = 0) -> None:
        """Answer a request in a task of its own.

        Raises:
            ProtocolViolation: Its number is that of an open request.
        """
        if request.call in self._open:
            work.close()
            raise ProtocolViolation("an agent has used the number of a request twice")
        task = asyncio.get_running_loop().create_task(self._answered(request, work), context=self._context.copy())
        kind = type(request)
        self._counts[kind] += 1
        self._asked_chars += weight
        self._node.asked_chars += weight
        self._open[request.call] = task
        self._tasks.add(task)

        def ended(_: object) -> None:
            self._counts[kind] -= 1
            self._asked_chars -= weight
            self._node.asked_chars -= weight
            self._tasks.discard(task)
            if self._open.get(request.call) is task:
                del self._open[request.call]

        task.add_done_callback(ended)

    async def _answered(self, request: Ask | UseTool | Judge, work: Coroutine[Any, Any, Message]) -> None:
        link = self._node.link
        try:
            with contextlib.suppress(LinkLost):
                try:
                    await link.send(await work)
                except FrameTooLarge as too_large:
                    await link.send(_too_large(request, str(too_large)))
        except ProtocolViolation as violation:
            link.close(str(violation))

    async def _called(self, ask: Ask) -> Reply:
        on_text = partial(self._tell_text, ask.call) if ask.wants_text else None
        return await self._calls.answer(ask, on_text, partial(self._tell_retry, ask.call))

    def _tell_text(self, call: int, text: str) -> None:
        self._node.link.post(ReplyText(self.begin.run, call, text))

    def _tell_retry(self, call: int, number: int, after_s: float, why: str) -> None:
        self._node.link.post(Retried(self.begin.run, call, number, after_s, why))

    async def _judged(self, judge: Judge) -> Judged:
        """Judge an answer.

        Raises:
            ProtocolViolation: The run wants no type.
        """
        if self._answer_type is None:
            raise ProtocolViolation("an agent asks for a verdict on an answer that may be any text")
        try:
            problem, value = await self._answer_type.judged(judge.answer, self._limits.max_output_retries)
        except OutputInvalid as invalid:
            self.invalid = invalid
            return Judged(judge.run, judge.call, str(invalid), is_final=True)
        if problem is None:
            self.parsed = (judge.answer, value)
        return Judged(judge.run, judge.call, problem)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _too_large(request: Ask | UseTool | Judge, why: str) -> Message:
    """Return the answer to a request whose own answer is larger than a frame."""
    match request:
        case Ask():
            return Reply(
                request.run, request.call, failure=f"the reply cannot be sent to the node: {why}", cause="request"
            )
        case UseTool():
            return ToolReply(request.run, request.call, error=f"the result cannot be sent to the node: {why}")
        case Judge():
            return Judged(request.run, request.call, f"the answer is too large: {why}")
