"""The files for contributors agree with each other, and have the forms that tools take."""

import configparser
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from trove_classifiers import classifiers

import rlm_broker
import sandbox_worker
from scripts.lint import shapes
from tests.support.places import PROJECT
from tests.support.tables import table

TEXT = (PROJECT / "CONTRIBUTING.md").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
TEMPLATES = PROJECT / ".github" / "ISSUE_TEMPLATE"


def test_each_kind_of_change_is_told() -> None:
    told = re.findall(r"^### \.\.\. (.*)$", TEXT, re.MULTILINE)
    for what in ("limit", "client", "function that model code calls", "finalization function", "isolation layer"):
        assert any(what in each for each in told), what


def test_hooks_run_what_the_tests_run_with_tools_that_are_installed() -> None:
    hooks = re.findall(
        r"^ +entry: \.venv/bin/(\w+)(?: ([a-z]+)\b)?", (PROJECT / ".pre-commit-config.yaml").read_text(), re.M
    )
    script = re.findall(r'^"\$venv/bin/(\w+)"(?: ([a-z]+)\b)?', (PROJECT / "scripts/test").read_text(), re.MULTILINE)
    assert sorted(hooks) == sorted(script)
    dev = " ".join(PYPROJECT["project"]["optional-dependencies"]["dev"])
    for tool, _ in hooks:
        assert f"{tool}>=" in dev or tool == "python"
        assert (Path(sys.executable).parent / tool).exists()


def test_hooks_are_of_the_form_that_pre_commit_takes() -> None:
    yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML")
    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        assert repository["repo"] == "local"  # another one would be downloaded
        for hook in repository["hooks"]:
            assert {"id", "name", "entry", "language"} <= hook.keys()
            assert hook["language"] == "system"


@table("name", ["bug.yml", "feature.yml"])
def test_issue_form_has_what_github_wants(name: str) -> None:
    yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML")
    form = yaml.safe_load((TEMPLATES / name).read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 1
    for field in fields:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert field["type"] in {"textarea", "checkboxes", "input", "dropdown"}
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_security_problems_are_sent_elsewhere() -> None:
    assert "## Reporting" in (PROJECT / "SECURITY.md").read_text()
    assert "privately" in (TEMPLATES / "bug.yml").read_text()
    assert "blank_issues_enabled: false" in (TEMPLATES / "config.yml").read_text()


def test_bounds_of_the_lint_are_those_that_are_told() -> None:
    told = re.search(r"at most (\d+) lines, a function (\d+) lines and (\d+) parameters, a public class (\d+)", TEXT)
    assert told is not None
    bounds = (
        shapes.LONGEST_MODULE,
        shapes.LONGEST_FUNCTION,
        shapes.MOST_PARAMETERS,
        shapes.MOST_PARAMETERS_OF_CONSTRUCTORS,
    )
    assert tuple(map(int, told.groups())) == bounds


def test_editors_are_told_the_line_length_of_the_formatter() -> None:
    config = configparser.ConfigParser()
    config.read_string(f"[top]\n{(PROJECT / '.editorconfig').read_text()}")
    assert config["*"]["max_line_length"] == str(PYPROJECT["tool"]["ruff"]["line-length"])


def test_release_is_one_number() -> None:
    assert PYPROJECT["project"]["version"] == rlm_broker.__version__ == sandbox_worker.RELEASE


def test_classifiers_are_known_to_the_index() -> None:
    assert set(PYPROJECT["project"]["classifiers"]) <= classifiers
