"""Keys: found by their text, which the server forgets."""

import base64

import pytest

from rlm_broker import ConfigurationError, RunLimits
from rlm_broker.hosting.owner import Owner
from rlm_broker.service.errors import ApiError
from rlm_broker.service.keys import Key, Keys
from rlm_broker.service.settings import RIGHTS, KeySettings

ANN = Key(Owner("ann"), frozenset({"run"}))
TEXT = "a-key-of-some-length"


def test_key_is_found_by_its_text() -> None:
    keys = Keys([(ANN, TEXT)])
    assert keys.authenticated(f"Bearer {TEXT}") is ANN
    assert keys.authenticated(f"bearer  {TEXT} ") is ANN
    assert TEXT not in repr(vars(keys))


def basic(credentials: str, scheme: str = "Basic") -> str:
    return f"{scheme} {base64.b64encode(credentials.encode()).decode()}"


@pytest.mark.parametrize("user", ["", "ann", "ann b@example.org"])
def test_key_is_taken_as_the_password_of_any_user(user: str) -> None:
    keys = Keys([(ANN, f"{TEXT}:1")])
    assert keys.authenticated(basic(f"{user}:{TEXT}:1")) is ANN
    assert keys.authenticated(basic(f"{user}:{TEXT}:1", "bASIC ")) is ANN


@pytest.mark.parametrize("credentials", ["", ":", TEXT, f"{TEXT}:", f"{TEXT}:other", f"ann:{TEXT}x", f"ann:x{TEXT}"])
def test_other_passwords_are_refused(credentials: str) -> None:
    with pytest.raises(ApiError, match="a key of this server") as refused:
        Keys([(ANN, TEXT)]).authenticated(basic(credentials))
    assert refused.value.status == 401


@pytest.mark.parametrize(
    "sent", [None, "", TEXT, f"Basic {TEXT}", "Bearer", "Bearer other", f"Bearer {TEXT}x", "Bearer \udcff"]
)
def test_other_texts_are_refused(sent: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        Keys([(ANN, TEXT)]).authenticated(sent)
    assert refused.value.status == 401
    assert refused.value.headers["www-authenticate"] == "Bearer"
    assert TEXT not in refused.value.message


def test_settings_name_the_variables_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", f" {TEXT}\n")
    limits = RunLimits(max_tokens=5)
    settings = KeySettings(key="env:ANNS_KEY", rights=("execute",), models=("m",), limits=limits, usd_a_day=2)
    key = Keys.of({"ann": settings}).authenticated(f"Bearer {TEXT}")
    assert key == Key(Owner("ann", frozenset({"m"}), limits, 2.0), frozenset({"execute"}))


def test_made_key_has_all_rights() -> None:
    keys, text = Keys.made()
    assert keys.authenticated(f"Bearer {text}").rights == RIGHTS
    assert Keys.made()[1] != text


@pytest.mark.parametrize(("texts", "why"), [(["short"], "has 5 characters"), ([TEXT, TEXT], "is that of another one")])
def test_keys_that_cannot_be_used_are_refused(texts: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Keys([(ANN, text) for text in texts])


def test_missing_right_is_named() -> None:
    ANN.require("run")
    with pytest.raises(ApiError, match="lacks the right 'stop'") as refused:
        ANN.require("stop")
    assert refused.value.status == 403
