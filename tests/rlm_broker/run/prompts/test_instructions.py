"""The user's instructions: wrong ones are refused when they are made."""

from typing import Any, get_args

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.run.prompts.instructions import Instructions, Profile


def test_invalid_instruction_is_refused_in_words() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"profile": "loud"}, "must be one of both, final, answer, compact, not 'loud'"),
        ({"system": 5}, "the system prompt must be text or a function, not int"),
        ({"prologue": ["a"]}, "the prologue"),
        ({"messages": "mine"}, "messages must be a function, not str"),
        ({"system": "mine", "profile": "final"}, "either a system prompt or a prompt profile"),
    ]
    for given, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            Instructions(**given)
    assert [Instructions(profile=each).profile for each in get_args(Profile)] == [*get_args(Profile)]
    assert Instructions("mine").system == "mine"
    assert callable(Instructions(str).system)
