"""Environments that are made of lists: complete or absent, made once, by either installer."""

import asyncio
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from rlm_broker import ConfigurationError, Sandbox
from rlm_broker.sandbox.packages import cache as package_cache
from rlm_broker.sandbox.packages import installer as installer_module
from rlm_broker.sandbox.packages.cache import venv_with
from rlm_broker.sandbox.packages.requirements import Requirements
from tests.support.forked_python import Python, python
from tests.support.places import PROJECT
from tests.support.processes import living_below
from tests.support.waiting import WAIT_S, until, until_now
from tests.support.wheels import COMPILES, stand_in_for_uv, write_wheel

LENSES = Requirements.of(["lenses"])
NEVER_ENDS = """
import signal, subprocess, time
if "compile" in sys.argv:
    subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(3600)"])
    open("began", "x")
    time.sleep(3600)
"""
"""An installer that has started another program, and hangs."""
INSTALLS = """
with open(os.environ["RUNS"], "a") as runs:
    runs.write(sys.argv[2] + "\\n")
"""
"""Beginning of an installer that records how often it runs."""
OPENS = "from rlm_broker import Sandbox\nwith Sandbox(packages=['lenses'], warm=0): print('opened', flush=True)\n"


def began(cache: Path) -> list[Path]:
    return list(cache.glob("*/began"))


def left(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


async def test_cache_is_private_also_where_groups_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary users of Ubuntu and of Debian 13 have the umask 002."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0o002)
    try:
        assert (await venv_with(Requirements.of([]))).folder.is_relative_to(tmp_path / "new")
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("archive", "line"),
    [
        ({"hash": "sha256=ab", "hashes": {"sha256": "ab"}}, "lenses==1.0 --hash=sha256:ab"),
        ({"hash": "sha256=ab"}, "lenses==1.0 --hash=sha256:ab"),  # pip 23.0, which Debian 12 has
        ({}, "lenses==1.0"),
        (None, "lenses==1.0"),
    ],
)
def test_lock_has_the_hash_that_each_pip_reports(archive: dict[str, str] | None, line: str) -> None:
    about = {"download_info": {"url": "file:///x.whl"} | ({} if archive is None else {"archive_info": archive})}
    report = {"install": [{"metadata": {"name": "lenses", "version": "1.0"}} | about]}
    assert installer_module._locked(report) == [f"{line}\n"]


@pytest.mark.installer
async def test_environment_has_what_was_listed_and_what_that_needs(installer: str, tmp_path: Path) -> None:
    venv = await venv_with(LENSES)
    (packages,) = venv.site_packages
    assert {path.name for path in packages.glob("*.py")} == {"lenses.py", "glass.py"}
    assert list(packages.glob("__pycache__/lenses.*.pyc"))  # compiled here, since code in a sandbox cannot write them
    lock = (venv.folder / installer_module.LOCK).read_text()
    assert [line.split()[0] for line in lock.splitlines() if "==" in line] == ["glass==2.0", "lenses==1.0"]
    assert lock.count("sha256:") == 2
    assert left(venv.folder.parent) == [LENSES.digest], installer
    for folder in (venv.folder, venv.folder.parent, venv.folder.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.is_relative_to(tmp_path)


@pytest.mark.installer
async def test_package_code_does_not_run_during_installation(installer: str, tmp_path: Path, wheels: Path) -> None:
    ran = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    hooks = {name: f"{ran}\n" for name in ("sitecustomize.py", "usercustomize.py")}
    write_wheel(wheels, "spy", "1.0", ran, more={"spy.pth": f"import os; {ran}\n", **hooks})
    venv = await venv_with(Requirements.of(["spy"]))
    assert (venv.site_packages[0] / "spy.pth").exists(), installer
    assert not (tmp_path / "ran").exists()


async def test_packages_of_different_sources_stay_apart(quick_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of one source are not given for those of another."""
    first = await venv_with(LENSES)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://somewhere.else/simple")
    assert Requirements.of(["lenses"]).digest != first.folder.name
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    assert left(quick_cache) == [LENSES.digest]


@pytest.mark.installer
async def test_cached_list_needs_no_network_or_process(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is used again without a network or a process."""
    first = await venv_with(LENSES)
    shutil.rmtree(wheels)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert await venv_with(Requirements.of(["Lenses"])) == first
    assert left(cache) == [LENSES.digest]


@pytest.mark.installer
async def test_empty_list_is_an_environment_without_packages(cache: Path) -> None:
    venv = await venv_with(Requirements.of([]))
    assert left(cache) == [venv.folder.name]
    assert list(venv.site_packages[0].iterdir()) == []


@pytest.mark.installer
async def test_installer_error_is_told_and_cleaned_up(installer: str, tmp_path: Path, wheels: Path) -> None:
    """The installer's error is told, and no file is left."""
    cache = tmp_path / "cache" / "rlm-broker" / "environments"
    for text in ("nowhere-to-be-found", "lenses==9"):
        with pytest.raises(ConfigurationError, match=text.partition("=")[0]) as why:
            await venv_with(Requirements.of([text]))
        assert "\n" not in str(why.value)
        assert left(cache) == [], installer
    (wheels / "lenses-1.0-py3-none-any.whl").rename(wheels / "lenses-1.0.tar.gz")
    with pytest.raises(ConfigurationError, match="from wheels alone"):
        await venv_with(LENSES)


async def test_failure_tells_no_password_and_no_key(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('cannot reach https://me:pass-word@index/simple?x', os.environ.get('MY_API_KEY'), os.environ['UV_INDEX']); sys.exit(2)"
    stand_in_for_uv(tmp_path / "programs", code)
    monkeypatch.setenv("MY_API_KEY", "not-for-installers")
    monkeypatch.setenv("UV_INDEX", "https://index/t0ken-in-path/simple")
    with pytest.raises(ConfigurationError) as why:
        await venv_with(LENSES)
    assert "cannot reach https://[redacted]@index/simple?x None [redacted]" in str(why.value)
    assert left(cache) == []


async def test_missing_installer_names_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="neither uv is on PATH nor pip"):
        await venv_with(LENSES)
    assert left(cache) == []


async def test_concurrent_requests_make_one_venv(quick_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    install = installer_module.install

    async def counted(requirements: Requirements, folder: Path) -> Path:
        made.append(folder)
        return await install(requirements, folder)

    monkeypatch.setattr(package_cache, "install", counted)
    first, second = await asyncio.gather(venv_with(LENSES), venv_with(LENSES))
    assert first == second
    assert len(made) == 1
    assert left(quick_cache) == [LENSES.digest]


def test_concurrent_processes_make_one_venv(tmp_path: Path, cache: Path) -> None:
    stand_in_for_uv(tmp_path / "programs", INSTALLS + COMPILES)
    environment = {**os.environ, "RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(PROJECT)}
    with Python(["-c", OPENS], env=environment) as first, Python(["-c", OPENS], env=environment) as second:
        assert [process.communicate()[0] for process in (first, second)] == ["opened\n"] * 2
    assert (tmp_path / "runs").read_text() == "compile\ninstall\n"
    assert left(cache) == [LENSES.digest]


async def test_waiting_too_long_for_another_process_is_told(quick_cache: Path) -> None:
    await venv_with(Requirements.of([]))  # makes the folders
    async with package_cache._alone(quick_cache / LENSES.digest):
        with pytest.raises(ConfigurationError, match=r"within 0\.2 s"):
            await venv_with(LENSES, timeout_s=0.2)
    assert (await venv_with(LENSES)).folder.name == LENSES.digest


async def test_endless_installer_is_ended_with_its_children(tmp_path: Path, cache: Path) -> None:
    """An installer that never ends is ended with all processes that it started."""
    stand_in_for_uv(tmp_path / "programs", NEVER_ENDS)
    opening = asyncio.create_task(Sandbox(packages=["lenses"]).__aenter__())
    await until(lambda: cache.exists() and began(cache))
    assert len(living_below()) == 3
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert living_below() == set()
    assert left(cache) == []


async def test_deadline_ends_the_installer(tmp_path: Path, cache: Path) -> None:
    stand_in_for_uv(tmp_path / "programs", NEVER_ENDS)
    with pytest.raises(ConfigurationError, match="no environment could be made within 1 s"):
        await venv_with(LENSES, timeout_s=1)
    assert living_below() == set()
    assert left(cache) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_installation_is_not_taken_for_complete(how: signal.Signals, tmp_path: Path, cache: Path) -> None:
    """A process that is ended while it installs leaves no folder that is taken for complete."""
    stand_in_for_uv(tmp_path / "programs", NEVER_ENDS)
    with Python(["-c", OPENS]) as process:
        until_now(lambda: cache.exists() and began(cache))
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 3
        process.send_signal(how)
        said = process.communicate()[1]
    assert psutil.wait_procs(below, timeout=WAIT_S)[1] == []  # killed as well, not only orphaned
    assert not (cache / LENSES.digest).exists()
    if how == signal.SIGINT:
        assert said.splitlines()[-1] == "KeyboardInterrupt"
        assert left(cache) == []
    stand_in_for_uv(tmp_path / "programs", COMPILES)
    assert asyncio.run(venv_with(LENSES)).folder.name == LENSES.digest
    assert left(cache) == [LENSES.digest]  # the folder of the killed process has been removed


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
async def test_folder_of_another_user_is_refused(quick_cache: Path) -> None:
    venv = await venv_with(LENSES)
    for folder in (venv.folder, quick_cache, quick_cache.parent):
        os.chown(folder, 1234, -1)
        with pytest.raises(ConfigurationError, match="this user alone can write to"):
            await venv_with(LENSES)
        os.chown(folder, 0, -1)
    assert await venv_with(LENSES) == venv


async def test_writable_or_linked_folder_is_refused(quick_cache: Path, tmp_path: Path) -> None:
    """A folder that others can write to and a link are refused."""
    venv = await venv_with(LENSES)
    quick_cache.chmod(0o777)
    with pytest.raises(ConfigurationError, match="this user alone can write to"):
        await venv_with(LENSES)
    quick_cache.chmod(0o700)
    venv.folder.rename(tmp_path / "elsewhere")
    venv.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="this user alone can write to"):
        await venv_with(LENSES)


async def test_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=f"packages cannot be kept: .*{tmp_path}/file"):
        await venv_with(LENSES)


@pytest.mark.installer
@pytest.mark.usefixtures("cache")
async def test_installer_runs_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installer runs in a folder of its own and not in a project."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pip.py").write_text("raise SystemExit('the code of a project')")
    (project / "uv.toml").write_text("this is no TOML")
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv("PIP_TARGET", str(project / "target"))
    assert (await venv_with(LENSES)).folder.name == LENSES.digest
    assert not (project / "target").exists()


@pytest.mark.parametrize(
    "code", ["sys.exit(3)", "os.kill(os.getpid(), 9)", INSTALLS + COMPILES + "sys.exit('install' in sys.argv)"]
)
def test_installer_failure_is_seen_despite_ignored_children(code: str, tmp_path: Path, cache: Path) -> None:
    """A failure is seen also where a supervisor ignores ended children."""
    stand_in_for_uv(tmp_path / "programs", code)
    environment = {**os.environ, "RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(PROJECT)}
    program = f"import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{OPENS}"
    done = python("-c", program, env=environment)
    assert "ConfigurationError: packages cannot be installed" in done.stderr
    assert left(cache) == []


@pytest.mark.installer
@pytest.mark.usefixtures("cache")
async def test_loop_goes_on_while_packages_are_installed() -> None:
    turns = 0
    making = asyncio.create_task(venv_with(LENSES))
    while not making.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 50, "the loop stood still"


async def test_cache_in_a_changeable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in a folder that others can change is refused."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    with pytest.raises(ConfigurationError, match="another user may replace files in"):
        await venv_with(LENSES)
    shared.chmod(0o1777)
    assert (await venv_with(Requirements.of([]))).folder.is_relative_to(shared)
