"""An environment that code imports from: to be read, by this code alone, and never changed."""

import json
from pathlib import Path

import pytest

from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from tests.attacks.arena import LIMITS, PROTECTED
from tests.support.places import PROJECT
from tests.support.tables import table
from tests.support.venvs import a_venv

WRITES = """
import json, lenses, os
folder = os.path.dirname(lenses.__file__)
tries = {
    "append": lambda: open(lenses.__file__, "a"),
    "replace": lambda: os.replace("mine.py", lenses.__file__),
    "remove": lambda: os.remove(lenses.__file__),
    "new module": lambda: open(folder + "/new.py", "w"),
    "cache of bytecode": lambda: open(folder + "/__pycache__/lenses.cpython-399.pyc", "w"),
    "pth": lambda: open(folder + "/new.pth", "w"),
    "new folder": lambda: os.mkdir(folder + "/new"),
    "beside": lambda: open(os.path.dirname(folder) + "/new", "w"),
    "above": lambda: open(folder + "/../../../new", "w"),
    "link": lambda: os.symlink("mine.py", folder + "/new.py"),
    "hard link": lambda: os.link("mine.py", folder + "/new.py"),
    "cut": lambda: os.truncate(lenses.__file__, 0),
    "rename": lambda: os.rename(folder, folder + "-old"),
    "through proc": lambda: open("/proc/self/root" + lenses.__file__, "a"),
    "mode": lambda: os.chmod(lenses.__file__, 0o777),
}
open("mine.py", "w").close()
written = []
for name, attempt in tries.items():
    try:
        attempt()
        written.append(name)
    except OSError:
        pass
FINAL(json.dumps(written))
"""
READS = """
import json, os, sys
seen = []
for path in FILES:
    for name in (path, "/proc/self/root" + path, "/w/../" + path):
        try:
            seen.append(open(name).read())
        except OSError:
            pass
sys.path[:0] = FOLDERS
for name in ("other", "numpy", "pydantic", "conftest"):
    try:
        seen.append(__import__(name).__name__)
    except ImportError:
        pass
for folder in FOLDERS:
    try:
        os.symlink(folder, "link")
        seen += [name for name in os.listdir("link") if name not in OWN]
    except OSError:
        pass
    finally:
        os.unlink("link")
FINAL(json.dumps(seen))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One of two that lie side by side, as in the cache."""
    for name in ("lenses", "other"):
        (packages,) = a_venv(tmp_path / "environments" / name).glob("lib/*/site-packages")
        (packages / f"{name}.py").write_text("SECRET = 40")
        (packages / "__pycache__").mkdir()
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "environments" / "lenses"


@table("level", PROTECTED)
async def test_environment_is_read_only(level: LevelName, environment: Path) -> None:
    def everything() -> list[tuple[str, int, int, int]]:
        found = sorted([environment.parent, *environment.parent.rglob("*")])
        seen = [(path, path.lstat()) for path in found]
        return [(str(path), status.st_mtime_ns, status.st_mode, status.st_size) for path, status in seen]

    before = everything()
    async with Sandbox(LIMITS, level, python=environment) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(WRITES)
        assert block.final_answer is not None, block.stderr
    assert set(json.loads(block.final_answer)) <= {"mode"}  # which at "standard" does nothing, and says that it did
    assert everything() == before


@table("level", PROTECTED)
async def test_environment_neighbours_are_invisible(level: LevelName, environment: Path) -> None:
    """Code sees no other environment, and no folder around its own."""
    other, around = environment.with_name("other"), environment.parent.parent
    (packages,) = other.glob("lib/*/site-packages")
    files = [packages / "other.py", other / "pyvenv.cfg", around / "secret", PROJECT / "pyproject.toml"]
    folders = [packages, other, around, environment.parent, PROJECT, PROJECT / "tests"]
    own = ["environments", "lenses", "sandbox_worker", ".venv"]  # folders that lead to what is shown
    given = f"FILES, FOLDERS, OWN = {[str(file) for file in files]}, {[str(each) for each in folders]}, {own}\n"
    async with Sandbox(LIMITS, level, python=environment) as sandbox, sandbox.repl() as repl:
        block = await repl.aexecute(given + READS)
        assert block.final_answer is not None, block.stderr
        assert json.loads(block.final_answer) == []
        assert (await repl.aexecute("import lenses\nprint(lenses.SECRET)")).stdout == "40\n"  # it has its own
