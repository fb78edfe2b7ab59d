"""Join tokens and secrets: how often and how long they are valid, and what is kept of them."""

import gc

import pytest

from rlm_broker.cluster import tokens as module
from rlm_broker.cluster.tokens import Tokens
from rlm_broker.errors import ConfigurationError


def test_token_is_valid_as_often_as_asked() -> None:
    tokens = Tokens()
    twice, always = tokens.make(uses=2), tokens.make()
    for _ in range(2):
        found = tokens.find(twice)
        assert found is not None
        tokens.use(found)
    assert tokens.find(twice) is None
    for _ in range(100):
        found = tokens.find(always)
        assert found is not None
        tokens.use(found)


def test_looking_at_a_token_uses_none() -> None:
    """A node that is refused for another reason can join later."""
    tokens = Tokens()
    once = tokens.make(uses=1)
    assert tokens.find(once) is tokens.find(once) is not None


def test_token_expires() -> None:
    now = 100.0
    tokens = Tokens(lambda: now)
    token = tokens.make(valid_s=10)
    now = 109.9
    assert tokens.find(token) is not None
    now = 110.0
    assert tokens.find(token) is None


@pytest.mark.parametrize("change", ["", " ", "x", "\ud800", "\0"])
def test_similar_token_is_not_valid(change: str) -> None:
    tokens = Tokens()
    token = tokens.make()
    assert tokens.find(token + change if change else token[:-1]) is None
    assert tokens.find(change + token if change else "") is None


def test_tokens_are_random_and_kept_as_hashes() -> None:
    """No object that the process keeps has the text of a token."""
    tokens = Tokens()
    made = [tokens.make(), tokens.secret_of("node")]
    assert len({*made}) == 2
    assert all(len(token) == 43 for token in made)
    held = [value for each in tokens._passes for value in gc.get_referents(each, each.__dict__)]
    assert not any(token in str(held) for token in made)


def test_chosen_token_must_be_long_and_plain() -> None:
    tokens = Tokens()
    for wrong in ("short", "é" * 40, "a\n" * 40):
        with pytest.raises(ConfigurationError, match="at least 32 printable ASCII characters"):
            tokens.add(wrong)
    for uses, valid_s in ((0, None), (None, 0.0), (None, float("nan"))):
        with pytest.raises(ConfigurationError, match="must be"):
            tokens.make(uses=uses, valid_s=valid_s)
    tokens.add("a" * 32)
    assert tokens.find("a" * 32) is not None


def test_node_has_one_secret() -> None:
    tokens = Tokens()
    first, other = tokens.secret_of("a"), tokens.secret_of("b")
    second = tokens.secret_of("a")
    assert tokens.find(first) is None
    found = tokens.find(second)
    assert found is not None
    assert found.node == "a"
    tokens.forget("a")
    assert tokens.find(second) is None
    assert tokens.find(other) is not None


def test_secrets_are_bounded_and_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret that was shown longest ago is forgotten first."""
    monkeypatch.setattr(module, "MOST_PASSES", 3)
    tokens = Tokens()
    token, first, second = tokens.make(), tokens.secret_of("a"), tokens.secret_of("b")
    shown = tokens.find(first)
    assert shown is not None
    tokens.use(shown)
    third = tokens.secret_of("c")
    assert [tokens.find(each) is not None for each in (token, first, second, third)] == [True, True, False, True]
