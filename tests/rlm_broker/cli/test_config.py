import json
import subprocess
from pathlib import Path

from tests.support.command import COMMAND, ENVIRONMENT, run, sentence


def test_every_setting_is_shown_with_its_source() -> None:
    done = run("config", "show", "--limit", "max_depth=3", "--json")
    shown = json.loads(done.stdout)
    assert shown["max_depth"] == {"value": 3, "source": "command line"}
    assert shown["model"] == {"value": "offline", "source": "default"}
    assert "max_depth" in run("config", "show").stdout


def test_a_typo_suggests_the_right_name() -> None:
    done = run("config", "show", "--limit", "max_dpth=3")
    assert done.returncode == 2
    assert sentence(done) == "rlm-broker config: --limit max_dpth: there is no such limit; did you mean max_depth?"


def test_trusting_a_project_says_what_was_trusted(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text("cache = 'mine.sqlite'\nisolation = 'process'\n")
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [*COMMAND, "config", "trust"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"trusted {tmp_path}/rlm-broker.toml, which sets cache, isolation = process\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_project_that_is_not_trusted_is_shown_and_marked(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text("cache = 'mine.sqlite'\n[limits]\nmax_depth = 2\n")
    env = {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}

    def shown(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, "config", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    before = shown("show", "--json")
    settings = json.loads(before.stdout)
    assert before.stderr.startswith("warning: rlm-broker.toml sets cache: look at it, and if you trust it run")
    unused = "rlm-broker.toml (not trusted, not used)"
    assert settings["cache"] == {"value": "mine.sqlite", "source": unused}
    assert settings["max_depth"] == {"value": 2, "source": unused}
    assert settings["model"]["source"] == "default"
    shown("trust")
    after = shown("show", "--json")
    assert (json.loads(after.stdout)["cache"]["source"], after.stderr) == ("rlm-broker.toml", "")


def test_a_setting_that_ask_refuses_is_not_shown() -> None:
    command, env = [*COMMAND, "config", "show"], {**ENVIRONMENT, "RLM_BROKER_ISOLATION": "nope"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence(done).startswith("rlm-broker config: RLM_BROKER_ISOLATION: no isolation level 'nope'; choose one")
