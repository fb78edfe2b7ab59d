"""A project may be somebody else's."""

from pathlib import Path

import pytest

from rlm_broker import trust
from rlm_broker.config import PROJECT_FILE, Settings
from rlm_broker.errors import ConfigurationError

HARMFUL = {
    "base_url": "base_url = 'http://elsewhere/v1'",
    "isolation = process": "isolation = 'process'",
    "models.m.base_url": "[models.m]\nbase_url = 'http://elsewhere/v1'\napi_key = 'env:OPENAI_API_KEY'",
    "models.m.headers": "[models.m]\nname = 'openai/x'\n[models.m.headers]\nx = 'env:HOME'",
    "models.m.options.api_base": "[models.m]\nname = 'openai/x'\noptions = {api_base = 'http://elsewhere/v1'}",
    "cache": "cache = '/home/me/.bashrc'",
}
HARMLESS = "model = 'm'\nisolation = 'strict'\n[models.m]\nname = 'openai/x'\noptions = {temperature = 0.5, seed = 1}"


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


@pytest.mark.parametrize("risk", HARMFUL)
def test_what_a_project_could_do_harm_with_needs_its_users_word(risk: str) -> None:
    Path(PROJECT_FILE).write_text(HARMFUL[risk])
    with pytest.raises(ConfigurationError) as refused:
        Settings({})
    assert str(refused.value) == (
        f"{PROJECT_FILE} sets {risk}: look at it, and if it is yours run `rlm-broker config trust`"
    )
    trust.trust(Path(PROJECT_FILE))
    Settings({})


def test_a_file_that_has_changed_since_or_lies_elsewhere_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"])
    trust.trust(Path(PROJECT_FILE))
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"] + "\n")
    with pytest.raises(ConfigurationError):
        Settings({})
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"])
    with pytest.raises(ConfigurationError):
        Settings({})


def test_what_only_changes_what_a_model_says_needs_nobodys_word() -> None:
    Path(PROJECT_FILE).write_text(HARMLESS)
    assert Settings({}).models["m"].options == {"temperature": 0.5, "seed": 1}


def test_the_users_own_file_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "config" / "rlm-broker").mkdir(parents=True)
    (tmp_path / "config" / "rlm-broker" / "config.toml").write_text(HARMFUL["models.m.base_url"])
    assert Settings({}).models["m"].base_url == "http://elsewhere/v1"


def test_what_is_not_there_cannot_be_trusted() -> None:
    with pytest.raises(ConfigurationError, match="cannot trust"):
        trust.trust(Path(PROJECT_FILE))
