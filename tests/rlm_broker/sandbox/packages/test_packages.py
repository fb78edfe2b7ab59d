"""Packages of an environment: code finds these and no others, and can read and never write them."""

import logging
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import RLM, ConfigurationError, Sandbox, ScriptedClient
from rlm_broker.sandbox.shared import close_all
from rlm_broker.sandbox.workers import context_cache
from rlm_broker.sandbox.workers.python_paths import python_paths, shown
from rlm_broker.sandbox.workers.venv import read_venv
from tests.support.needs import require_cpp_library
from tests.support.places import PROJECT
from tests.support.venvs import a_venv

LEVELS = ["strict", "standard"]
LISTED = ["lenses"]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment of the user's, with a module."""
    folder = tmp_path_factory.mktemp("venv") / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (read_venv(folder).site_packages[0] / "lenses.py").write_text("COUNT = 40\n")
    return folder


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
    for level in (*LEVELS, "process"):
        async with Sandbox(isolation=level, packages=["lenses", "glass<3"]) as sandbox, sandbox.repl() as repl:
            block = await repl.aexecute("import lenses, glass\nprint(lenses.COUNT, glass.KIND)")
            assert (block.stdout, block.stderr) == ("40 crown\n", ""), (level, installer)
            assert (await repl.aexecute(IMPORTS)).final_answer == "[]", level


@pytest.mark.parametrize("level", [*LEVELS, "process"])
@pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
async def test_code_imports_the_packages_of_a_venv(level: str, venv: Path) -> None:
    async with Sandbox(isolation=level, python=venv) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute("import lenses, sqlite3, unicodedata, csv\nprint(lenses.COUNT)")
        assert (block.stdout, block.stderr) == ("40\n", "")
        assert (await repl.aexecute(IMPORTS)).final_answer == "[]"


@pytest.mark.usefixtures("venv")
async def test_without_an_environment_code_has_the_orchestrators() -> None:
    async with Sandbox() as sandbox, sandbox.repl() as repl:
        assert "pydantic" in ((await repl.aexecute(IMPORTS)).final_answer or "")


def test_worker_sees_only_needed_packages(venv: Path) -> None:
    """A worker sees only those packages of the orchestrator that it needs."""
    told = shown(python_paths(), read_venv(venv))
    assert told.packages is not None
    folders = site.getsitepackages()
    assert set(folders) <= set(told.hidden)
    assert not set(folders) & set(told.readable)
    assert sys.prefix == sys.base_prefix or sys.prefix not in told.readable
    ours = {Path(path).name.removesuffix(".py") for path in told.readable if Path(path).parent in map(Path, folders)}
    assert ours - {"sandbox_worker"} == {"msgspec", *told.packages.own}


@pytest.mark.parametrize("level", LEVELS)
async def test_worker_has_the_needed_packages(level: str, venv: Path) -> None:
    """A query for JSON of a schema imports a validator in the REPL, also if the environment has none."""
    code = "import jsonschema\njsonschema.validate(7, {'type': 'integer'})\nprint('valid')"
    async with Sandbox(isolation=level, python=venv) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(code)
        assert (block.stdout, block.stderr) == ("valid\n", "")


async def test_environment_modules_precede_the_workers(venv: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(venv, own, symlinks=True)
    (read_venv(own).site_packages[0] / "typing_extensions.py").write_text("IS_OWN = True\n")
    async with Sandbox(python=own) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute("import typing_extensions\nprint(typing_extensions.IS_OWN)")
        assert (block.stdout, block.stderr) == ("True\n", "")


async def test_environment_lines_do_not_run_in_the_fork_server(venv: Path, tmp_path: Path) -> None:
    own = tmp_path / "copy"
    shutil.copytree(venv, own, symlinks=True)
    packages = read_venv(own).site_packages[0]
    ran = tmp_path / "ran"
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
    """A venv of another build of Python gives its packages and not its programs."""
    own = a_venv(tmp_path / "own")  # it has no interpreter, so that none is shown
    (read_venv(own).site_packages[0] / "lenses.py").write_text("COUNT = 40\n")
    code = (
        "import lenses, subprocess, sys\nprint(subprocess.call([sys.executable, '-c', 'import lenses']), lenses.COUNT)"
    )
    async with Sandbox(isolation="strict", allow_exec=True, python=own) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(code)
    assert block.stdout == "1 40\n"
    assert "No module named 'lenses'" in block.stderr


async def test_warm_and_restarted_repls_have_the_packages(venv: Path) -> None:
    """Ready REPLs, and a REPL after a kill, have the packages."""
    code = "import lenses\nprint(lenses.COUNT)"
    async with Sandbox(python=venv, warm=2) as sandbox:
        for _ in range(3):
            async with sandbox.repl() as repl:
                assert (await repl.aexecute(code)).stdout == "40\n"
        async with sandbox.repl() as repl:
            await repl.aexecute("import os\nos._exit(1)")
            assert (await repl.aexecute(code)).stdout == "40\n"


async def test_template_imports_from_the_environment_alone(venv: Path) -> None:
    async with Sandbox(python=venv) as sandbox:
        setup = "import lenses\ntwice = 2 * lenses.COUNT"
        async with sandbox.template(imports=["lenses"], setup=setup) as template, template.repl() as repl:
            assert (await repl.aexecute("print(twice)")).stdout == "80\n"
        with pytest.raises(ConfigurationError, match="No module named 'pydantic'"):
            await sandbox.template(imports=["pydantic"]).__aenter__()


async def test_shared_context_has_the_packages(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_cache, "SHARED_FROM_BYTES", 1)
    records = [{"id": number} for number in range(100)]
    async with Sandbox(isolation="strict", python=venv, warm=0) as sandbox:
        for _ in range(3):
            async with sandbox.repl(records) as repl:
                assert (await repl.aexecute("import lenses\nprint(lenses.COUNT, len(context))")).stdout == "40 100\n"
        assert sandbox._fork_server is not None
        assert len(sandbox._fork_server._others) == 1


def test_seed_holds_with_an_environment(venv: Path) -> None:
    said = []
    for _ in range(2):
        with Sandbox(python=venv, seed=7) as sandbox, sandbox.repl() as repl:
            said.append(repl.execute("import lenses, random\nprint(lenses.COUNT, random.random(), {'a', 'b'})").stdout)
    assert said[0] == said[1] != ""


async def test_extension_in_c_is_loaded_with_its_libraries(venv: Path, tmp_path: Path) -> None:
    require_cpp_library()
    numpy = pytest.importorskip("numpy")
    own = tmp_path / "own"
    shutil.copytree(venv, own, symlinks=True)
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


async def test_links_out_of_a_venv_are_named_once(venv: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "own"
    shutil.copytree(venv, own, symlinks=True)
    (read_venv(own).site_packages[0] / "editable.pth").write_text(f"{PROJECT}\n")
    caplog.set_level(logging.WARNING, "rlm_broker")
    for _ in range(2):
        async with Sandbox(python=own) as sandbox, sandbox.repl() as repl:
            assert (await repl.aexecute(IMPORTS)).final_answer == "[]"
    assert [record.getMessage() for record in caplog.records] == [
        f"packages that lead out of {own} are not shown to REPLs: editable.pth"
    ]


async def test_venv_missing_at_opening_is_named(tmp_path: Path) -> None:
    sandbox = Sandbox(python=a_venv(tmp_path / "own"))
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(ConfigurationError, match=r"python: there is no .*own"):
        await sandbox.__aenter__()


def test_both_are_refused_together(venv: Path) -> None:
    for make in (Sandbox, Sandbox.shared, lambda **given: RLM("offline", **given)):
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
@pytest.mark.parametrize("how", ["python", "packages"])
@pytest.mark.usefixtures("cache")
def test_rlm_takes_both(how: str, venv: Path) -> None:
    given: dict[str, Any] = {"python": venv} if how == "python" else {"packages": LISTED}
    script = ScriptedClient(["```repl\nimport lenses\nFINAL(lenses.COUNT)\n```"])
    assert RLM(script, **given).completion("text", "?").response == "40"
