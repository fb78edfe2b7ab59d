"""Virtual environments: the parts of them that are read, and those that are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import ConfigurationError, Sandbox
from rlm_broker.sandbox.workers.python_paths import MAX_PTH_BYTES, VERSION, read_venv
from tests.support.tables import table
from tests.support.venvs import a_venv


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venvs") / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write an environment by hand, with the parts that are read of one."""
    return a_venv(tmp_path / "written")


def packages_of(folder: Path) -> Path:
    return folder / "lib" / f"python{VERSION}" / "site-packages"


def test_made_by_python_is_read(made: Path) -> None:
    venv = read_venv(made)
    assert venv.folder == made
    assert venv.site_packages == venv.search == (packages_of(made),)  # its lib64 is a link to lib
    assert read_venv(str(made)) == venv


def test_link_to_a_venv_is_that_venv(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    assert read_venv(tmp_path / "link") == read_venv(made)


def test_lib64_that_is_no_link_is_searched_too(written: Path) -> None:
    other = written / "lib64" / f"python{VERSION}" / "site-packages"
    other.mkdir(parents=True)
    assert read_venv(written).search == (packages_of(written), other)


@table(
    "given, why",
    [
        *((each, "python must be the path of a virtual environment") for each in (7, b"/venv", ["/venv"], True)),
        ("a\0b", "cannot be read"),
        ("nowhere", "there is no"),
        ("file", "is a file"),
        ("folder", "not a virtual environment"),
    ],
)
def test_path_without_an_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, why: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"^python.*{why}|^{why}") as refused:
        Sandbox(python=given)
    assert len(str(refused.value)) < 400


@table(
    "lines, why",
    [
        ("version = 3.9.18", f"is for Python 3.9.18, .*uv venv --python {VERSION}"),
        ("version_info = 3.99.0.final.0", f"is for Python 3.99.0.final.0, .*uv venv --python {VERSION}"),
        (f"implementation = PyPy\nversion_info = {VERSION}.1", "is for PyPy, and REPLs run on cpython"),
        (f"version = {VERSION}.1\ninclude-system-site-packages = true", "include-system-site-packages"),
    ],
)
def test_other_python_or_packages_of_the_system_are_refused(tmp_path: Path, lines: str, why: str) -> None:
    written = a_venv(tmp_path / "written")
    (written / "pyvenv.cfg").write_text(f"home = /usr/bin\n{lines}\n")
    with pytest.raises(ConfigurationError, match=why):
        Sandbox(python=written)


def test_other_version_is_seen_by_its_folders(written: Path) -> None:
    """Another version of Python is seen by the folders of a venv without version information."""
    (written / "pyvenv.cfg").write_text("home = /usr/bin\n")
    packages_of(written).parent.rename(written / "lib" / "python3.9")
    with pytest.raises(ConfigurationError, match=r"is for python3\.9, and REPLs run on"):
        Sandbox(python=written)


def test_packages_that_a_link_has_elsewhere_are_refused(written: Path, tmp_path: Path) -> None:
    packages_of(written).rename(tmp_path / "elsewhere")
    packages_of(written).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="lie outside of it"):
        Sandbox(python=written)


def test_more_folders_than_a_packet_holds_are_refused(written: Path) -> None:
    names = [f"{number:03}{'x' * 100}" for number in range(200)]
    for name in names:
        (packages_of(written) / name).mkdir()
    (packages_of(written) / "many.pth").write_text("\n".join(names))
    with pytest.raises(ConfigurationError, match="add 200 folders, which are too many"):
        read_venv(written)


def test_pth_files_add_folders_within_and_nothing_else(written: Path, tmp_path: Path) -> None:
    packages = packages_of(written)
    (packages / "inner").mkdir()
    (packages / "out").symlink_to(tmp_path)
    ran = tmp_path / "ran"
    lines = {
        "a_inner": f"# comment\n\ninner\ninner\nnowhere\n{packages}\n",
        "b_code": f"import pathlib; pathlib.Path({str(ran)!r}).touch()\n",
        "c_out": f"{tmp_path}\n",
        "d_up": "../../..\n",
        "e_link": "out\n",
        "f_editable": "import __editable___mine_finder\n",
        "g_large": "x" * (MAX_PTH_BYTES + 1),
    }
    for name, text in lines.items():
        (packages / f"{name}.pth").write_text(text)
    venv = read_venv(written)
    assert venv.search == (packages, packages / "inner")
    assert venv.left_out == ("c_out.pth", "d_up.pth", "e_link.pth", "f_editable.pth", "g_large.pth")
    assert not ran.exists()
