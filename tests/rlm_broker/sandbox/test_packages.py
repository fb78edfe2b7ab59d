"""Packages of an environment: code finds these and no others, and can read and never write them."""

import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import site
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker import RLM, ConfigurationError, Sandbox, ScriptedClient
from rlm_broker.sandbox import packages as installer_module
from rlm_broker.sandbox.packages import MAX_CHARS, MAX_REQUIREMENTS, Requirements, venv_with
from rlm_broker.sandbox.sandbox import close_all
from rlm_broker.sandbox.workers import context_cache
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.python_paths import python_paths, read_venv, shown
from sandbox_worker.wire.level import LevelName
from tests.support.forked_python import Python, python
from tests.support.places import PROJECT
from tests.support.processes import living_below
from tests.support.skips import require_cpp_library
from tests.support.tables import table
from tests.support.venvs import a_venv
from tests.support.waiting import WAIT_S, until, until_now
from tests.support.wheels import COMPILES, stand_in_for_uv, write_wheel

LEVELS: tuple[LevelName, ...] = ("strict", "standard")
LISTED = ["lenses"]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment of the user's, with a module."""
    folder = tmp_path_factory.mktemp("venv") / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (read_venv(folder).site_packages[0] / "lenses.py").write_text("COUNT = 40\n")
    return folder


@pytest.fixture
def own(venv: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to write into."""
    return shutil.copytree(venv, tmp_path / "own", symlinks=True)


OF_THE_ORCHESTRATOR = ["numpy", "pydantic", "aiohttp", "click", "pytest", "rlm_broker", "tests", "pip"]
"""Modules that this process can import, and that a worker does not need."""
FIRST_LOOKED_FOR = ["sitecustomize", "usercustomize", "typing_extensions", "jsonschema", "attr", "numpy", "readline"]
"""Modules that Python or a library looks for by itself."""
IMPORTS = f"""
found = []
for name in {OF_THE_ORCHESTRATOR}:
    try:
        __import__(name)
        found.append(name)
    except ModuleNotFoundError:
        pass
FINAL(found)
"""


@pytest.mark.installer
@pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
async def test_code_imports_the_packages_of_a_list(installer: str) -> None:
    every: tuple[LevelName, ...] = (*LEVELS, "process")
    for level in every:
        async with Sandbox(isolation=level, packages=["lenses", "glass<3"]) as sandbox, sandbox.repl() as repl:
            block = await repl.aexecute("import lenses, glass\nprint(lenses.COUNT, glass.KIND)")
            assert (block.stdout, block.stderr) == ("40 crown\n", ""), (level, installer)
            assert (await repl.aexecute(IMPORTS)).final_answer == "[]", level


@table("level", [*LEVELS, "process"])
@pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
async def test_code_imports_the_packages_of_a_venv(level: LevelName, venv: Path) -> None:
    """A ready REPL has them, too, and one after a kill, and what a query for JSON of a schema imports."""
    code = "import lenses, sqlite3, unicodedata, csv, jsonschema\njsonschema.validate(7, {'type': 'integer'})\nprint(lenses.COUNT)"
    async with Sandbox(isolation=level, python=venv, warm=2) as sandbox:
        for _ in range(3):
            async with sandbox.repl() as repl:
                block = await repl.aexecute(code)
                assert (block.stdout, block.stderr) == ("40\n", "")
                assert (await repl.aexecute(IMPORTS)).final_answer == "[]"
        async with sandbox.repl() as repl:
            await repl.aexecute("import os\nos._exit(1)")
            assert (await repl.aexecute(code)).stdout == "40\n"


async def test_without_an_environment_code_has_the_orchestrators(open_sandbox: Sandbox) -> None:
    async with open_sandbox.repl() as repl:
        assert "pydantic" in ((await repl.aexecute(IMPORTS)).final_answer or "")


async def test_template_imports_from_the_environment_alone(venv: Path) -> None:
    async with Sandbox(python=venv) as sandbox:
        setup = "import lenses\ntwice = 2 * lenses.COUNT"
        async with sandbox.template(imports=["lenses"], setup=setup) as template, template.repl() as repl:
            assert (await repl.aexecute("print(twice)")).stdout == "80\n"
        with pytest.raises(ConfigurationError, match="No module named 'pydantic'"):
            await sandbox.template(imports=["pydantic"]).__aenter__()


def test_worker_sees_only_needed_packages(venv: Path) -> None:
    told = shown(python_paths(), read_venv(venv))
    assert told.packages is not None
    folders = site.getsitepackages()
    assert set(folders) <= set(told.hidden)
    assert not set(folders) & set(told.readable)
    assert sys.prefix == sys.base_prefix or sys.prefix not in told.readable
    ours = {Path(path).name.removesuffix(".py") for path in told.readable if Path(path).parent in map(Path, folders)}
    assert ours - {"sandbox_worker"} == {"msgspec", *told.packages.own}


async def test_environment_modules_precede_the_workers(own: Path) -> None:
    (read_venv(own).site_packages[0] / "typing_extensions.py").write_text("IS_OWN = True\n")
    async with Sandbox(python=own) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute("import typing_extensions\nprint(typing_extensions.IS_OWN)")
        assert (block.stdout, block.stderr) == ("True\n", "")


async def test_environment_lines_do_not_run_in_the_fork_server(own: Path, tmp_path: Path) -> None:
    packages, ran = read_venv(own).site_packages[0], tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').close()"
    for name in (*FIRST_LOOKED_FOR, "msgspec", "sandbox_worker", "json", "encodings"):
        (packages / f"{name}.py").write_text(code)
    (packages / "code.pth").write_text(f"import os; {code}\n")
    with pytest.warns(match="not a security boundary"):
        sandbox = Sandbox(isolation="process", python=own)  # a level at which code could write anywhere
    async with sandbox, sandbox.repl() as repl:
        await repl.aexecute("import json, msgspec, encodings\nmsgspec.json.decode(json.dumps(1))")
    assert not ran.exists()


async def test_programs_that_code_starts_have_the_packages(venv: Path) -> None:
    code = """
import subprocess, sys
for python in (sys.executable, "python", "python3"):
    print(subprocess.run([python, "-c", "import lenses; print(lenses.COUNT)"], capture_output=True, text=True))
"""
    async with Sandbox(isolation="strict", allow_exec=True, python=venv) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(code)
    assert block.stdout.count("returncode=0, stdout='40\\n'") == 3, block.stdout


async def test_foreign_venv_gives_packages_and_no_programs(tmp_path: Path) -> None:
    own = a_venv(tmp_path / "own")  # it has no interpreter, so that none is shown
    (read_venv(own).site_packages[0] / "lenses.py").write_text("COUNT = 40\n")
    code = (
        "import lenses, subprocess, sys\nprint(subprocess.call([sys.executable, '-c', 'import lenses']), lenses.COUNT)"
    )
    async with Sandbox(isolation="strict", allow_exec=True, python=own) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(code)
    assert block.stdout == "1 40\n"
    assert "No module named 'lenses'" in block.stderr


async def test_shared_context_has_the_packages(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_cache, "SHARED_FROM_BYTES", 1)
    records = [{"id": number} for number in range(100)]
    async with Sandbox(isolation="strict", python=venv, warm=0) as sandbox:
        for _ in range(3):
            async with sandbox.repl(records) as repl:
                assert (await repl.aexecute("import lenses\nprint(lenses.COUNT, len(context))")).stdout == "40 100\n"
        assert isinstance(sandbox._fork_server, ForkServer)
        assert len(sandbox._fork_server._others) == 1


async def test_extension_in_c_is_loaded_with_its_libraries(own: Path) -> None:
    require_cpp_library()
    numpy = pytest.importorskip("numpy")
    installed, packages = Path(numpy.__file__).parent, read_venv(own).site_packages[0]
    for folder in (installed, *installed.parent.glob("numpy.libs")):
        try:
            shutil.copytree(folder, packages / folder.name, copy_function=os.link)
        except (OSError, shutil.Error):
            pytest.skip("numpy cannot be linked from another file system")
    for level in LEVELS:
        async with Sandbox(isolation=level, python=own) as sandbox, sandbox.repl() as repl:
            block = await repl.aexecute("import numpy\nprint(numpy.arange(4).sum(), numpy.__file__)")
            assert block.stdout == f"6 {packages}/numpy/__init__.py\n", block.stderr
            assert (await repl.aexecute("numpy.arange(3)", value=True)).value.tolist() == [0, 1, 2]


async def test_links_out_of_a_venv_are_named_once(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    (read_venv(own).site_packages[0] / "editable.pth").write_text(f"{PROJECT}\n")
    caplog.set_level(logging.WARNING, "rlm_broker")
    for _ in range(2):
        async with Sandbox(python=own) as sandbox, sandbox.repl() as repl:
            assert (await repl.aexecute(IMPORTS)).final_answer == "[]"
    assert caplog.messages == [f"packages that lead out of {own} are not shown to REPLs: editable.pth"]


async def test_venv_missing_at_opening_is_named(tmp_path: Path) -> None:
    sandbox = Sandbox(python=a_venv(tmp_path / "own"))
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(ConfigurationError, match=r"python: there is no .*own"):
        await sandbox.__aenter__()


def test_both_are_refused_together(venv: Path) -> None:
    for make in (Sandbox, Sandbox.shared):
        with pytest.raises(ConfigurationError, match="either python or packages"):
            make(python=venv, packages=LISTED)


@pytest.mark.installer
def test_uninstallable_list_is_told_when_the_sandbox_opens(cache: Path) -> None:
    sandbox = Sandbox(packages=["nowhere-to-be-found"])
    with pytest.raises(ConfigurationError, match="packages cannot be installed"):
        sandbox.__enter__()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.fixture
def _none_left() -> Iterator[None]:
    yield
    close_all()


@pytest.mark.usefixtures("_none_left", "quick_cache")
def test_shared_sandboxes_are_told_apart_by_their_packages(venv: Path) -> None:
    of_a_list = Sandbox.shared(packages=["glass", "lenses"])
    assert of_a_list is Sandbox.shared(packages=["Lenses", "glass"])
    assert of_a_list is not Sandbox.shared()
    of_a_venv = Sandbox.shared(python=venv)
    assert of_a_venv is Sandbox.shared(python=str(venv))
    assert len({of_a_list, of_a_venv, Sandbox.shared(), Sandbox.shared(packages=["glass"])}) == 4


@pytest.mark.installer
@table("how", ["python", "packages"])
@pytest.mark.usefixtures("cache")
def test_runs_have_the_packages_of_their_sandbox(how: str, venv: Path) -> None:
    given: dict[str, Any] = {"python": venv} if how == "python" else {"packages": LISTED}
    script = ScriptedClient(["```repl\nimport lenses\nFINAL(lenses.COUNT)\n```"])
    assert RLM(script, sandbox=Sandbox(**given)).completion("text", "?").response == "40"


@table(
    "given, texts",
    [
        ([], ()),
        (["six"], ("six",)),
        (["numpy>=2", "six==1.16.0"], ("numpy>=2", "six==1.16.0")),
        (["six==1.16.0", "NumPy >= 2", "numpy>=2"], ("numpy>=2", "six==1.16.0")),
        (["Typing_Extensions ~= 4.0, != 4.1"], ("typing-extensions!=4.1,~=4.0",)),
        (["httpx[socks, HTTP2]==0.28.*"], ("httpx[http2,socks]==0.28.*",)),
        (["a===1!2.0.post1+local.7"], ("a===1!2.0.post1+local.7",)),
        (("  b<2  ",), ("b<2",)),
    ],
)
def test_requirement_lists_are_normalised(given: Any, texts: tuple[str, ...]) -> None:
    assert Requirements.of(given).texts == texts


def test_equal_lists_have_equal_names() -> None:
    """Lists that say the same have one name, and others have another name."""
    one = Requirements.of(["numpy>=2", "six"])
    assert one.digest == Requirements.of(["Six", "numpy >=2"]).digest
    assert one.digest != Requirements.of(["numpy>=2"]).digest


@table(
    "text",
    [
        *("-r other.txt", "--index-url=https://elsewhere", "-e .", "./folder", "/folder/a.whl", "a.whl/../b", ""),
        *("six @ https://elsewhere/six.whl", "https://elsewhere/six.whl", "git+https://elsewhere/six", "file:six"),
        *("six; python_version > '3'", "six\n--index-url=x", "six==", "six=1", "six==1 2", "six>=1,", "six[", "six[]"),
        *("six # comment", "${KEY}", "sїx", "a" * (MAX_CHARS + 1), "six==1.0\\", "six -r x", "six --hash=sha256:0"),
    ],
)
def test_invalid_requirement_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a name with versions") as why:
        Requirements.of(["numpy", text])
    assert len(str(why.value)) < 300


@table(
    "given, why",
    [
        *((each, "packages must be a list such as") for each in ("numpy", {"numpy"}, {"numpy": "2"}, 7)),
        *((each, "each must be text such as 'numpy>=2'") for each in ([None], b"numpy")),
        ([f"p{number}" for number in range(MAX_REQUIREMENTS + 1)], f"more than {MAX_REQUIREMENTS}"),
    ],
)
def test_list_of_other_than_texts_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Requirements.of(given)
    if isinstance(given, list):
        assert len(Requirements.of([f"p{number}" for number in range(MAX_REQUIREMENTS)]).texts) == MAX_REQUIREMENTS


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


@table(
    "archive, line",
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
    """So does a list that is empty, once it was made."""
    first, empty = await venv_with(LENSES), await venv_with(Requirements.of([]))
    assert list(empty.site_packages[0].iterdir()) == []
    shutil.rmtree(wheels)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert await venv_with(Requirements.of(["Lenses"])) == first
    assert {*left(cache)} == {LENSES.digest, empty.folder.name}


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


def test_concurrent_processes_make_one_venv(tmp_path: Path, cache: Path) -> None:
    stand_in_for_uv(tmp_path / "programs", INSTALLS + COMPILES)
    environment = {**os.environ, "RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(PROJECT)}
    with Python(["-c", OPENS], env=environment) as first, Python(["-c", OPENS], env=environment) as second:
        assert [process.communicate()[0] for process in (first, second)] == ["opened\n"] * 2
    assert (tmp_path / "runs").read_text() == "compile\ninstall\n"
    assert left(cache) == [LENSES.digest]


async def test_waiting_too_long_for_another_process_is_told(quick_cache: Path) -> None:
    await venv_with(Requirements.of([]))  # makes the folders
    async with installer_module._alone(quick_cache / LENSES.digest):
        with pytest.raises(ConfigurationError, match=r"within 0\.2 s"):
            await venv_with(LENSES, timeout_s=0.2)
    assert (await venv_with(LENSES)).folder.name == LENSES.digest


async def test_endless_installer_is_ended_with_its_children(tmp_path: Path, cache: Path) -> None:
    """An installer that never ends is ended with all processes that it started."""
    before = living_below()
    stand_in_for_uv(tmp_path / "programs", NEVER_ENDS)
    opening = asyncio.create_task(Sandbox(packages=["lenses"]).__aenter__())
    await until(lambda: cache.exists() and began(cache))
    assert len(living_below() - before) == 3
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert living_below() == before
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
    venv = await venv_with(LENSES)
    quick_cache.chmod(0o777)
    with pytest.raises(ConfigurationError, match="this user alone can write to"):
        await venv_with(LENSES)
    quick_cache.chmod(0o700)
    venv.folder.rename(tmp_path / "elsewhere")
    venv.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="this user alone can write to"):
        await venv_with(LENSES)


async def test_cache_lies_where_no_other_user_can_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary users of Ubuntu and of Debian 13 have the umask 002."""
    (tmp_path / "file").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    for name, why in (("file", f"packages cannot be kept: .*{tmp_path}/file"), ("shared", "another user may replace")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        with pytest.raises(ConfigurationError, match=why):
            await venv_with(LENSES)
    (tmp_path / "shared").chmod(0o1777)
    before = os.umask(0o002)
    try:
        for name in ("shared", "new"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            assert (await venv_with(Requirements.of([]))).folder.is_relative_to(tmp_path / name)
    finally:
        os.umask(before)


@pytest.mark.installer
@pytest.mark.usefixtures("cache")
async def test_installer_runs_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
