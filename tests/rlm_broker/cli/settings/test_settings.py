"""Settings of the command line: their sources, their order, and wrong values."""

import os
from pathlib import Path

import pytest

from rlm_broker.cli.settings import user_files
from rlm_broker.cli.settings.settings import BUILT_IN, Setting, Settings, assigned
from rlm_broker.errors import ConfigurationError
from tests.support.tables import table


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


def test_flags_win_over_environment_and_files(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_none_is_no_bound_in_each_notation() -> None:
    for text, value in {"max_tokens = 'none'": None, "max_tokens = 5": 5, "max_tokens = '7'": 7}.items():
        projects(f"[limits]\n{text}")
        assert Settings({}).limits.max_tokens == value


def test_turns_may_differ_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLM_BROKER_MAX_ITERATIONS", "20, 5")
    assert Settings({}).limits.max_iterations == (20, 5)
    monkeypatch.delenv("RLM_BROKER_MAX_ITERATIONS")
    projects("[limits]\nmax_iterations = [9, 3]")
    assert Settings({}).limits.max_iterations == (9, 3)


WRONG_FILES = [
    ("modle = 'x'", "rlm-broker.toml: there is no setting 'modle'; did you mean model?"),
    ("[limits]\nmax_itertions = 3", "limits.max_itertions is not a limit; did you mean max_iterations?"),
    ("[limits]\nmax_depth = -1", "limit max_depth = -1 (rlm-broker.toml): give a whole number of at least 0"),
    ("max_depth = 1", "rlm-broker.toml: max_depth is a limit: write it below [limits]"),
    ("limits = 3", "limits must be a table"),
    ("= broken", "rlm-broker.toml is not valid TOML: "),
    ("a = " + "[" * 100_000, "nested too deeply"),
    ("max_depth = " + "9" * 5_000, "rlm-broker.toml is not valid TOML: Exceeds the limit"),
    ("model = 0x" + "f" * 5_000, "rlm-broker.toml is not valid TOML: Exceeds the limit"),
    (f"[limits]\nmax_iterations = '{'9' * 5_000}'", "limit max_iterations = 999"),
    ("[models.m]\nbase_ulr = 'x'", "models.m: there is no 'base_ulr'; did you mean base_url?"),
    ("[models.m]\nbase_url = 5", "models.m: base_url: give text, or None"),
    ("[models.m.headers]\nx = 'sk-plain'", "models.m.headers.x: write 'env:NAME' with the variable that holds it"),
    ("[models.m]\noptions = {api_key = 'sk-plain'}", "options.api_key would be shown: give keys as api_key"),
    ("[models.m]\napi_key = 'sk-plain'", "models.m.api_key: write 'env:NAME' with the variable that holds it"),
    ("models = 3", "models must be tables: write [models.NAME]"),
    ("routes = 3", "routes must be a list of tables: write [[routes]]"),
    ("[[routes]]\nmatch = 'x'", "route 1: `to` is missing"),
    ("[[routes]]\nto = 'x'\ndepths = 1", "route 1: depths must be text, not 1"),
    ("[[routes]]\nto = 'x'\ndepths = '2-1'", "route 1: route (no model named) at depth 2-1 to x: there is no depth"),
    ('[limits]\n"\\u001b[2J" = 1', r"limits.\x1b[2J is not a limit"),
    ('[models."\\u001b[2J"]\napi_key = "x"', r"models.\x1b[2J.api_key"),
    ('[models."\\u001b[2J"]\nname = "x"\nbase_url = "http://localhost"', r"sets models.\x1b[2J.base_url"),
]


@table("text, sentence", WRONG_FILES)
def test_invalid_file_is_named_with_its_error(text: str, sentence: str) -> None:
    projects(text)
    with pytest.raises(ConfigurationError) as refused:
        Settings({})
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 1_000
    assert "sk-plain" not in str(refused.value)


def test_variable_that_is_no_setting_is_named_but_for_that_of_the_control_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RLM_BROKER_CONTROL", "RLM_BROKER_KEY"):
        monkeypatch.setenv(name, "1")
    assert "control" not in Settings({}).all()
    monkeypatch.setenv("RLM_BROKER_MAX_DEPHT", "2")
    with pytest.raises(ConfigurationError, match=r"RLM_BROKER_MAX_DEPHT: .* did you mean max_depth\?"):
        Settings({})


def test_run_settings_have_defaults_in_each_place(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a run have defaults and may be given in each place."""
    names = ("model_policy", "recursion", "prompt_profile", "allow_exec", "tools", "output_type")
    assert [Settings({})[name] for name in names] == ["allow", "always", "both", None, None, None]
    users(places, "model_policy = 'pinned'\nrecursion = 'auto'\nallow_exec = false\ntools = '~/tools.py'")
    monkeypatch.setenv("RLM_BROKER_PROMPT_PROFILE", "final")
    monkeypatch.setenv("HOME", str(places))
    settings = Settings(assigned([], output_type="schema.json"))
    assert [settings[name] for name in names[:4]] == ["pinned", "auto", "final", False]
    assert settings.path("tools") == places / "tools.py"
    assert settings.path("output_type") == Path("schema.json")
    assert settings.path("cache") is None
    assert settings.all()["prompt_profile"] == Setting("final", "RLM_BROKER_PROMPT_PROFILE")


def test_yes_or_no_may_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in {"true": True, "False": False}.items():
        monkeypatch.setenv("RLM_BROKER_ALLOW_EXEC", text)
        assert Settings({})["allow_exec"] is value
        assert Settings(assigned([], allow_exec=not value))["allow_exec"] is not value


WRONG_VARIABLES = [
    ("MODEL_POLICY", "free", "no model_policy 'free'; choose one of: allow, pinned, open"),
    ("RECURSION", "never", "no recursion 'never'; choose one of: always, auto"),
    ("PROMPT_PROFILE", "x", "no prompt_profile 'x'; choose one of: both, final, answer, compact"),
    ("ALLOW_EXEC", "maybe", "allow_exec = 'maybe': give true or false"),
    ("TOOLS", "tools.py", "tools = 'tools.py' names another file in each folder, and is run: give an absolute path"),
    ("ISOLATION", "vault", "no isolation 'vault'; choose one of: auto, strict, standard, process"),
]


@table("name, value, said", WRONG_VARIABLES)
def test_invalid_setting_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(f"RLM_BROKER_{name}", value)
    with pytest.raises(ConfigurationError) as refused:
        Settings({})
    monkeypatch.delenv(f"RLM_BROKER_{name}")
    assert str(refused.value) == f"RLM_BROKER_{name}: {said}"


def test_user_tools_are_not_those_of_a_folder(places: Path) -> None:
    users(places, "tools = 'tools.py'")
    with pytest.raises(
        ConfigurationError, match=r"config\.toml: tools = 'tools\.py' names another file in each folder"
    ):
        Settings({})
    users(places, "")
    assert Settings(assigned([], tools="tools.py")).path("tools") == Path("tools.py")


def test_limits_with_units_are_taken_from_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    projects("[limits]\nmemory_bytes = '64MB'")
    monkeypatch.setenv("RLM_BROKER_CPU_S", "250ms")
    limits = Settings(assigned(["run_timeout_s=1h30m"])).limits
    assert (limits.memory_bytes, limits.cpu_s, limits.run_timeout_s) == (64 << 20, 0.25, 5400)
    monkeypatch.setenv("RLM_BROKER_CPU_S", "soon")
    with pytest.raises(
        ConfigurationError,
        match=r"limit cpu_s = soon \(RLM_BROKER_CPU_S\): give a finite number of seconds above 0, or a time",
    ):
        Settings({})


def test_a_file_that_cannot_be_read_is_an_error() -> None:
    path = Path("rlm-broker.toml")
    for made, said in (
        (path.mkdir, r"cannot read rlm-broker\.toml: Is a directory"),
        (lambda: os.mkfifo(path), r"rlm-broker\.toml is not a regular file"),
        (lambda: path.symlink_to("/dev/zero"), r"rlm-broker\.toml is not a regular file"),
        (lambda: path.write_bytes(b"#" * (user_files.MAX_FILE_BYTES + 1)), r"rlm-broker\.toml has more than"),
    ):
        made()
        with pytest.raises(ConfigurationError, match=said):
            Settings({})
        path.rmdir() if path.is_dir() else path.unlink()
