"""The orchestrator's half of a run on a node, as short as it can be: for tests of the agent alone."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rlm_broker.broker.clients.base import BaseClient, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.agent.agent import serve
from rlm_broker.cluster.described import context_spec, limits_spec, routing_spec, tools_spec
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import (
    PIECE_BYTES,
    Ask,
    Begin,
    Ended,
    EngineSpec,
    FromAgent,
    FromBroker,
    Judge,
    Judged,
    Leave,
    Load,
    Need,
    Piece,
    Reply,
    ReplyText,
    ToolReply,
    UseTool,
    Welcome,
)
from rlm_broker.cluster.outcomes import read_completion, read_error
from rlm_broker.context.store import store
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ModelFailed, OutputInvalid, RunFailed, UnknownModel
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage, Completion
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.tools import Tools
from tests.support.links import linked


class Orchestrator:
    """Begins runs on one agent, and answers their requests.

    Args:
        link: Link to the agent.
        client: Model that answers.

    Attributes:
        got: Messages of the agent, in their order, heartbeats left out.
        loads: Heartbeats of the agent.
    """

    def __init__(self, link: Link[FromAgent], client: BaseClient) -> None:
        self.link = link
        self.got: list[FromAgent] = []
        self.prepared(client)
        self.loads: list[Load] = []
        self.changed = asyncio.Condition()
        self._ended: dict[int, asyncio.Future[Ended]] = {}
        self._contexts: dict[str, StoredContext] = {}
        self._calls: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._last = 0

    def prepared(self, client: BaseClient, tools: Tools | None = None, output_type: Any = None) -> "Orchestrator":
        """Take the model, the functions and the type of the next runs, and forget the messages so far."""
        self.client, self.tools = client, tools or Tools()
        self.output_type = None if output_type is None else OutputType(output_type)
        self.got.clear()
        return self

    async def begin(
        self, context: Any, question: str | None = None, *, limits: Limits | None = None, **fields: Any
    ) -> int:
        """Begin a run, and return its number."""
        self._last += 1
        stored = context if isinstance(context, StoredContext) else store(context)
        spec = context_spec(stored)
        self._contexts[spec.digest] = stored
        limits = limits or Limits()
        engine = fields.pop("engine", EngineSpec(limits_spec(limits), "auto"))
        routing = fields.pop("routing", None) or Routing(self.client)
        begin = Begin(
            run=self._last,
            tree=f"tree{self._last}",
            engine=engine,
            question=question,
            context=spec,
            limits=limits_spec(limits),
            routing=await routing_spec(routing),
            tools=tools_spec(self.tools),
            output_schema=None if self.output_type is None else self.output_type.schema,
            **fields,
        )
        self._ended[begin.run] = asyncio.get_running_loop().create_future()
        await self.link.send(begin)
        return begin.run

    async def ended(self, run: int) -> Ended:
        """Return the end of a run."""
        return await self._ended[run]

    async def completion(self, context: Any, question: str | None = None, **fields: Any) -> Completion:
        """Run to the end, and return the completion; raise the error that ended it, with what the run had."""
        ended = await self.ended(await self.begin(context, question, **fields))
        if ended.error is None:
            return read_completion(ended.completion)  # type: ignore[arg-type]
        error = read_error(ended)
        if isinstance(error, RunFailed) and ended.completion is not msgspec.UNSET:
            error.take(read_completion(ended.completion), ended.partial_answer)
        raise error

    async def until(self, kind: type[Any]) -> Any:
        """Wait for the first message of a class, and return it."""
        async with self.changed:
            await self.changed.wait_for(lambda: any(isinstance(each, kind) for each in self.got))
        return next(each for each in self.got if isinstance(each, kind))

    async def receive(self) -> None:
        """Answer the agent until the link ends."""
        async for message, _ in self.link.receive():
            if isinstance(message, Load):
                self.loads.append(message)
            else:
                self.got.append(message)
                await self._take(message)
            async with self.changed:
                self.changed.notify_all()

    async def _take(self, message: FromAgent) -> None:
        match message:
            case Need():
                await self._send(message.digest)
            case Ask():
                self._begin(message.run, message.call, self._called(message))
            case UseTool():
                self._begin(message.run, message.call, self._used(message))
            case Judge():
                self._begin(message.run, message.call, self._judged(message))
            case Leave():
                self._calls[message.run, message.call].cancel()
            case Ended():
                self._ended[message.run].set_result(message)

    def _begin(self, run: int, call: int, work: Any) -> None:
        self._calls[run, call] = asyncio.create_task(work)

    async def _send(self, digest: str) -> None:
        data = b"".join(os.pread(fd, piece.form.size_bytes, 0) for fd, piece in self._contexts[digest].pieces())
        for at in range(0, len(data), PIECE_BYTES):
            await self.link.send(Piece(digest, at), data[at : at + PIECE_BYTES])

    async def _called(self, ask: Ask) -> None:
        def tell(text: str) -> None:
            self.link.post(ReplyText(ask.run, ask.call, text))

        messages = tuple(ChatMessage(role, content) for role, content in ask.messages)  # type: ignore[arg-type]
        request = LMRequest(
            messages, ask.model, depth=ask.depth, question=ask.question, on_text=tell if ask.wants_text else None
        )
        try:
            reply = await self.client.complete(request)
        except UnknownModel as unknown:
            await self.link.send(Reply(ask.run, ask.call, failure=str(unknown), cause="unknown_model"))
        except ModelFailed as failed:
            await self.link.send(Reply(ask.run, ask.call, failure=str(failed), cause=failed.cause))
        else:
            used = reply.usage
            counted = (used.total_calls, used.total_input_tokens, used.total_output_tokens, used.total_cost)
            await self.link.send(Reply(ask.run, ask.call, self.client.model_name, reply.text, counted))

    async def _used(self, use: UseTool) -> None:
        tools = self.tools.for_children if use.is_of_child else self.tools
        slot = await tools.call(use.name, use.arguments, use.timeout_s)
        await self.link.send(ToolReply(use.run, use.call, slot.text, slot.error))

    async def _judged(self, judge: Judge) -> None:
        assert self.output_type is not None
        try:
            problem, _ = await self.output_type.judged(judge.answer, 1)
            verdict = Judged(judge.run, judge.call, problem)
        except OutputInvalid as invalid:
            verdict = Judged(judge.run, judge.call, str(invalid), is_final=True)
        await self.link.send(verdict)


@contextlib.asynccontextmanager
async def orchestrated(
    client: BaseClient,
) -> AsyncIterator[tuple[Orchestrator, Link[FromBroker], "asyncio.Task[None]"]]:
    """Have an orchestrator and an agent that serves it: the first, the agent's link, and the task that serves."""
    async with linked() as (at_broker, at_agent):
        orchestrator = Orchestrator(at_broker, client)
        serving = asyncio.create_task(serve(at_agent, Welcome("node", "secret")))
        receiving = asyncio.create_task(orchestrator.receive())
        try:
            yield orchestrator, at_agent, serving
        finally:
            at_broker.close()
            await asyncio.wait({serving, receiving})
