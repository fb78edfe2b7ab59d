"""Keys: found by their text, which the server forgets."""

import base64

import pytest

from rlm_broker import ConfigurationError, RunLimits
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import Keys, ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.settings import RIGHTS, KeySettings

ANN = ServerKey(Owner("ann"), frozenset({"run"}))
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


@pytest.mark.parametrize("sent", [None, "", TEXT, "Bearer", "Bearer  ", "Token x", "Basic", basic("ann:")])
def test_request_without_a_key_is_told_where_to_give_one(sent: str | None) -> None:
    with pytest.raises(ApiError, match="give a key of this server in the header `Authorization: Bearer KEY`"):
        Keys([(ANN, TEXT)]).authenticated(sent)


def test_credentials_with_other_characters_are_none() -> None:
    """A decoder that leaves them out would find a key in them."""
    with pytest.raises(ApiError, match="give a key"):
        Keys([(ANN, TEXT)]).authenticated(basic(f"ann:{TEXT}").replace("Basic ", "Basic !"))


def test_settings_name_the_variables_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", f" {TEXT}\n")
    limits = RunLimits(max_tokens=5)
    settings = KeySettings(key="env:ANNS_KEY", rights=("execute",), models=("m",), limits=limits, usd_a_day=2)
    key = Keys.of({"ann": settings}).authenticated(f"Bearer {TEXT}")
    assert key == ServerKey(Owner("ann", frozenset({"m"}), limits, 2.0), frozenset({"execute"}))


def test_made_key_has_all_rights() -> None:
    keys, text = Keys.made()
    assert keys.authenticated(f"Bearer {text}").rights == RIGHTS
    assert len(text) == len("rlm-") + 32  # 24 random bytes
    assert Keys.made()[1] != text


@pytest.mark.parametrize(
    ("texts", "why"), [(["x" * 15], "has 15 characters: give at least 16"), ([TEXT, TEXT], "is that of another one")]
)
def test_keys_that_cannot_be_used_are_refused(texts: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Keys([(ANN, text) for text in texts])


def test_key_of_the_least_length_is_taken() -> None:
    assert Keys([(ANN, "x" * 16)]).authenticated(f"Bearer {'x' * 16}") is ANN


def test_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", " ")
    with pytest.raises(ConfigurationError, match=r"^serve\.keys\.ann: the variable ANNS_KEY is not set$"):
        Keys.of({"ann": KeySettings(key="env:ANNS_KEY")})


def test_missing_right_is_named() -> None:
    ANN.require("run")
    with pytest.raises(ApiError, match="lacks the right 'stop'") as refused:
        ANN.require("stop")
    assert refused.value.status == 403


def test_one_of_several_rights_is_enough() -> None:
    ANN.require_one_of("stop", "run")
    with pytest.raises(ApiError, match="lacks the rights 'stop' and 'execute': one of them is needed") as refused:
        ANN.require_one_of("stop", "execute")
    assert (refused.value.status, refused.value.code) == (403, "not_allowed")
