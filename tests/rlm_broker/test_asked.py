"""The names under which a context and a question can be given, and the limits of one run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker import RLM, Completion, ConfigurationError, LimitReached, Limits, RunLimits, ScriptedClient
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.stand_ins import Hanging
from tests.support.tables import table

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


def rlm(sandbox: Sandbox) -> RLM:
    return RLM(ScriptedClient(["```repl\nFINAL(context)\n```"]), sandbox=sandbox)


async def plain(rlm: RLM, *given: Any, **named: Any) -> Completion:
    return await asyncio.to_thread(lambda: rlm.completion(*given, **named))


async def awaited(rlm: RLM, *given: Any, **named: Any) -> Completion:
    return await rlm.acompletion(*given, **named)


async def streamed(rlm: RLM, *given: Any, **named: Any) -> Any:
    return [event async for event in rlm.stream(*given, **named)][-1]


async def started(rlm: RLM, *given: Any, **named: Any) -> Completion:
    return await rlm.start(*given, **named)


async def test_context_and_question_are_given_once_under_either_name(open_sandbox: Sandbox) -> None:
    for ask in (plain, awaited, streamed):
        for given, named in WAYS:
            done = await ask(rlm(open_sandbox), *given, **named)
            assert done.response == "text"
            assert "What?" in str(done.messages[1].content)
        for given, named, why in REFUSED:
            with pytest.raises(ConfigurationError, match=why):
                await ask(rlm(open_sandbox), *given, **named)


async def test_completion_has_what_was_asked_and_no_large_context(open_sandbox: Sandbox) -> None:
    cases: list[tuple[object, str | None, str | None]] = [
        ("text", "What?", "text"),
        ("x" * (1 << 16), None, "x" * (1 << 16)),
        ("x" * ((1 << 16) + 1), "What?", None),
        ({"role": "user", "content": "text"}, "What?", None),
        (None, "What?", None),
    ]
    for context, question, prompt in cases:
        done = await rlm(open_sandbox).acompletion(context, question)
        assert (done.prompt, done.root_prompt) == (prompt, question)
        assert (done.to_dict()["prompt"], done.to_dict()["root_prompt"]) == (prompt, question)


EACH_WAY = table("ask", [plain, awaited, streamed, started])


@EACH_WAY
async def test_model_and_limits_of_a_run_hold_once(open_sandbox: Sandbox, ask: Callable[..., Any]) -> None:
    own = ScriptedClient(["```repl\n1\n```", "the best", "FINAL(own)"], "own")
    rlm = RLM(own, limits=Limits(max_llm_calls=7), sandbox=open_sandbox)
    other = ScriptedClient(["FINAL(other)"], "other")
    assert (await ask(rlm, "text", "?", model=other)).root_model == "other"
    ended = await ask(rlm, "text", "?", limits=RunLimits(max_iterations=1))
    assert (ended.response, ended.limit, ended.root_model) == ("the best", "max_iterations", "own")
    assert (await ask(rlm, "text", "?")).response == "own"
    assert (rlm.limits.max_llm_calls, rlm.limits.max_iterations) == (7, 30)


@EACH_WAY
async def test_time_of_a_run_joins_other_limits(open_sandbox: Sandbox, ask: Callable[..., Any]) -> None:
    for named in ({"timeout_s": 0.2}, {"timeout_s": 0.2, "limits": RunLimits(max_depth=0)}):
        rlm = RLM(Hanging(), limits=Limits(run_timeout_s=1000), sandbox=open_sandbox)
        with pytest.raises(LimitReached) as reached:
            await ask(rlm, "text", "?", **named)
        assert (reached.value.limit, reached.value.allowed) == ("run_timeout_s", 0.2)


@EACH_WAY
async def test_argument_invalid_for_a_run_is_refused(ask: Callable[..., Any]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"timeout_s": 5, "limits": Limits(run_timeout_s=5)}, "give the run's time once, as timeout_s or"),
        ({"timeout_s": 0}, "limit run_timeout_s = 0: give a finite number of seconds above 0"),
        ({"timeout_s": "5"}, "timeout_s must be an int or float, not str"),
        ({"limits": {"max_depth": 1}}, "limits must be a Limits, not dict"),
        ({"model": 5}, "a model must be a name, a Model, a client or a function, not int"),
    ]
    for named, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            await ask(RLM(ScriptedClient(["FINAL(1)"])), "text", "?", **named)
