"""Settings of one model, and that they show no secret."""

from typing import Any

import pytest

from rlm_broker.broker.models.model import Model
from rlm_broker.errors import ConfigurationError


def test_a_key_is_in_no_text_of_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(name="openai/x", api_key="sk-of-the-test", headers={"x-key": "hidden-header"})
    told = f"{model!r} {model} {model.to_dict()} {model.client()!r}"
    assert "sk-of-the-test" not in told
    assert "hidden-header" not in told
    monkeypatch.delenv("NOT_THERE", raising=False)
    for given in ({"api_key": "env:NOT_THERE"}, {"headers": {"x": "env:NOT_THERE"}}):
        with pytest.raises(ConfigurationError, match=r"needs NOT_THERE for its .*, which is not set"):
            Model.from_dict({"name": "openai/x", "base_url": "http://h/v1", **given}).client()


def test_headers_and_options_are_of_one_model_alone() -> None:
    changed: Any = Model(name="openai/x")
    changed.headers["authorization"] = "sk-of-the-test"
    changed.options["temperature"] = 0
    other = Model(name="openai/y")
    assert (other.headers, other.options) == ({}, {})


def test_inconsistent_description_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_retries": -1}, "Model: max_retries: give a whole number of at least 0"),
        ({"requests_per_minute": 0}, "Model: requests_per_minute: "),
        ({"headers": range(1)}, "Model: headers: give texts by name$"),
        ({"max_retries": True, "base_url": 5}, "Model: max_retries: give .* 0; base_url: give text, or None$"),
        ({"temperature": 1}, "Model: there is no 'temperature': give sampling arguments in `options`"),
        ({"max_retry": 1}, r"Model: there is no 'max_retry'; did you mean max_retries\?"),
        (
            {"usd_per_million_tokens": [1, -1]},
            r"usd_per_million_tokens: at \[1\]: give two finite numbers of at least 0",
        ),
        ({"name": "offline", "options": {"temperature": 0}}, "the model offline calls no server"),
    ]
    for wrong, said in cases:
        with pytest.raises(ConfigurationError, match=said):
            Model(**wrong)
