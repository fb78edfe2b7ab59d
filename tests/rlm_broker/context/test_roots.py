"""Paths below a folder, and those that lead out of it."""

import os
from pathlib import Path

import pytest

from rlm_broker import ContextRefused
from rlm_broker.context.files import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    inside = tmp_path / "inside"
    (inside / "logs").mkdir(parents=True)
    (inside / "logs" / "a.log").write_text("a")
    (inside / ".env").write_text("KEY=x")
    (inside / ".ssh").mkdir()
    (inside / ".ssh" / "config").write_text("x")
    (inside / "alias").symlink_to("logs")
    (inside / "out").symlink_to(tmp_path)
    (inside / "secret.txt").symlink_to(".env")
    (inside / "loop").symlink_to("loop")
    (tmp_path / "b.log").write_text("b")
    (tmp_path / "link").symlink_to(inside)
    return Root(tmp_path / "link")


def test_paths_inside_lead_to_real_places(root: Root) -> None:
    logs = root.folder / "logs"
    for path in ("logs", "alias", "./logs/", "logs/../alias", str(logs), f"{root.folder}/../inside/logs"):
        assert root.resolved([path]) == [logs]
    assert root.resolved(["alias/*.log", "**/*.log"]) == [logs / "*.log", root.folder / "**" / "*.log"]
    assert root.resolved(["."]) == [root.folder]
    assert root.resolved(["missing"]) == [root.folder / "missing"]


OUTSIDE = ("..", "../b.log", "/etc", "out", "out/b.log", "out/*.log", "*/../../b.log", "~/x/../../../..", "/")


def test_path_that_leads_out_or_is_likely_a_secret_is_refused(root: Root) -> None:
    """A model names paths, so a path of its choice is no reason to read a likely secret."""
    outside = r"is not below .*/inside: only what is there can be asked about"
    secrets = dict.fromkeys((".env", "secret.txt", ".ssh/config", ".ssh"), "likely a secret")
    for path, said in {**dict.fromkeys(OUTSIDE, outside), **secrets}.items():
        with pytest.raises(ContextRefused, match=said):
            root.resolved([path])


def test_what_is_no_path_is_refused(root: Root) -> None:
    for paths in ([], [""], ["a\0b"], ["x" * 5_000]):
        with pytest.raises(ContextRefused) as refusal:
            root.resolved(paths)
        assert len(str(refusal.value)) < 200


def test_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ContextRefused, match="is not a folder"):
        Root(os.fspath(tmp_path / "missing"))
