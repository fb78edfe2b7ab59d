"""The names under which a context and a question can be given, and the limits of one run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker import RLM, Completion, ConfigurationError, LimitReached, Limits, RunLimits, ScriptedClient
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.stand_ins import Hanging

WAYS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("text", "What?"), {}),
    (("text",), {"question": "What?"}),
    ((), {"context": "text", "question": "What?"}),
    ((), {"prompt": "text", "root_prompt": "What?"}),
]
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, "there is no context"),
    ((), {"question": "What?"}, "there is no context"),
    (("text",), {"context": "text"}, "give the context once, as prompt or as context"),
    (("text", "What?"), {"question": "What?"}, "give the question once, as root_prompt or as question"),
]


def rlm() -> RLM:
    return RLM(ScriptedClient(["```repl\nFINAL(context)\n```"]))


async def awaited(*given: Any, **named: Any) -> Completion:
    return await rlm().acompletion(*given, **named)


async def streamed(*given: Any, **named: Any) -> Any:
    return [event async for event in rlm().stream(*given, **named)][-1]


@pytest.mark.parametrize(("given", "named"), WAYS)
def test_context_and_question_are_given_under_either_name(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    done = rlm().completion(*given, **named)
    assert done.response == "text"
    assert "What?" in str(done.messages[1].content)


@pytest.mark.parametrize("ask", [awaited, streamed])
@pytest.mark.parametrize(("given", "named"), WAYS)
async def test_coroutines_take_the_same_names(
    ask: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    assert (await ask(*given, **named)).response == "text"


@pytest.mark.parametrize(("given", "named", "why"), REFUSED)
async def test_context_given_twice_or_not_at_all_is_refused(
    given: tuple[Any, ...], named: dict[str, Any], why: str
) -> None:
    for ask in (awaited, streamed):
        with pytest.raises(ConfigurationError, match=why):
            await ask(*given, **named)
    with pytest.raises(ConfigurationError, match=why):
        rlm().completion(*given, **named)


def test_context_may_be_none(open_sandbox: Sandbox) -> None:
    assert (
        RLM(ScriptedClient(["```repl\nFINAL(repr(context))\n```"]), sandbox=open_sandbox)
        .completion(None, "What?")
        .response
        == "None"
    )


@pytest.mark.parametrize(
    ("context", "question", "prompt"),
    [
        ("text", "What?", "text"),
        ("x" * (1 << 16), None, "x" * (1 << 16)),
        ("x" * ((1 << 16) + 1), "What?", None),
        ({"role": "user", "content": "text"}, "What?", None),
    ],
)
async def test_completion_has_what_was_asked_and_no_large_context(
    context: object, question: str | None, prompt: str | None
) -> None:
    done = await RLM(ScriptedClient(["```repl\nFINAL(1)\n```"])).acompletion(context, question)
    assert (done.prompt, done.root_prompt) == (prompt, question)
    assert (done.to_dict()["prompt"], done.to_dict()["root_prompt"]) == (prompt, question)


async def plain(rlm: RLM, **named: Any) -> Completion:
    return await asyncio.to_thread(lambda: rlm.completion("text", "?", **named))


async def awaited_of(rlm: RLM, **named: Any) -> Completion:
    return await rlm.acompletion("text", "?", **named)


async def streamed_of(rlm: RLM, **named: Any) -> Any:
    return [event async for event in rlm.stream("text", "?", **named)][-1]


async def started_of(rlm: RLM, **named: Any) -> Completion:
    return await rlm.start("text", "?", **named)


EACH_WAY = pytest.mark.parametrize("ask", [plain, awaited_of, streamed_of, started_of])


@EACH_WAY
async def test_model_and_limits_of_a_run_hold_once(ask: Callable[..., Any]) -> None:
    """Model and limits of a run hold for that run alone."""
    own = ScriptedClient(["```repl\n1\n```", "the best", "FINAL(own)"], "own")
    rlm = RLM(own, limits=Limits(max_llm_calls=7))
    other = ScriptedClient(["FINAL(other)"], "other")
    assert (await ask(rlm, model=other)).root_model == "other"
    ended = await ask(rlm, limits=RunLimits(max_iterations=1))
    assert (ended.response, ended.limit, ended.root_model) == ("the best", "max_iterations", "own")
    assert (await ask(rlm)).response == "own"
    assert rlm.limits == Limits(max_llm_calls=7)


@EACH_WAY
async def test_time_of_a_run_joins_other_limits(ask: Callable[..., Any]) -> None:
    """The time of a run holds beside its other limits."""
    for named in ({"timeout_s": 0.2}, {"timeout_s": 0.2, "limits": RunLimits(max_depth=0)}):
        rlm = RLM(Hanging(), limits=Limits(run_timeout_s=1000))
        with pytest.raises(LimitReached) as reached:
            await ask(rlm, **named)
        assert (reached.value.limit, reached.value.allowed) == ("run_timeout_s", 0.2)


@EACH_WAY
@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"timeout_s": 5, "limits": Limits(run_timeout_s=5)}, "give the run's time once, as timeout_s or"),
        ({"timeout_s": 0}, "limit run_timeout_s = 0: input should be greater than 0"),
        ({"timeout_s": "5"}, "timeout_s must be an int or float, not str"),
        ({"limits": {"max_depth": 1}}, "limits must be a Limits, not dict"),
        ({"model": 5}, "a model must be a name, a Model, a client or a function, not int"),
    ],
)
async def test_argument_invalid_for_a_run_is_refused(ask: Callable[..., Any], named: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        await ask(RLM(ScriptedClient(["FINAL(1)"])), **named)
