import json
import subprocess
from pathlib import Path

from rlm_broker.limits import Limits
from tests.support.command import ENVIRONMENT, run, sentence
from tests.support.forked_python import python


def test_every_setting_is_shown_with_its_source() -> None:
    done = run("config", "show", "--limit", "max_depth=3", "--json")
    shown = json.loads(done.stdout)
    assert (shown["max_depth"]["value"], shown["max_depth"]["source"]) == (3, "command line")
    assert shown["model"] == {"value": "offline", "source": "default", "about": "The root model"}
    for name, described in Limits.descriptions().items():
        assert shown[name]["about"]
        assert " ".join(described.split()).startswith(shown[name]["about"])
    line = next(line for line in run("config", "show").stdout.splitlines() if line.startswith("max_open_files"))
    assert line.split(maxsplit=3) == ["max_open_files", "256", "default", shown["max_open_files"]["about"]]


def test_trusting_a_project_says_what_was_trusted(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text("cache = 'mine.sqlite'\nisolation = 'process'\n")
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = python("-m", "rlm_broker", "config", "trust", cwd=tmp_path, env=env)
    assert done.stdout == f"trusted {tmp_path}/rlm-broker.toml, which sets cache, isolation = process\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_project_that_is_not_trusted_is_shown_and_marked(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text("cache = 'mine.sqlite'\n[limits]\nmax_depth = 2\n")
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}

    def shown(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return python("-m", "rlm_broker", "config", *arguments, cwd=tmp_path, env=env)

    before = shown("show", "--json")
    settings = json.loads(before.stdout)
    assert before.stderr.startswith("warning: rlm-broker.toml sets cache: look at it, and if you trust it run")
    unused = "rlm-broker.toml (not trusted, not used)"
    assert (settings["cache"]["value"], settings["cache"]["source"]) == ("mine.sqlite", unused)
    assert (settings["max_depth"]["value"], settings["max_depth"]["source"]) == (2, unused)
    assert settings["model"]["source"] == "default"
    shown("trust")
    after = shown("show", "--json")
    assert (json.loads(after.stdout)["cache"]["source"], after.stderr) == ("rlm-broker.toml", "")


def test_a_setting_that_ask_refuses_is_not_shown() -> None:
    done = python("-m", "rlm_broker", "config", "show", env={**ENVIRONMENT, "RLM_BROKER_ISOLATION": "nope"})
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence(done).startswith("rlm-broker config show: RLM_BROKER_ISOLATION: no isolation 'nope'; choose one")


def test_secrets_of_the_environment_are_not_shown() -> None:
    """Neither form of `config show` prints a key, or the password of an address."""
    address = "http://user:pass1234@gpu:8000/v1"
    env = {**ENVIRONMENT, "RLM_BROKER_BASE_URL": address, "RLM_BROKER_API_KEY": "sk-of-the-test"}
    for form in ([], ["--json"]):
        done = python("-m", "rlm_broker", "config", "show", *form, env=env)
        assert "gpu:8000" in done.stdout
        assert "(set)" in done.stdout
        assert not any(secret in done.stdout + done.stderr for secret in ("pass1234", "sk-of-the-test"))
