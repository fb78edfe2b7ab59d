"""Under which names a context and a question are given."""

from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker import RLM, Completion, ConfigurationError, ScriptedClient

WAYS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("text", "What?"), {}),
    (("text",), {"question": "What?"}),
    ((), {"context": "text", "question": "What?"}),
    ((), {"prompt": "text", "root_prompt": "What?"}),
]
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, "there is no context"),
    ((), {"question": "What?"}, "there is no context"),
    (("text",), {"context": "text"}, "give the context once: it is prompt or context"),
    (("text", "What?"), {"question": "What?"}, "give the question once: it is root_prompt or question"),
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


def test_context_may_be_none() -> None:
    assert RLM(ScriptedClient(["```repl\nFINAL(repr(context))\n```"])).completion(None, "What?").response == "None"
