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
