"""Branches of a run, and the best of several runs.

Theory of operation. Branches are runs of their own: each has its events, its REPL and its ledger. An equal part of what
the run before them has left is their limits, and what they use counts in the ledger of that run, too. So none can use
the part of another one, and all of them together with that run stay within its limits.

The best of several runs is one run and its branches. That run goes on itself, so turns that they share are paid once.
"""

import asyncio
import contextlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, RlmBrokerError, require_kind
from rlm_broker.events.event import IterationStarted
from rlm_broker.limits import Limits
from rlm_broker.results import BestOf, Completion
from rlm_broker.run.earlier import Earlier, context_facts, first_turns
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.request import RunRequest, stored
from rlm_broker.run.run import Run, RunJob
from rlm_broker.run.tree import Progress
from rlm_broker.values.text import jsonable

if TYPE_CHECKING:
    from rlm_broker.run.engine import Engine

MOST_BRANCHES = 256
"""Branches of one call at most. Each has a REPL of its own."""
Scorer = Callable[[Completion[Any]], float | Awaitable[float]]
"""Function that judges a completion: the greatest number is the best. A plain function runs in a thread."""


def branches_of(
    engine: "Engine", request: RunRequest, job: RunJob, number: int, after_turn: int | None
) -> list[RunJob]:
    """Return the jobs of branches of a run, to be started; see `Run.branch`."""
    engine.require_branching(request)
    require_number(number)
    require_kind("after_turn", after_turn, int, type(None))
    after = job.turns if after_turn is None else after_turn
    if not 0 <= after <= job.turns:
        raise ConfigurationError(
            f"after_turn must be 0 to {job.turns}, a turn after which the run went on, not {after}"
        )
    samples = job.samples if request.earlier is None else request.earlier.samples
    before = Earlier(job.id, Progress(), None, samples=samples)
    if (runner := job.answering) is not None:
        progress, info = first_turns(runner.progress, after, runner.record), runner.context
        context = context_facts(info.type_name, info.total_chars, info.parts_total)
        before = replace(before, progress=progress, context=context, ledger=runner.ledger)
    limits = shared_out(request.limits, (before.ledger or Ledger(request.limits)).left(), number)
    requests = [replace(request, limits=limits, earlier=replace(before, sample=next(samples))) for _ in range(number)]
    return [engine.begin(each, job.event_loop, is_followed=True) for each in requests]


def require_number(number: object) -> None:
    """Raise `ConfigurationError` for a number of branches or runs that cannot be had."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_BRANCHES:
        raise ConfigurationError(f"n must be an integer of 1 to {MOST_BRANCHES}, not {number!r}")


def shared_out(limits: Limits, left: Mapping[str, float | None], number: int) -> Limits:
    """Return limits with an equal part of what is left, by the name of its limit, for each of `number` runs.

    Raises:
        ConfigurationError: Less is left than one call or one token for each.
    """
    parts: dict[str, float] = {}
    for name, most in left.items():
        if most is None:
            continue
        part = most / number if name == "max_budget_usd" else most // number
        if part <= 0 and name != "max_children_total":
            raise ConfigurationError(f"{name} has {most:g} left, too little for {number} branches: raise it")
        parts[name] = part
    return limits.replace(**parts)


# -- the best of several -----------------------------------------------------------------------------------------------


async def best_of(
    engine: "Engine", request: RunRequest, number: int, after_turn: int, scorer: Scorer | None
) -> BestOf[Any]:
    """Answer a question `number` times, and choose one answer; see `RLM.best_of`."""
    require_number(number)
    require_kind("after_turn", after_turn, int)
    if after_turn < 0:
        raise ConfigurationError(f"after_turn must be 0 or more, not {after_turn}")
    engine.require_branching(request)
    if scorer is not None and not callable(scorer):
        raise ConfigurationError(f"scorer must be a function, not {type(scorer).__name__}")
    shared_out(request.limits, Ledger(request.limits).left(), number)  # limits that are too low are refused unpaid
    async with engine.borrowed(), contextlib.AsyncExitStack() as stack:
        if not isinstance(request.context, StoredContext):  # one copy for all runs
            reading = in_thread(lambda _: stored(request.context, request.question), discard=StoredContext.close)
            context = stack.enter_context(await reading)
            request = replace(request, context=context)
        first = await stack.enter_async_context(engine.start(request, is_followed=True))
        await _has_taken(first, after_turn)
        others = first.branch(number - 1, min(after_turn, first.turns)) if number > 1 else []
        runs = [first, *[await stack.enter_async_context(run) for run in others]]
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RlmBrokerError):
            raise outcome
    ended: list[Any] = outcomes
    completions = [each for each in ended if isinstance(each, Completion)]
    if not completions:
        raise ended[0]
    answered = [each for each in completions if each.response is not None]
    if not answered:
        return BestOf(completions[0], tuple(ended), 0)
    scores = () if scorer is None else await _scored(answered, scorer)
    chosen = majority(answered) if scorer is None else answered[scores.index(max(scores))]
    return BestOf(chosen, tuple(ended), [*map(_key, answered)].count(_key(chosen)))


async def _has_taken(run: Run[Any], turns: int) -> None:
    """Wait until a run has gone on after so many turns, or has ended."""
    async for event in run.events():
        if isinstance(event, IterationStarted) and event.depth == 0 and event.number > turns:
            return


async def _scored(completions: Sequence[Completion[Any]], scorer: Scorer) -> list[float]:
    scores = []
    for each in completions:
        score = await asyncio.to_thread(scorer, each)
        score = await score if inspect.isawaitable(score) else score
        try:
            scores.append(float(score))
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(f"the scorer has returned a {type(score).__name__}: return a number") from None
        if math.isnan(scores[-1]):
            raise ConfigurationError("the scorer has returned NaN: return a number that can be compared")
    return scores


def majority(answered: Sequence[Completion[Any]]) -> Completion[Any]:
    """Return the first of the completions whose answer is the most frequent one."""
    keys = [_key(each) for each in answered]
    counts = [keys.count(key) for key in keys]
    return answered[counts.index(max(counts))]


def _key(completion: Completion[Any]) -> Any:
    """Return what equal answers have in common: their value, or their text but for case, spaces and a full stop."""
    if completion.parsed is not None:
        return jsonable(completion.parsed)
    return " ".join((completion.response or "").casefold().split()).removesuffix(".")
