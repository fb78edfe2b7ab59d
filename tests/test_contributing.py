"""CONTRIBUTING.md and the files for contributors name what there is."""

import ast
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
from tests.support.places import PROJECT

TEXT = (PROJECT / "CONTRIBUTING.md").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
TEMPLATES = PROJECT / ".github" / "ISSUE_TEMPLATE"


def defined_in(path: Path) -> set[str]:
    """Names at the top of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_each_file_that_contributors_are_sent_to_exists() -> None:
    named = re.findall(r"`((?:rlm_broker|sandbox_worker|tests|scripts|docs|\.ci)/[\w/.]*)(?::(\w+))?`", TEXT)
    assert len(named) > 40
    assert [path for path, _ in named if not (PROJECT / path).exists()] == []
    missing = [f"{path}:{name}" for path, name in named if name and name not in defined_in(PROJECT / path)]
    assert missing == []


def test_each_script_that_contributors_are_told_to_run_exists() -> None:
    scripts = set(re.findall(r"python -m ([\w.]+)", TEXT)) - {"build", "pytest"}
    assert len(scripts) > 6
    for script in scripts:
        path = PROJECT / script.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), script


def test_each_kind_of_change_is_told() -> None:
    told = re.findall(r"^### \.\.\. (.*)$", TEXT, re.MULTILINE)
    for what in ("limit", "client", "function that model code calls", "finalization function", "isolation layer"):
        assert any(what in each for each in told), what


def test_numbers_of_the_architecture_tests_are_those_that_are_told() -> None:
    source = (PROJECT / "tests/test_architecture.py").read_text()
    told = re.search(r"at most (\d+) lines, a function (\d+) lines and (\d+) parameters", TEXT)
    assert told is not None
    held = [re.search(rf"^{name} = (\d+)$", source, re.MULTILINE) for name in LONGEST]
    assert list(told.groups()) == [each[1] for each in held if each]


LONGEST = ("LONGEST_MODULE", "LONGEST_FUNCTION", "MOST_PARAMETERS")


def test_hooks_run_what_the_tests_run_with_tools_that_are_installed() -> None:
    hooks = re.findall(
        r"^ +entry: \.venv/bin/(\w+)(?: ([a-z]+)\b)?", (PROJECT / ".pre-commit-config.yaml").read_text(), re.M
    )
    script = re.findall(r'^"\$venv/bin/(\w+)"(?: ([a-z]+)\b)?', (PROJECT / "scripts/test").read_text(), re.MULTILINE)
    assert sorted(hooks) == sorted(script)
    dev = " ".join(PYPROJECT["project"]["optional-dependencies"]["dev"])
    for tool, _ in hooks:
        assert f"{tool}>=" in dev
        assert (Path(sys.executable).parent / tool).exists()


def test_hooks_are_of_the_form_that_pre_commit_takes() -> None:
    yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML")
    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        assert repository["repo"] == "local"  # another one would be downloaded
        for hook in repository["hooks"]:
            assert {"id", "name", "entry", "language"} <= hook.keys()
            assert hook["language"] == "system"


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
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


def test_editors_are_told_the_line_length_of_the_formatter() -> None:
    config = configparser.ConfigParser()
    config.read_string(f"[top]\n{(PROJECT / '.editorconfig').read_text()}")
    assert config["*"]["max_line_length"] == str(PYPROJECT["tool"]["ruff"]["line-length"])


def test_release_is_one_number() -> None:
    assert PYPROJECT["project"]["version"] == rlm_broker.__version__ == sandbox_worker.RELEASE


def test_classifiers_are_known_to_the_index() -> None:
    assert set(PYPROJECT["project"]["classifiers"]) <= classifiers


def test_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (PROJECT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release) for release in releases[1:])
    for release in text.split("\n## ")[1:]:
        sections = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert sections == [kind for kind in KINDS if kind in sections], "each section once, in this order"
        entries = [entry for section in release.split("\n### ")[1:] for entry in section.splitlines()[1:]]
        assert all(re.match(r"- \S|  \S|#### |$", line) for line in entries)
    for empty in re.findall(r"^###.*\n(?=\s*(?:##|\Z))(?!\s*####)", text, re.MULTILINE):
        raise AssertionError(f"a section without entries: {empty}")


KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
