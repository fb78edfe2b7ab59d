"""The composition of a root run: its loop, and all parts that its tree shares."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from rlm_broker import __version__
from rlm_broker.asked import Asked, stored
from rlm_broker.clients.recording import Recorder
from rlm_broker.cluster.remote_run import RemoteRun
from rlm_broker.concurrency.deadline import Late, StopRequested
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.stored import StoredContext
from rlm_broker.engine import Engine, EngineParts, RunningCluster
from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.events.event import Emit, RunStarted, TreeEvents
from rlm_broker.handler.completing import Completing
from rlm_broker.handler.routing import Routing
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.queries import open_run
from rlm_broker.run.run import Run
from rlm_broker.run.runner import Runner
from rlm_broker.run.tree import QueryHandlerFactory, Tree
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.watch.board import BOARD

ROOT_RUN = "1"
"""Name of the root run in its tree; its children are "1.1", "1.2" and so on."""


async def answered(
    asked: Asked,
    run: Run,
    parts: EngineParts,
    engine: Engine | None,
    *,
    receivers: Sequence[Emit],
    query_handler: QueryHandlerFactory | None,
    is_auto: bool,
    repl: PersistentRepl | None,
) -> Completion:
    """Answer the question: store the context, and have an engine for as long as that takes.

    Args:
        asked, run, receivers, query_handler, is_auto, repl: As for `composed_run`.
        parts: Make an engine, and the routes of the run.
        engine: Engine that runs share; None makes one for this run.

    Raises:
        ConfigurationError, RunFailed: As for `RLM.completion`.
    """
    async with contextlib.AsyncExitStack() as own:
        if asked.place is not None:
            await own.enter_async_context(asked.place)
        context = asked.context
        if not isinstance(context, StoredContext):
            started = time.monotonic()
            context = own.enter_context(await _stored_in_time(asked, run))
            asked = dataclasses.replace(asked, spent_s=time.monotonic() - started)
        if engine is None:
            engine = await own.enter_async_context(parts.running(EventLoopRef.here()))
        begun = begun_run(
            asked,
            run,
            context,
            engine,
            routing=await parts.routing(engine, asked.model, asked.sub_model, asked.limits),
            receivers=receivers,
            query_handler=query_handler,
            is_auto=is_auto,
            repl=repl,
        )
        completion = await begun.run(context)
    if (diverged := parts.diverged) is not None:  # raised again: model code may have caught it and answered
        run.hand_to(diverged)
        raise diverged
    return dataclasses.replace(completion, prompt=asked.prompt, root_prompt=asked.question)


async def _stored_in_time(asked: Asked, run: Run) -> StoredContext:
    """Store the context within `run_timeout_s`. A stream or a file that stalls keeps a thread of its own alone.

    Returns:
        The context. If the run was stopped meanwhile, a text that says so: it ends as it begins.

    Raises:
        LimitReached: It took longer.
        ConfigurationError: As for `RLM.completion`.
    """
    limit_s = asked.limits.run_timeout_s
    try:
        return await run.before(
            in_thread(lambda _: stored(asked.context, asked.question), discard=StoredContext.close), limit_s
        )
    except StopRequested:
        return stored("stopped before the context was read", asked.question)
    except Late:
        assert limit_s is not None
        raise LimitReached("run_timeout_s", limit_s, limit_s) from None


def begun_run(
    asked: Asked,
    run: Run,
    context: StoredContext,
    engine: Engine,
    *,
    routing: Routing,
    receivers: Sequence[Emit] = (),
    query_handler: QueryHandlerFactory | None = None,
    is_auto: bool = False,
    repl: PersistentRepl | None = None,
) -> Runner | RemoteRun:
    """Return a root run that has not begun, on the parts of an engine: on this machine, or on a node of its cluster.

    Args:
        engine: The parts.
        Others: As for `composed_run`.

    Raises:
        ConfigurationError: As for `composed_run`; or the request cannot be sent to a node.
    """
    if isinstance(engine.place, RunningCluster):
        _require_types(asked, routing)
        cluster = engine.place
        events = _events(asked, run, receivers)
        return run.begin(
            cluster.nodes.run(
                asked, routing=routing, handler=engine.handler, engine=cluster.spec, events=events, is_auto=is_auto
            )
        )
    return composed_run(
        asked,
        run,
        context,
        routing=routing,
        completing=asked.completed_by(engine.handler),
        sandbox=engine.sandbox,
        recorder=engine.recorder,
        receivers=receivers,
        query_handler=query_handler,
        is_auto=is_auto,
        repl=repl,
    )


def composed_run(
    asked: Asked,
    run: Run,
    context: StoredContext,
    *,
    routing: Routing,
    completing: Completing,
    sandbox: Sandbox,
    recorder: Recorder | None = None,
    receivers: Sequence[Emit] = (),
    query_handler: QueryHandlerFactory | None = None,
    is_auto: bool = False,
    repl: PersistentRepl | None = None,
) -> Runner:
    """Return the loop of a root run, which has not begun.

    Args:
        asked: The request.
        run: Handle of the run, which takes the loop.
        context: Context of the run.
        routing: Picks the client of each call.
        completing: Completes the calls.
        sandbox: Has the REPLs of the run.
        recorder: Writes down each call; None writes none.
        receivers: Callbacks for its events, in addition to the one of the request.
        query_handler: Replaces the recursion; None keeps it.
        is_auto: Whether a child gets a REPL only if it needs one.
        repl: REPL that outlives the run; None takes the one of the request, or opens one for the run.

    Raises:
        ConfigurationError: The root model answers in text, and an answer of a type is wanted.
    """
    _require_types(asked, routing)
    limits, events = asked.limits, _events(asked, run, receivers)
    ledger = Ledger(limits)
    calls = TreeCalls(completing, ledger, events, recorder, routing=routing, tells_text=asked.tells_text)
    tree = Tree(calls, ledger, sandbox, events, asked.instructions, query_handler, is_auto)
    if events.is_wanted:
        metadata = _metadata(routing, sandbox, limits, context)
        events.of(ROOT_RUN, 0)(RunStarted, asked.question, metadata["model"], metadata)
    ends_at = None if limits.run_timeout_s is None else time.monotonic() + limits.run_timeout_s - asked.spent_s
    caller = Caller(ROOT_RUN, 0, asked.question)
    runner = open_run(tree, caller, ends_at, asked.tools, asked.output_type, asked.repl or repl)
    runner.spent_s = asked.spent_s
    return run.begin(runner)


def _require_types(asked: Asked, routing: Routing) -> None:
    root = routing.pick(None, 0)
    if asked.output_type is not None and not root.answers_types:
        raise ConfigurationError(
            f"the model {root.model_name} answers in text: leave out output_type, or name another model"
        )


def _events(asked: Asked, run: Run, receivers: Sequence[Emit]) -> TreeEvents:
    told: list[Emit] = [*receivers, *([asked.on_event] if asked.on_event else [])]
    return TreeEvents(run.id, [*told, *([run.log.add] if run.log else []), *BOARD.receivers(run.id)])


def _metadata(routing: Routing, sandbox: Sandbox, limits: Limits, context: StoredContext) -> dict[str, Any]:
    """Return the facts of a root run that its first event tells, without secrets."""
    info = context.info
    return {
        "version": __version__,
        "model": routing.pick(None, 0).model_name,
        "sub_model": routing.pick(None, 1).model_name,
        "isolation": sandbox.level,
        "limits": limits.model_dump(),
        "context": {"type": info.type_name, "chars": info.total_chars, "parts": info.parts_total},
    }
