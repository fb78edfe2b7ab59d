"""Settings of a cluster, and the sandbox that they make. No Ray is started."""

import sys
from types import SimpleNamespace

import pytest

from rlm_broker import ConfigurationError
from rlm_broker.cli.composition import sandbox_of
from rlm_broker.cli.settings.settings import Settings
from rlm_broker.cli.settings.trust import risks


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> "list[tuple[str, dict[str, object]]]":
    """Arguments with which a cluster is made."""
    made: list[tuple[str, dict[str, object]]] = []
    stand_in = SimpleNamespace(RayCluster=lambda address, **given: made.append((address, given)))
    monkeypatch.setitem(sys.modules, "rlm_broker.nodes.ray_cluster", stand_in)
    return made


def test_settings_make_the_cluster(made: "list[tuple[str, dict[str, object]]]") -> None:
    """The sandbox of a command is the cluster, with the level and packages of its nodes."""
    flags = {"cluster": "auto", "max_nodes": 20, "resources": "rlm=1, gpu=0.5", "isolation": "strict"}
    sandbox_of(Settings({**flags, "packages": "numpy six"}))
    [(address, given)] = made
    assert address == "auto"
    assert given["resources"] == {"rlm": 1.0, "gpu": 0.5}
    assert (given["max_nodes"], given["isolation"], given["packages"]) == (20, "strict", ["numpy", "six"])
    sandbox_of(Settings({}))
    assert len(made) == 1


def test_wrong_settings_are_refused() -> None:
    for flags, why in (
        ({"max_nodes": "0"}, "max_nodes = '0': give a number of nodes"),
        ({"max_nodes": "many"}, "give a number of nodes"),
        ({"resources": "rlm"}, "resources: rlm: give NAME=AMOUNT"),
        ({"resources": "rlm=-1"}, "give NAME=AMOUNT"),
        ({"cluster": 1}, "cluster = 1: give text"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            _ = Settings(flags).resources


def test_cluster_of_a_project_needs_trust() -> None:
    """A project's file could send documents to other machines by it."""
    assert list(risks({"cluster": "10.0.0.1:6379"}, {})) == ["cluster"]
