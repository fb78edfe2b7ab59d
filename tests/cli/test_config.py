import json

from tests.cli.command import run, sentence


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
