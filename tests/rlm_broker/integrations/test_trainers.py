"""Sandboxes for trainers: a trial of Harbor, a provider of NeMo Gym, a runtime of verifiers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tables import table

CONFIG = {"docker_image": None, "memory_mb": 512, "workdir": None}


def environment(folder: Path, mode: str = "no-network", **config: Any) -> Any:
    from harbor.models.task.config import NetworkMode, NetworkPolicy

    from rlm_broker.integrations.harbor import HarborEnvironment

    made: Any = HarborEnvironment
    return made(folder, SimpleNamespace(**{**CONFIG, **config}), NetworkPolicy(NetworkMode(mode)))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, text in {
        "environment/numbers.txt": "3\n1\n2\n",
        "solution/solve.sh": "sort -n numbers.txt > sorted.txt",
        "tests/test.sh": "head -1 sorted.txt > $HARBOR_ROOT/logs/verifier/reward.txt; cd $HARBOR_ROOT/logs/verifier; ln -s /etc/fonts out; ln -s reward.txt in; ln reward.txt same",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n" if name.endswith(".sh") else text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


async def test_trial_of_harbor_has_its_folders(task: Path, tmp_path: Path) -> None:
    trial = environment(task / "environment")
    await trial.start(force_build=False)
    await trial.upload_dir(task / "solution", "/solution")
    await trial.upload_file(task / "tests" / "test.sh", "/tests/test.sh")
    solved = await trial.exec("(/solution/solve.sh) > /logs/agent/out.txt 2>&1 && echo $A", env={"A": "a"}, user="root")
    assert (solved.stdout, solved.stderr, solved.return_code) == ("a\n", "", 0)
    assert (await trial.exec("/tests/test.sh")).return_code == 0
    await trial.download_dir("/logs", tmp_path / "logs")
    assert (tmp_path / "logs" / "verifier" / "reward.txt").read_text() == "1\n"
    files = sorted((tmp_path / "logs" / "verifier").iterdir())
    assert [(path.name, path.is_symlink()) for path in files] == [("reward.txt", False), ("same", False)]
    await trial.download_file("/w/sorted.txt", tmp_path / "sorted.txt")
    assert (tmp_path / "sorted.txt").read_text() == "1\n2\n3\n"
    with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
        await trial.exec("sleep 1000", timeout_sec=1)
    with pytest.raises(ValueError, match="user = 'agent' is refused by rlm-broker: a sandbox has one user"):
        await trial.exec("true", user="agent")
    await trial.stop(delete=True)
    with pytest.raises(RuntimeError, match="was closed"):
        await trial.exec("true")


@table(
    "mode, config, option",
    [
        ("public", {}, "network_mode = 'public'"),
        ("no-network", {"docker_image": "python:3"}, "docker_image"),
        ("no-network", {"file": "Dockerfile"}, "environment/Dockerfile"),
    ],
)
def test_task_beyond_the_walls_is_refused_when_it_is_set_up(
    mode: str, config: Any, option: str, tmp_path: Path
) -> None:
    if "file" in config:
        (tmp_path / config.pop("file")).touch()
    with pytest.raises(ValueError, match=f"{option} is refused by rlm-broker"):
        environment(tmp_path, mode, **config)


async def test_provider_of_nemo_gym_makes_and_ends_sandboxes(tmp_path: Path) -> None:
    from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxSpec, wanted

    from rlm_broker.integrations.nemo_gym import GymProvider

    provider = GymProvider({"max_processes": 40})
    spec = SandboxSpec(env={"A": "a"}, workdir="/w/work", resources=wanted(memory_mib=512, disk_gib=1))
    handle = await provider.create(spec)
    done = await provider.exec(handle, "pwd; echo $A >&2; exit 3")
    assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("/w/work\n", "a\n", 3, None)
    late = await provider.exec(handle, "sleep 1000", timeout_s=0.1)
    assert (late.return_code, late.error_type) == (125, "timeout")
    (tmp_path / "up").write_bytes(b"\xff")
    await provider.upload_file(handle, tmp_path / "up", "/w/work/file")
    await provider.download_file(handle, "/w/work/file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == b"\xff"
    with pytest.raises(SandboxCreateError, match="workdir = '/usr/x' is refused by rlm-broker: mkdir: "):
        await provider.create(SandboxSpec(workdir="/usr/x"))
    for refused in (await provider.exec(handle, "true", user="x"), await provider.exec(handle, "true", cwd="/none")):
        assert (refused.return_code, refused.error_type) == (125, "sandbox")
    assert await provider.status(handle) == "running"
    await provider.close(handle)
    assert await provider.status(handle) == "stopped"
    with pytest.raises(RuntimeError, match="it was closed"):
        await provider.exec(handle, "true")
    await provider.create(SandboxSpec())
    await provider.aclose()


@table("asked", [{"image": "python:3"}, {"entrypoint": ["sh"]}, {"ttl_s": 60}, {"provider_options": {"network": True}}])
async def test_specification_beyond_the_walls_is_refused_by_its_option(asked: dict[str, Any]) -> None:
    from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxSpec

    from rlm_broker.integrations.nemo_gym import GymProvider

    option = "network" if "provider_options" in asked else next(iter(asked))
    with pytest.raises(SandboxCreateError, match=f"{option} = .* is refused by rlm-broker"):
        await GymProvider().create(SandboxSpec(**asked))
    with pytest.raises(ValueError, match="image"):
        GymProvider({"image": "python:3"})


async def test_runtime_of_verifiers_runs_programs_and_keeps_files() -> None:
    from verifiers.v1.errors import SandboxError

    from rlm_broker.integrations.verifiers import SandboxRuntime, SandboxRuntimeConfig

    runtime = SandboxRuntime(SandboxRuntimeConfig(limits={"max_processes": 40}))
    await runtime.start()
    runtime.env = {"A": "a"}
    done = await runtime.run(["sh", "-c", "echo $A $B; echo err >&2; exit 2"], {"B": "b"})
    assert (done.exit_code, done.stdout, done.stderr) == (2, "a b\n", "err\n")
    await runtime.write("sub/file", b"12345")
    assert await runtime.read("sub/file") == await runtime.read("/w/sub/file", max_bytes=5) == b"12345"
    for call in (runtime.read("sub/file", max_bytes=4), runtime.read("none"), runtime.run(["none"], {})):
        with pytest.raises(SandboxError):
            await call
    await runtime.stop()
    with pytest.raises(SandboxError, match="was closed"):
        await runtime.run(["true"], {})
