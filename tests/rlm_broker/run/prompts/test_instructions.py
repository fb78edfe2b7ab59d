"""The user's instructions: wrong ones are refused when they are made."""

from typing import Any, get_args

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.run.prompts.instructions import Instructions, Profile


@pytest.mark.parametrize("profile", get_args(Profile))
def test_profile_must_be_known(profile: Profile) -> None:
    assert Instructions(profile=profile).profile == profile


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"profile": "loud"}, "must be one of both, final, answer, compact, not 'loud'"),
        ({"system": 5}, "the system prompt must be text or a function, not int"),
        ({"prologue": ["a"]}, "the prologue"),
        ({"system": "mine", "profile": "final"}, "either a system prompt or a prompt profile"),
    ],
)
def test_invalid_instruction_is_refused_in_words(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Instructions(**given)


def test_system_prompt_may_be_text_or_function() -> None:
    """A system prompt may be a text or a function of the depth."""
    assert Instructions("mine").system == "mine"
    assert callable(Instructions(str).system)
