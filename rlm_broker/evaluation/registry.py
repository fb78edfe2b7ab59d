"""Names that `inspect_ai` finds: the tasks `needles`, `messages` and `own`, the solver `rlm`, the scorer `answer`.

The model given to inspect answers each call of a run, by a client of ours. So its retries, connections, cache, limits
and usage hold for each arm alike, and the log has each call.
"""

import asyncio
import contextvars
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspect_ai import Task, dataset, model, scorer, solver, task
from inspect_ai.util import LimitExceededError

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ModelFailed, RunFailed
from rlm_broker.evaluation import questions
from rlm_broker.evaluation.arms import arms_of, differences
from rlm_broker.evaluation.scoring import Key, score
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage

ARMS = "rlm,plain"
"""Arms of a task, unless others are named."""
Names = str | int | Sequence[str | int]
"""One name or several: inspect makes a list of `-T arm=rlm,plain`."""


class InspectClient(BaseClient):
    """A model of inspect's as a client.

    Args:
        served: The model.
    """

    def __init__(self, served: model.Model) -> None:
        self.model_name = str(served)
        info = model.get_model_info(served)
        self.context_tokens = None if info is None else info.context_length
        self.limit: LimitExceededError | None = None
        """Limit of inspect's that refused a call; it ends the sample."""
        self._model = served
        self._sample = contextvars.copy_context()
        """Context of the sample: inspect books a call to the sample of the task that makes it, and queries of a REPL
        come in tasks of the broker's."""

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request by the model.

        Raises:
            ModelFailed: The call failed, was refused by a limit of inspect's, or was too long for the model.
        """
        config = model.GenerateConfig(max_tokens=request.max_completion_tokens, temperature=request.temperature)
        messages = [_message(message) for message in request.messages]
        call = self._model.generate(messages, config=config)
        try:
            output = await asyncio.get_running_loop().create_task(call, context=self._sample.copy())
        except LimitExceededError as limit:
            self.limit = limit
            raise ModelFailed(f"a limit of inspect was reached: {limit}", "request") from limit
        except Exception as error:  # a provider of inspect's may raise anything, after its own retries
            raise ModelFailed(str(error) or type(error).__name__) from error
        if output.error is not None or output.empty:
            raise ModelFailed(output.error or "the model sent no reply")
        if output.stop_reason == "model_length":
            raise ModelFailed(f"the request is longer than the context window: {output.completion}", "request")
        problem = None if output.completion else f"the reply is empty, and ended by {output.stop_reason}"
        return LMReply(output.completion, _usage(output), problem, output.model)


def _message(message: ChatMessage) -> model.ChatMessage:
    """Return a message in inspect's form: a picture is a part with its address."""
    content: Any = message.content
    if not isinstance(content, str):
        pictures = (part.get("image_url", {}).get("url") for part in content)
        content = [
            {"type": "image", "image": url} if url else part for url, part in zip(pictures, content, strict=True)
        ]
    kinds = {"system": model.ChatMessageSystem, "assistant": model.ChatMessageAssistant}
    return kinds.get(message.role, model.ChatMessageUser)(content=content)


def _usage(output: model.ModelOutput) -> Usage:
    used = output.usage
    if used is None:
        return Usage(total_calls=1)
    cached = used.input_tokens_cache_read or 0
    sent = used.input_tokens + cached + (used.input_tokens_cache_write or 0)
    return Usage(1, sent, used.output_tokens, used.total_cost, cached_input_tokens=cached)


@solver.solver
def rlm(arm: str = "rlm") -> solver.Solver:
    """Answer by a run of ours. In any task of inspect's: `inspect eval TASK --solver rlm_broker/rlm -S arm=rlm2`.

    The question is the input of a sample, and its context is `context` of its metadata. Without one, the input is the
    context, and the task is in it. The role `sub` names the model that code asks.

    Args:
        arm: Name of the arm; a sample with `arm` in its metadata has its own.
    """
    default = arms_of([arm])[arm]

    async def solve(state: solver.TaskState, _: solver.Generate) -> solver.TaskState:
        client = InspectClient(model.get_model())
        role = model.model_roles().get("sub")
        sub = InspectClient(role) if isinstance(role, model.Model) else None
        name = state.metadata.get("arm")
        chosen = arms_of([name])[name] if name else default
        context, question = await asyncio.to_thread(_asked, state)
        try:
            said, state.metadata["run"] = await chosen.ask(client, sub, context, question)
        except RunFailed as failed:
            limit = client.limit or (sub and sub.limit)
            raise (limit or failed) from None
        state.output = model.ModelOutput.from_content(client.model_name, said)
        state.messages.append(state.output.message)
        return state

    return solve


def _asked(state: solver.TaskState) -> tuple[object, str | None]:
    """Return the context of a sample and its question; None if the question is in the context."""
    if "source" in state.metadata:
        return questions.context_of(state.metadata["source"]), state.input_text
    context = state.metadata.get("context")
    return (state.input_text, None) if context is None else (context, state.input_text)


@scorer.metric
def fact(name: str) -> scorer.Metric:
    """Return the mean of a fact of the runs, for example their tokens; NaN if it is not known of each."""

    def measured(scores: list[scorer.SampleScore]) -> scorer.Value:
        facts: list[Any] = [(each.score.metadata or {}).get(name) for each in scores]
        return math.nan if None in facts else math.fsum(facts) / len(facts)

    return measured


@scorer.metric
def better() -> scorer.Metric:
    """Return how much better each arm is than the plain one: see `arms.differences`."""

    def measured(scores: list[scorer.SampleScore]) -> scorer.Value:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for each in scores:
            about = each.sample_metadata or {}
            found.setdefault((about["arm"], about["length"]), {})[about["question"]] = each.score.as_float()
        return differences(found)

    return measured


def _by_arm(figure: scorer.Metric, name: str) -> scorer.Metric:
    return scorer.grouped(figure, "group", all=False, name_template="{group_name}" + name)


@scorer.scorer(
    metrics=[
        _by_arm(scorer.mean(), ""),
        _by_arm(scorer.stderr(), " stderr"),
        *(_by_arm(fact(name), f" {name}") for name in ("cost", "tokens", "turns", "depth", "seconds")),
        better(),
    ]
)
def answer() -> scorer.Scorer:
    """Score an answer from 0 to 1 by the key of its question."""

    async def scored(state: solver.TaskState, target: scorer.Target) -> scorer.Score:
        key = state.metadata["key"]
        expected = tuple(key["expected"]) if isinstance(key["expected"], list) else key["expected"]
        said = state.output.completion.replace(state.input_text, "")  # a repeated question is no answer
        value = score(said, Key(key["scoring"], expected, key["pattern"], tuple(key["choices"])))
        explanation = f"{key['scoring']}: expected {target.text or 'that the text does not tell'}"
        return scorer.Score(value=value, answer=said, explanation=explanation, metadata=state.metadata.get("run"))

    return scored


@task
def needles(arm: Names = ARMS, length: Names = "8k", samples: int = 9, seed: int = 0, asked: Names = "") -> Task:
    """One fact in much text, which shares no word with its question; one of two hops; and one that is missing."""
    return _task(questions.generated("needles", _listed(length), samples, seed, _listed(asked)), arm)


@task
def messages(arm: Names = ARMS, length: Names = "8k", samples: int = 12, seed: int = 0, asked: Names = "") -> Task:
    """Counts, users and dates over thousands of messages. Each message has to be judged by what it means."""
    return _task(questions.generated("messages", _listed(length), samples, seed, _listed(asked)), arm)


@task
def own(data: str, arm: Names = ARMS) -> Task:
    """Questions of a file of JSON lines: the user's own, or a local copy of OOLONG."""
    return _task(questions.own(Path(data)), arm)


def _listed(names: Names) -> list[str]:
    given = str(names).split(",") if isinstance(names, str | int) else map(str, names)
    return [name.strip() for name in given if name.strip()]


def _task(asked: Sequence[questions.TaskQuestion], names: Names) -> Task:
    """Return the task of questions, each asked in each arm."""
    arms = list(arms_of(_listed(names)))
    samples = [_sample(question, arm) for question in asked for arm in arms]
    return Task(dataset.MemoryDataset(samples), solver=rlm(arms[0]), scorer=answer())


def _sample(question: questions.TaskQuestion, arm: str) -> dataset.Sample:
    expected = question.key.expected
    target = list(expected) if isinstance(expected, tuple) else "" if expected is None else str(expected)
    facts = {each: getattr(question, each) for each in ("kind", "length", "source")}
    key = {"key": dataclasses.asdict(question.key), "question": question.id}
    about = {"group": f"{arm} {question.length}", "arm": arm, **facts, **key}
    return dataset.Sample(id=f"{question.id} {arm}", input=question.text, target=target, metadata=about)
