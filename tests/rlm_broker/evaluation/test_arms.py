import asyncio
from typing import Any

import pytest

from rlm_broker import LMRequest, ModelFailed, ScriptedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.arms import arms_of, differences

ANSWERED = "```repl\nFINAL(llm_query('a'))\n```"


def _asked(name: str, client: ScriptedClient) -> tuple[str, dict[str, Any]]:
    said, facts = asyncio.run(arms_of([name])[name].ask(client, None, "the context", "Who?"))
    assert facts.pop("seconds") > 0
    return said, facts


def test_arms_share_the_client_and_have_their_facts() -> None:
    """Calls, tokens and cost of queries count for their run."""

    def reply(request: LMRequest) -> str:
        return ANSWERED if request.is_loop else "Ada"

    client = ScriptedClient(reply, cost_per_call=0.5)
    said, facts = _asked("rlm", client)
    assert facts.pop("tokens") > 0
    assert (said, facts) == ("Ada", {"ended": "answered", "cost": 1.0, "calls": 2, "turns": 1, "depth": 1})
    said, facts = _asked("plain", client)
    assert facts.pop("tokens") > 0
    assert (said, facts) == ("Ada", {"ended": "answered", "cost": 0.5, "calls": 1, "turns": 0, "depth": 0})
    assert "the context" in str(client.requests[-1].messages)


def test_limit_ends_a_run_with_what_it_has() -> None:
    said, facts = _asked("rlm:max_iterations=1", ScriptedClient(["nothing yet", "Ada"]))
    assert (said, facts["ended"]) == ("Ada", "limited")
    said, facts = _asked("rlm:max_llm_calls=1", ScriptedClient(["```repl\nanswer['content'] = 'Bela'\n```", "x"]))
    assert (said, facts["ended"]) == ("Bela", "limited")


def test_context_that_does_not_fit_scores_and_is_no_failure() -> None:
    said, facts = _asked("plain", ScriptedClient([ModelFailed("the request is longer than the context window")]))
    assert (said, facts["ended"]) == ("", "does_not_fit")
    with pytest.raises(ModelFailed, match="no credit"):
        _asked("plain", ScriptedClient([ModelFailed("no credit")]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rlm0", "there is no arm 'rlm0'"),
        ("Plain", "there is no arm"),
        ("rlm:", "there is no limit ''"),
        ("rlm:recursion=never", "recursion must be"),
        ("rlm:max_iteration=5", "did you mean max_iterations"),
        ("rlm:max_iterations=many", "max_iterations = many"),
        ("rlm:prompt_profile=none", "the prompt profile must be"),
    ],
)
def test_wrong_arm_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        arms_of([name])
    assert why in str(refused.value)
    with pytest.raises(ConfigurationError, match="there is no arm: name some"):
        arms_of([])


def test_arms_are_compared_on_the_questions_that_both_have() -> None:
    scores = {
        ("rlm", "8k"): {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.0},
        ("plain", "8k"): {"a": 0.0, "b": 1.0, "c": 0.5},
        ("rlm", "1m"): {"a": 1.0},
        ("rlm2", "1m"): {"a": 0.25},
        ("plain", "64k"): {"a": 1.0},
    }
    assert differences(scores) == pytest.approx(
        {
            "rlm - plain 8k": 1 / 3,
            "rlm - plain 8k stderr": 1 / 3,
            "rlm2 - rlm 1m": -0.75,
            "rlm2 - rlm 1m stderr": 0,
        }
    )
