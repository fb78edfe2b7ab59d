"""Harbor: an environment for tasks without an image, by `--env rlm_broker.integrations.harbor:HarborEnvironment`.

Harbor gives tasks folders at the root of their machine: /logs, /tests, /solution. A sandbox's root is read-only. So the
environment has them below `/w`, and puts that before their names in Harbor's commands and paths; a task's own scripts
write `$HARBOR_ROOT/logs`.
"""

import asyncio
import io
import re
import tarfile
from pathlib import Path
from typing import Final

from rlm_broker.errors import RlmBrokerError
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.shell_base import HOME, LIMITS, Shell, exit_code_of

require("harbor", "harbor", tested=("0.25", "0.27"))

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter  # noqa: E402
from harbor.environments.capabilities import (  # noqa: E402
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import NetworkMode, NetworkPolicy  # noqa: E402

_FOLDERS: Final = re.compile(r"(?<![\w./$}-])(?=/(?:logs|tests|solution|runtime)(?![\w.-]))")
"""The place before a folder of Harbor's, in a command or as a path."""
_IMAGES: Final = ("Dockerfile", "docker-compose.yaml")
_OWN_USERS: Final = (None, "root", 0)
"""Users as which Harbor prepares its folders. Any other one is a task's, and refused."""


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
            raise ValueError(
                f"{asked} is refused by rlm-broker: a sandbox has no image, but the programs of this machine"
            )

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Raise ValueError for a task that wants a network."""
        mode = (network_policy or self.network_policy).network_mode
        if mode != NetworkMode.NO_NETWORK:
            raise ValueError(f"network_mode = {mode.value!r} is refused by rlm-broker: a sandbox has no network")

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - of the base
        """Open the sandbox, with Harbor's folders and the files of the task's environment."""
        memory_mb, storage_mb = self._effective_memory_mb, self._effective_storage_mb
        sizes = {"memory_bytes": memory_mb, "scratch_bytes": storage_mb}
        self._shell = Shell(limits=LIMITS.replace(**{name: size << 20 for name, size in sizes.items() if size}))
        await self.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests /solution")
        if self.environment_dir.is_dir():
            await self.upload_dir(self.environment_dir, self._workdir)

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 - of the base
        """End the sandbox. Its files are gone then, whatever `delete` says."""
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
        if self._resolve_user(user) not in _OWN_USERS:
            raise ValueError(f"user = {self._resolve_user(user)!r} is refused by rlm-broker: a sandbox has one user")
        variables = {"HARBOR_ROOT": HOME, **(self._merge_env(env) or {})}
        argv = ["bash", "-c", _inside(command)]
        try:
            run = self._shell.arun(argv, cwd=_inside(cwd or self._workdir), env=variables, timeout_s=timeout_sec)
            result = await run
        except RlmBrokerError as error:
            raise RuntimeError(str(error)) from error
        if result.status == "timeout":
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=exit_code_of(result))

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file of the host into the sandbox, with its mode."""
        await self._shell.awrite(_inside(target_path), Path(source_path))
        if Path(source_path).stat().st_mode & 0o100:
            await self._shell.arun(["chmod", "+x", "--", _inside(target_path)])

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder of the host into one of the sandbox."""
        packed = await asyncio.to_thread(_packed, Path(source_dir))
        made = await self._shell.arun(["mkdir", "-p", "--", _inside(target_dir)])
        argv = ["tar", "--extract", "--no-same-owner", f"--directory={_inside(target_dir)}", "--file=-"]
        unpacked = await self._shell.arun(argv, input=packed)
        if made.exit_code or unpacked.exit_code:
            raise RuntimeError(f"{target_dir} cannot be written: {made.stderr}{unpacked.stderr}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox to the host."""
        await self._shell.asave(_inside(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder of the sandbox into one of the host. Links that lead out of it, and devices, stay behind."""
        argv = ["tar", "--create", f"--directory={_inside(source_dir)}", "--file=-", "."]
        packed = await self._shell.arun(argv, max_output_bytes=4 * self._shell.limits.scratch_bytes)
        if packed.exit_code:
            raise RuntimeError(f"{source_dir} cannot be read: {packed.stderr}")
        await asyncio.to_thread(_unpack, packed.stdout_bytes, Path(target_dir))


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
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter=_harmless)


def _harmless(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    try:
        kept: tarfile.TarInfo | None = transfer_tar_filter(member, folder)
    except tarfile.FilterError:  # it leads out of the folder
        return None
    return kept
