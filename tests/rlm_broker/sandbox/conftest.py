"""Fixtures for packages: their source, and the folder that keeps them, without network or the user's folders."""

from pathlib import Path

import pytest

from tests.support.wheels import COMPILES, FOREIGN, installers_environment, stand_in_for_uv, write_wheel


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Two packages, of which one needs the other."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "lenses", "1.0", "COUNT = 40\n", ["glass>=2"])
    write_wheel(folder, "glass", "2.0", "KIND = 'crown'\n")
    write_wheel(folder, "glass", "1.0", "KIND = 'flint'\n")
    return folder


@pytest.fixture(params=["uv", "pip"])
def installer(request: pytest.FixtureRequest, tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    _set(monkeypatch, installers_environment(tmp_path, wheels, request.param))
    name: str = request.param
    return name


@pytest.fixture
def cache(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of environments, into which pip installs."""
    variables = installers_environment(tmp_path, wheels, "pip")
    _set(monkeypatch, variables)
    return Path(variables["XDG_CACHE_HOME"]) / "rlm-broker" / "environments"


@pytest.fixture
def quick_cache(cache: Path, tmp_path: Path) -> Path:
    """The folder of environments, whose packages come from a stand-in for uv. It installs none."""
    stand_in_for_uv(tmp_path / "programs", COMPILES)
    return cache


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in FOREIGN:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
