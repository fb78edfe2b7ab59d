"""Installed versions of peers, as files beside a package say them."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from rlm_broker.integrations import peers
from rlm_broker.values.extras import ExtraMissing
from tests.support.places import PROJECT
from tests.support.tables import table


def install(folder: Path, version: str) -> None:
    facts = folder / f"somepeer-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: somepeer\nVersion: {version}\n")


@table(
    "version, said",
    [
        (None, "rlm_broker.integrations.some needs somepeer: pip install 'rlm-broker[some]'"),
        ("3.2.9", "somepeer 3.2.9 is too old: tested with somepeer >=3.3,<3.5; pip install 'rlm-broker[some]'"),
        ("3.3.0rc1", ""),
        ("3.4.12", ""),
        ("3.5", "warning: somepeer 3.5 is newer than what was tested: somepeer >=3.3,<3.5"),
        ("10.1+local.2", "warning: somepeer 10.1+local.2 is newer than what was tested: somepeer >=3.3,<3.5"),
    ],
)
def test_version_out_of_range_is_said(tmp_path: Path, version: str | None, said: str) -> None:
    folder = tmp_path / (version or "none")
    folder.mkdir()
    if version is not None:
        install(folder, version)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.syspath_prepend(folder)
        warnings.simplefilter("always")
        try:
            peers.require("somepeer", "some", tested=("3.3", "3.5"))
            sentence = "".join(f"warning: {each.message}" for each in caught)
        except ExtraMissing as error:
            sentence = str(error)
    assert sentence == said


def test_extras_have_the_form_that_any_pip_finds_in_a_wheel() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"]}
    assert {name for name in extras if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)} == set()
    for path in [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "rlm_broker").rglob("*.py")]:
        named = re.findall(r"rlm-broker\[([^]{}]+)\]", path.read_text())
        assert {extra for each in named for extra in each.split(",")} <= extras, path
    required = [path.read_text() for path in (PROJECT / "rlm_broker/integrations").glob("*.py")]
    assert {extra for text in required for extra in re.findall(r'require\("[^"]+", "([^"]+)"', text)} <= extras
