import os
from pathlib import Path

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.settings.settings import BUILT_IN, Setting, Settings, assigned


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project and an empty home of settings."""
    for name in [name for name in os.environ if name.startswith("RLM_BROKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "rlm-broker").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def users(places: Path, text: str) -> None:
    (places / "home" / "rlm-broker" / "config.toml").write_text(text)


def projects(text: str) -> None:
    Path("rlm-broker.toml").write_text(text)


def test_without_anything_the_defaults_hold() -> None:
    settings = Settings({})
    assert settings["model"] == "offline"
    assert {found.source for found in settings.all().values()} == {BUILT_IN}


def test_flags_win_over_the_environment_over_the_projects_file_over_the_users(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "max_iterations"
    users(places, "model = 'theirs'\n[limits]\nmax_iterations = 1\nmax_depth = 4")
    assert Settings({}).all()[name] == Setting(1, str(places / "home" / "rlm-broker" / "config.toml"))
    projects("[limits]\nmax_iterations = 2")
    assert Settings({}).all()[name] == Setting(2, "rlm-broker.toml")
    monkeypatch.setenv("RLM_BROKER_MAX_ITERATIONS", "3")
    assert Settings({}).all()[name] == Setting(3, "RLM_BROKER_MAX_ITERATIONS")
    settings = Settings(assigned(["max_iterations=4"]))
    assert settings.all()[name] == Setting(4, "command line")
    assert settings["model"] == "theirs"
    assert settings.limits.max_depth == 4


@pytest.mark.parametrize(
    ("text", "value"), [("max_tokens = 'none'", None), ("max_tokens = 5", 5), ("max_tokens = '7'", 7)]
)
def test_none_is_no_bound_wherever_it_is_written(text: str, value: int | None) -> None:
    projects(f"[limits]\n{text}")
    assert Settings({}).limits.max_tokens == value


def test_turns_may_differ_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLM_BROKER_MAX_ITERATIONS", "20, 5")
    assert Settings({}).limits.max_iterations == (20, 5)
    monkeypatch.delenv("RLM_BROKER_MAX_ITERATIONS")
    projects("[limits]\nmax_iterations = [9, 3]")
    assert Settings({}).limits.max_iterations == (9, 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modle = 'x'", "rlm-broker.toml: there is no setting 'modle'; did you mean model?"),
        ("[limits]\nmax_itertions = 3", "limits.max_itertions is no limit; did you mean max_iterations?"),
        ("[limits]\nmax_depth = -1", "limit max_depth = -1 (rlm-broker.toml): input should be greater than"),
        ("max_depth = 1", "rlm-broker.toml: max_depth is a limit: write it below [limits]"),
        ("limits = 3", "limits is a table"),
        ("= broken", "rlm-broker.toml is no TOML: "),
    ],
)
def test_a_wrong_file_is_an_error_that_says_which_and_what(text: str, sentence: str) -> None:
    projects(text)
    with pytest.raises(ConfigurationError) as refused:
        Settings({})
    assert sentence in str(refused.value)


def test_a_wrong_variable_is_named_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLM_BROKER_MAX_DEPHT", "2")
    with pytest.raises(ConfigurationError, match=r"RLM_BROKER_MAX_DEPHT: .* did you mean max_depth\?"):
        Settings({})


def test_a_file_that_cannot_be_read_is_an_error() -> None:
    Path("rlm-broker.toml").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot read rlm-broker\.toml: Is a directory"):
        Settings({})
