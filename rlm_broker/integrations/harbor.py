"""Harbor: an environment for tasks without an image, by `--env rlm_broker.integrations.harbor:HarborEnvironment`.

Harbor gives tasks folders at the root of their machine: /logs, /tests, /solution. A sandbox's root is read-only. So the
environment has them below `/w`, and puts that before their names in Harbor's commands and paths; a task's own scripts
write `$HARBOR_ROOT/logs`.
"""

import asyncio
import contextlib
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlm_broker.errors import RlmBrokerError
from rlm_broker.integrations.peers import NO_IMAGE, NO_NETWORK, ONE_USER, OWN_USERS, refusal, require
from rlm_broker.integrations.shell_base import HOME, LIMITS, Shell, exit_code_of, stderr_of

require("harbor", "harbor", tested=("0.25", "0.27"))

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import NetworkMode, NetworkPolicy

_FOLDERS: Final = re.compile(r"(?<![\w./$}-])(?=/(?:logs|tests|solution|runtime)(?![\w.-]))")
"""The place before a folder of Harbor's, in a command or as a path."""
_IMAGES: Final = ("Dockerfile", "docker-compose.yaml")


class HarborEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A sandbox as the machine of one trial.

    It refuses, when a trial is set up, what a task asks beyond the walls: an image, a network, other users, GPUs,
    mounts. Such tasks say `network_mode = "no-network"`, and have no Dockerfile.

    Example:
        ```sh
        harbor run --path tasks/sort-numbers --agent oracle --env rlm_broker.integrations.harbor:HarborEnvironment
        ```
    """

    @staticmethod
    def type() -> str:
        """Return the name of the kind of environment."""
        return "rlm_broker"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Abilities of a sandbox: it has no network, and cannot have one."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits that hold: that of memory."""
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        found = [name for name in _IMAGES if (self.environment_dir / name).exists()]
        if self.task_env_config.docker_image or found:
            asked = "docker_image" if self.task_env_config.docker_image else f"environment/{found[0]}"
            raise ValueError(refusal(asked, NO_IMAGE))

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Raise ValueError for a task that wants a network."""
        mode = (network_policy or self.network_policy).network_mode
        if mode != NetworkMode.NO_NETWORK:
            raise ValueError(refusal(f"network_mode = {mode.value!r}", NO_NETWORK))

    async def start(self, force_build: bool) -> None:
        """Open the sandbox, with Harbor's folders and the files of the task's environment."""
        memory_mb, storage_mb = self._effective_memory_mb, self._effective_storage_mb
        sizes = {"memory_bytes": memory_mb, "scratch_bytes": storage_mb}
        self._shell = Shell(limits=LIMITS.replace(**{name: size << 20 for name, size in sizes.items() if size}))
        await self.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests /solution")
        if self.environment_dir.is_dir():
            await self.upload_dir(self.environment_dir, self._workdir)

    async def stop(self, delete: bool) -> None:
        """End the sandbox. Its files are gone then, also without `delete`."""
        await self._shell.aclose()

    @property
    def _workdir(self) -> str:
        return _inside(self.task_env_config.workdir or HOME)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command line.

        Raises:
            RuntimeError: It took longer than `timeout_sec`, or cannot be run.
            ValueError: It is to run as another user than the sandbox's.
        """
        if (wanted := self._resolve_user(user)) not in OWN_USERS:
            raise ValueError(refusal(f"user = {wanted!r}", ONE_USER))
        variables = {"HARBOR_ROOT": HOME, **(self._merge_env(env) or {})}
        argv = ["bash", "-c", _inside(command)]
        with _errors():
            run = self._shell.arun(argv, cwd=_inside(cwd or self._workdir), env=variables, timeout_s=timeout_sec)
            result = await run
        if result.status == "timeout":
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=result.stdout, stderr=stderr_of(result), return_code=exit_code_of(result))

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file of the host into the sandbox, with its mode."""
        await self._shell.awrite(_inside(target_path), Path(source_path))
        if Path(source_path).stat().st_mode & 0o100:
            await self._shell.arun(["chmod", "+x", "--", _inside(target_path)])

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder of the host into one of the sandbox."""
        packed = await asyncio.to_thread(_packed, Path(source_dir))
        with _errors():
            await self._shell.aunpack(packed, _inside(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox to the host."""
        await self._shell.asave(_inside(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder of the sandbox into one of the host. Links and devices stay behind."""
        with _errors():
            packed = await self._shell.apack(_inside(source_dir))
            await asyncio.to_thread(_unpack, packed, Path(target_dir))


def _inside(text: str) -> str:
    """Return a path or command with `HOME` before Harbor's folders."""
    return _FOLDERS.sub(HOME, text)


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=".")
    return packed.getvalue()


def _unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        tar.extractall(folder, filter=_harmless)


def _harmless(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Leave all links out: the filter of `tarfile` itself is misled by long chains of them before Python 3.11.13."""
    return tarfile.data_filter(member, folder) if member.isfile() or member.isdir() else None


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise an error of rlm-broker or of an archive as Harbor expects it."""
    try:
        yield
    except (RlmBrokerError, tarfile.TarError, OSError) as error:
        raise RuntimeError(str(error)) from error
