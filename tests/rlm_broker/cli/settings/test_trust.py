"""Trust in projects' files, which may be the work of another person."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlm_broker.cli.settings.settings import PROJECT_FILE, Settings, trust_project
from rlm_broker.errors import ConfigurationError
from tests.support.tables import table

HARMFUL = {
    "base_url": "base_url = 'http://elsewhere/v1'",
    "isolation = process": "isolation = 'process'",
    "models.m.base_url": "[models.m]\nbase_url = 'http://elsewhere/v1'",
    "models.m.headers": "[models.m]\nname = 'openai/x'\n[models.m.headers]\nx = 'env:HOME'",
    "models.m.api_key": "[models.m]\nname = 'openai/x'\napi_key = 'env:AWS_SECRET_ACCESS_KEY'",
    "models.m.name = oobabooga/http://elsewhere": "[models.m]\nname = 'oobabooga/http://elsewhere'",
    "models.x/y.name = x/y": "[models.'x/y']\noptions = {seed = 1}",
    "api_key": "api_key = 'env:AWS_SECRET_ACCESS_KEY'",
    "model = hosted_vllm/x": "model = 'hosted_vllm/x'",
    "sub_model = openai/http://elsewhere": "sub_model = 'openai/http://elsewhere'",
    "models.m.options.api_base": "[models.m]\nname = 'openai/x'\noptions = {api_base = 'http://elsewhere/v1'}",
    "cache": "cache = '/home/me/.bashrc'",
    "python": "python = '/home/me/.venv'",
    "packages": "packages = 'evil==1.0'",
    "tools": "tools = 'tools.py'",
    "output_type": "output_type = '/home/me/.docker/config.json'",
    "model_policy = open": "model_policy = 'open'",
}
HARMLESS = "model = 'm'\nmodel_policy = 'pinned'\nrecursion = 'auto'\nallow_exec = true\nisolation = 'strict'\n[models.m]\nname = 'openai/x'\noptions = {temperature = 0.5, seed = 1}"


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("tools.py").write_text("LENSES = 40")


@table("risk, text", HARMFUL.items())
def test_project_file_needs_trust_for_harmful_settings(risk: str, text: str) -> None:
    Path(PROJECT_FILE).write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        Settings({})
    said = f"{PROJECT_FILE} sets {risk}: look at it, and if you trust it run `rlm-broker config trust`"
    assert str(refused.value) == said
    assert trust_project() == [risk]
    Settings({})


def test_limits_table_gives_only_limits() -> None:
    for line in ("model = 'evil'", "isolation = 'process'", "base_url = 'http://x/v1'", "cache = 'x'"):
        Path(PROJECT_FILE).write_text(f"[limits]\n{line}")
        with pytest.raises(ConfigurationError, match="is not a limit"):
            Settings({})


STRICTER = [
    ("isolation = 'strict'", "isolation = 'standard'", True),
    ("isolation = 'strict'", "isolation = 'auto'", True),
    ("isolation = 'strict'", "", False),
    ("isolation = 'process'", "isolation = 'process'", False),
    ("model_policy = 'pinned'", "model_policy = 'allow'", True),
    ("model_policy = 'open'", "model_policy = 'open'", False),
    ("model_policy = 'pinned'", "", False),
    ("allow_exec = false", "allow_exec = true", True),
    ("allow_exec = false", "", False),
    ("allow_exec = false", "allow_exec = 'False'", False),
    ("isolation = 'standard'", "isolation = 'standard'", False),
    ("", "isolation = 'standard'", True),
    ("", "isolation = 'strict'", False),
    ("[limits]\nmax_budget_usd = 1.0", "[limits]\nmax_budget_usd = 'none'", True),
    ("[limits]\nmax_budget_usd = 1.0", "[limits]\nmax_budget_usd = 2", True),
    ("[limits]\nmax_budget_usd = 1.0", "[limits]\nmax_budget_usd = 0.5", False),
    ("", "[limits]\nmax_budget_usd = 100", False),
    ("[models.mine]\nbase_url = 'http://mine/v1'", "model = 'mine'", False),
]


def test_project_may_only_tighten_limits(tmp_path: Path) -> None:
    (tmp_path / "config" / "rlm-broker").mkdir(parents=True)
    for users, projects, is_refused in STRICTER:
        (tmp_path / "config" / "rlm-broker" / "config.toml").write_text(users)
        Path(PROJECT_FILE).write_text(projects)
        with pytest.raises(ConfigurationError, match="config trust") if is_refused else nullcontext():
            Settings({})


def test_changed_or_moved_file_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"])
    trust_project()
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"] + "\n")
    with pytest.raises(ConfigurationError):
        Settings({})
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    Path(PROJECT_FILE).write_text(HARMFUL["base_url"])
    with pytest.raises(ConfigurationError):
        Settings({})


def test_tools_that_have_changed_since_are_not_trusted() -> None:
    Path(PROJECT_FILE).write_text(HARMFUL["tools"])
    trust_project()
    Settings({})
    Path("tools.py").write_text("LENSES = 41")
    with pytest.raises(ConfigurationError, match="sets tools: look at it"):
        Settings({})
    Path("tools.py").write_text("LENSES = 40")
    Settings({})
    Path("tools.py").unlink()
    with pytest.raises(ConfigurationError, match=r"rlm-broker\.toml: tools: cannot read tools\.py: No such file"):
        Settings({})


def test_harmless_model_options_need_no_trust() -> None:
    Path(PROJECT_FILE).write_text(HARMLESS)
    assert Settings({}).models["m"].options == {"temperature": 0.5, "seed": 1}


def test_the_users_own_file_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "config" / "rlm-broker").mkdir(parents=True)
    (tmp_path / "config" / "rlm-broker" / "config.toml").write_text(HARMFUL["models.m.base_url"])
    assert Settings({}).models["m"].base_url == "http://elsewhere/v1"


def test_missing_file_cannot_be_trusted() -> None:
    with pytest.raises(ConfigurationError, match="cannot trust"):
        trust_project()


MISTAKES = [
    (
        "[models.fast]\nname = 'x/y'\nbase_url = 'http://x/v1'\ntemperature = 0.2",
        "give sampling arguments in `options`",
    ),
    ("[models.fast]\nname = 'openai/x'\nopions = {api_base = 'http://x/v1'}", "did you mean options?"),
    ("isolation = 'stanard'", "rlm-broker.toml: no isolation 'stanard'; choose one of: auto, strict, standard"),
    ("cache = 'x'\nmodel = 5", "rlm-broker.toml: model = 5: give text"),
    ("api_key = 'sk-in-the-clear'", "rlm-broker.toml: api_key: write 'env:NAME'"),
    ("cache = 'x'\n[limits]\nmax_depth = -1", "limit max_depth = -1 (rlm-broker.toml): "),
    ("cache = 'x'\n[[routes]]\nto = 'm'\nmtch = 'x'", "route 1: there is no 'mtch'; did you mean match?"),
]


@table("wrong, said", MISTAKES)
def test_mistake_is_told_before_trust_is_requested(wrong: str, said: str) -> None:
    """The file is not trusted."""
    Path(PROJECT_FILE).write_text(wrong)
    for call in (lambda: Settings({}), trust_project):
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            call()
