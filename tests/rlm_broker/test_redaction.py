"""Which texts count as secrets, and that none of them is left."""

import pytest

from rlm_broker.clients.failures import one_line
from rlm_broker.redaction import SLICE_CHARS, is_secret_name, redact, secrets_in, secrets_of_environment


@pytest.mark.parametrize(
    "name", ["api_key", "OPENAI_API_KEY", "auth-token", "Secret", "authorization", "extra_headers"]
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["monkey", "max_tokens", "keyboard", "temperature", "api_base"])
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_in_options_are_found_at_any_depth_with_their_words() -> None:
    options = {
        "api_key": "one two",
        "temperature": 1,
        "extra_headers": {"X-Team": "Bearer three"},
        "nested": {"client_secret": "four", "kept": "public"},
        "token": None,
    }
    assert set(secrets_in(options)) == {"one two", "one", "two", "Bearer three", "Bearer", "three", "four"}


def test_known_secrets_are_replaced_the_longer_one_first_and_short_values_are_kept() -> None:
    text = "canary-1 and canary-1-and-more and 1"
    assert redact(text, ["canary-1", "canary-1-and-more", "1"]) == "[redacted] and [redacted] and 1"


def test_failures_hide_secrets_of_the_environment_known_ones_and_what_looks_like_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_VENDORS_SECRET", "env-secret-value")
    assert "env-secret-value" in secrets_of_environment()
    said = one_line("env-secret-value, known-secret,\nsk-of-somebody-else-0123456789", ["known-secret"])
    assert said == "[redacted], [redacted], [redacted]"


@pytest.mark.parametrize("at", [0, SLICE_CHARS - 20, SLICE_CHARS - 3, SLICE_CHARS, 2 * SLICE_CHARS - 1])
def test_secrets_across_slices_are_redacted_whole(at: int) -> None:
    secret = "sk-" + "a1" * 5_000
    text = "." * at + secret + " after " + "." * SLICE_CHARS
    assert redact(text) == text.replace(secret, "[redacted]")
