"""Findings of a type checker in programs that use an installed `rlm_broker`. The check of this project has mypy's."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import assert_never

import pytest
from hatchling.build import build_sdist, build_wheel

from rlm_broker import (
    RLM,
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    Event,
    EventsMissed,
    IterationStarted,
    Limits,
    Replied,
    ReplReady,
    RunEnded,
    RunStarted,
    Sandbox,
    ToolEnded,
    ToolStarted,
)
from tests.support.places import PROJECT

REJECTED = """\
from rlm_broker import RLM, Limits, Sandbox

RLM("offline", nonsense=3)
Limits(memory_bytez=1)
Sandbox().repl(answer=5)
Sandbox(isolation="stict")
text: str = RLM("offline").completion("a", output_type=int).parsed
text = RLM("offline").best_of(2, "a", output_type=int).chosen.parsed
"""
REJECTED_LINES = [3, 4, 5, 6, 7, 8]
OF_OTHERS = (
    "aiohttp", "anyio", "click", "docx", "IPython", "jupyter_client", "litellm", "matplotlib", "mcp", "mcp_types",
    "numpy", "openpyxl", "opentelemetry", "PIL", "pptx", "prometheus_client", "psutil", "pypdf", "rich", "starlette",
    "traitlets", "uvicorn",
)  # fmt: skip
"""Packages that no public type is made of. Reading them is three quarters of mypy's time."""

TYPED = """\
from rlm_broker import RLM, Completion, Run


class Order: ...


async def typed(rlm: RLM, any_run: Completion) -> None:
    order: Order = rlm.completion("a", output_type=Order).parsed
    same: Run[Order] = rlm.start("a", output_type=Order)
    number: int = (await rlm.acompletion("a", "?", output_type=int)).parsed
    line: str = rlm.completion("a").answer.splitlines()[0]
    async for event in rlm.stream("a", output_type=Order):
        if isinstance(event, Completion):
            order = event.parsed
    order = rlm.best_of(2, "a", output_type=Order).chosen.parsed
    number = (await rlm.abest_of(2, "a", "?", output_type=int, after_turn=1)).chosen.parsed
    print(order, (await same).parsed, number, line, any_run.parsed.anything)
"""


def told(event: Event) -> str:
    """Name each kind of event. mypy finds a kind that is missing here."""
    match event:
        case RunStarted() | RunEnded() | ReplReady() | IterationStarted() | Replied() | EventsMissed():
            return "run"
        case BlockStarted() | BlockPrinted() | BlockEnded() | ToolStarted() | ToolEnded():
            return "block"
        case CallStarted() | CallText() | CallRetried() | CallEnded():
            return "call"
        case _:
            assert_never(event)


def rejected_by_mypy() -> None:
    """Make the mistakes of `REJECTED`. The check of this file finds them: an unused `ignore` is an error to it."""
    RLM("offline", nonsense=3)  # type: ignore[arg-type]
    Limits(memory_bytez=1)  # type: ignore[call-arg]
    Sandbox().repl(answer=5)  # type: ignore[arg-type]
    Sandbox(isolation="stict")  # type: ignore[arg-type]
    text: str = RLM("offline").completion("a", output_type=int).parsed  # type: ignore[assignment]
    text = RLM("offline").best_of(2, "a", output_type=int).chosen.parsed  # type: ignore[assignment]
    print(text)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(PROJECT)
        return folder / build_wheel(str(folder))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs, beside an environment that has the wheel and what it needs, and not this checkout."""
    folder = tmp_path_factory.mktemp("programs")
    venv.create(folder / "env")
    (site,) = folder.glob("env/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    examples = PROJECT / "examples"
    of_peers = [path.name for path in examples.glob("*.py") if "rlm_broker.integrations" in path.read_text()]
    shutil.copytree(examples, folder / "examples", ignore=shutil.ignore_patterns(*of_peers))  # peers are not installed
    (folder / "rejected.py").write_text(REJECTED)
    (folder / "typed.py").write_text(TYPED)
    unread = ",".join(f"{name}.*" for name in OF_OTHERS)
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = true\n[mypy-{unread}]\nfollow_imports = skip\n")
    return folder


def test_wheel_and_sdist_say_that_they_are_typed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    for package in ("rlm_broker", "sandbox_worker"):
        assert f"{package}/py.typed" in zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in packed


@pytest.mark.installer
def test_pyright_accepts_examples_and_rejects_misuse(programs: Path) -> None:
    settings = {"include": ["examples/*.py", "rejected.py", "typed.py"], "venvPath": ".", "venv": "env"}
    (programs / "pyrightconfig.json").write_text(json.dumps({**settings, "typeCheckingMode": "standard"}))
    told = json.loads(_output([sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"], programs))
    found = [(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in told["generalDiagnostics"]]
    assert found == [("rejected.py", line) for line in REJECTED_LINES], told


def test_mypy_infers_types_of_answers_from_the_wheel(programs: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--python-executable", "env/bin/python", "--cache-dir", os.devnull]
    done = subprocess.run(
        [*command, "typed.py", "rejected.py"], cwd=programs, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\w+)\.py:(\d+): error", done.stdout, re.MULTILINE)
    assert found == [("rejected", str(line)) for line in REJECTED_LINES], done.stdout + done.stderr


def _output(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "MYPYPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
