"""A sandbox as the machine of a sample of inspect_ai: its commands, its files, and inspect's own errors."""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import ConfigurationError
from tests.support.scratch import TEMPORARY
from tests.support.tables import table


@pytest.fixture
def adapter() -> Any:
    from rlm_broker.integrations import inspect

    return inspect


@pytest.fixture
async def machine(adapter: Any) -> AsyncIterator[Any]:
    async with _sample(adapter) as made:
        yield made


@contextlib.asynccontextmanager
async def _sample(adapter: Any, config: Any = None) -> AsyncIterator[Any]:
    kind = adapter.SampleSandbox
    made = await kind.sample_init("task", config, {})
    try:
        yield made["default"]
    finally:
        await kind.sample_cleanup("task", config, made, False)


def test_inspect_finds_the_sandbox_by_its_entry_point(adapter: Any) -> None:
    entries = importlib.metadata.entry_points(group="inspect_ai")
    found = {entry.name: entry.value for entry in entries if entry.dist is not None and entry.dist.name == "rlm-broker"}
    assert found["rlm_broker_sandbox"] == adapter.__name__
    assert adapter.NAME == "rlm_broker"


async def test_command_ends_as_inspect_has_it(machine: Any) -> None:
    done = await machine.exec(["sh", "-c", "cat; echo $A; echo no >&2; exit 3"], input="in\n", env={"A": "é"})
    assert (done.success, done.returncode, done.stdout, done.stderr) == (False, 3, "in\né\n", "no\n")
    none = await machine.exec(["no-such-program"])
    assert (none.success, none.returncode) == (False, 127)
    assert "no-such-program" in none.stderr
    killed = await machine.exec(["sh", "-c", "kill -TERM $$"], timeout=30)
    assert killed.returncode == 143
    with pytest.raises(TimeoutError, match="timeout_s = 1 s"):
        await machine.exec(["sleep", "1000"], timeout=1)
    await machine.write_file("script.sh", "echo 1")
    with pytest.raises(PermissionError, match=r"script\.sh"):
        await machine.exec(["./script.sh"])
    from inspect_ai.util import OutputLimitExceededError

    with pytest.raises(OutputLimitExceededError) as cut:
        await machine.exec(["sh", "-c", "echo begun; yes | head -c 11000000"])
    assert cut.value.truncated_output.startswith("begun\ny\n")


async def test_arguments_beyond_the_walls_are_refused_by_name(machine: Any) -> None:
    from inspect_ai.util import SandboxUserUnsupportedError

    with pytest.raises(SandboxUserUnsupportedError, match="user = 'root' is refused"):
        await machine.exec(["id"], user="root")
    with pytest.raises(FileNotFoundError, match="none"):
        await machine.exec(["ls"], cwd="none")
    with pytest.raises(ValueError, match="argv and env have"):
        await machine.exec(["echo", *["x" * 100_000] * 30])


async def test_files_fail_as_those_of_python_do(machine: Any) -> None:
    await machine.write_file(f"{TEMPORARY}/a/b", "é\r\n")
    assert await machine.read_file("a/b") == "é\r\n"
    await machine.write_file("b", b"\xff")
    assert await machine.read_file("/w/b", text=False) == b"\xff"
    with pytest.raises(UnicodeDecodeError):
        await machine.read_file("b")
    for error, path in ((FileNotFoundError, "none"), (IsADirectoryError, "a"), (PermissionError, "/proc/1/environ")):
        with pytest.raises(error, match=path):
            await machine.read_file(path)
    with pytest.raises(IsADirectoryError, match="a"):
        await machine.write_file("a", "")
    with pytest.raises(PermissionError, match="/usr/b"):
        await machine.write_file("/usr/b", "")
    with pytest.raises(OSError, match="No space left"):
        await machine.write_file("large", bytes(257 << 20))


async def test_file_beyond_inspects_bound_is_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai import util

    monkeypatch.setattr(util.SandboxEnvironmentLimits, "MAX_READ_FILE_SIZE", 10)
    await machine.write_file("a", b"12345678901")
    with pytest.raises(util.OutputLimitExceededError):
        await machine.read_file("a")


async def test_commands_of_a_sample_meet_and_those_of_another_do_not(adapter: Any) -> None:
    async with _sample(adapter, adapter.SampleSettings(limits={"max_programs": 2})) as one, _sample(adapter) as other:
        meets = "echo > {}; while [ ! -e {} ]; do sleep 0.01; done; echo met"
        calls = [meets.format("a", "b"), meets.format("b", "a"), "echo waited"]
        done = await asyncio.gather(*(one.exec(["sh", "-c", each]) for each in calls))
        assert [each.stdout for each in done] == ["met\n", "met\n", "waited\n"]
        assert (await other.exec(["ls"])).stdout == ""


async def test_sample_that_has_ended_is_unavailable(adapter: Any) -> None:
    from inspect_ai.util import SandboxUnavailableError

    async with _sample(adapter) as machine:
        await machine.exec(["true"])
    with pytest.raises(SandboxUnavailableError, match="was closed"):
        await machine.exec(["true"])


def test_settings_are_read_of_a_file(adapter: Any, tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text('packages = ["six"]\n[limits]\nmemory_bytes = "64MB"\n[env]\nA = "1"\n')
    found = adapter.SampleSettings.of(str(file))
    assert (found.all_limits.memory_bytes, found.packages, found.env) == (64 << 20, ["six"], {"A": "1"})
    assert found.all_limits.max_programs == adapter.LIMITS.max_programs
    assert adapter.SampleSettings.of(None).all_limits == adapter.LIMITS


@table(
    "content, name, why",
    [
        (None, "compose.yaml", "compose.yaml is refused by rlm-broker: a sandbox has no images"),
        (None, "none.toml", "none.toml cannot be read"),
        ("image = 'debian'", "a.toml", "image: Extra inputs are not permitted"),
        ("= 1", "a.toml", "cannot be read"),
        ("limits = 1", "a.toml", "limits: Input should be a valid dictionary"),
        ("[limits]\nmemory = 1", "a.toml", "there is no limit 'memory'"),
    ],
)
async def test_settings_beyond_the_walls_are_refused_before_a_sample(
    adapter: Any, tmp_path: Path, content: str | None, name: str, why: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError) as refused:
        await adapter.SampleSandbox.task_init("task", str(tmp_path / name))
    assert why in str(refused.value)


async def test_compose_file_of_inspects_own_is_refused_by_its_options(adapter: Any) -> None:
    from pydantic import BaseModel

    class ComposeConfig(BaseModel):
        services: dict[str, Any]

    with pytest.raises(ConfigurationError, match="services is refused by rlm-broker"):
        await adapter.SampleSandbox.task_init("task", ComposeConfig(services={"default": {"image": "debian"}}))
