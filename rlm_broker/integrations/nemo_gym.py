"""NeMo Gym: sandboxes by the name `rlm_broker` in its configuration, by an entry point of the group
`nemo_gym.sandbox_providers`."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.integrations.peers import NO_IMAGE, ONE_USER, OWN_USERS, refusal, require
from rlm_broker.integrations.shell_base import HOME, LIMITS, Shell, exit_code_of, problem_of, stderr_of

require("nemo-gym", "nemo-gym", tested=("0.4", "0.8"))

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

_NOT_RUN: Final = 125
"""Exit code of a command without one of its own, as NeMo Gym's providers have it."""
_WHY: Final = {
    "image": NO_IMAGE,
    "entrypoint": "a sandbox runs the commands that it is given, and nothing else",
    "ttl_s": "a sandbox ends when it is closed; give each command a timeout_s",
    "gpu": "a sandbox has no devices",
}


class GymProvider:
    """Makes sandboxes. A specification's memory and disk are limits of theirs; its number of CPUs is a wish.

    Example:
        ```yaml
        sandbox:
          provider:
            rlm_broker: { limits: { max_processes: 128 } }
        ```

    Args:
        limits: Limits of each sandbox, by their names.
    """

    name = "rlm_broker"

    def __init__(self, limits: Mapping[str, Any] | None = None) -> None:
        try:
            self._limits = LIMITS.replace(**(limits or {}))
        except ConfigurationError as refused:
            raise ValueError(str(refused)) from refused
        self._shells: dict[str, Shell] = {}

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Open a sandbox.

        Raises:
            SandboxCreateError: The specification asks for what a sandbox has not, or this machine has no `strict`.
        """
        asked = {"image": spec.image, "entrypoint": spec.entrypoint, "ttl_s": spec.ttl_s, "gpu": spec.resources.gpu}
        for option, wanted in {**asked, **spec.provider_options}.items():
            if wanted:
                why = _WHY.get(option, "it has no option of that name")
                raise SandboxCreateError(refusal(f"{option} = {wanted!r}", why))
        sizes = {"memory_bytes": (spec.resources.memory_mib, 20), "scratch_bytes": (spec.resources.disk_gib, 30)}
        limits = self._limits.replace(**{name: size << bits for name, (size, bits) in sizes.items() if size})
        folder = spec.workdir or HOME
        shell = Shell(limits=limits, env={**spec.env, "NEMO_GYM_WORKDIR": folder})
        try:
            made = await shell.arun(["mkdir", "-p", "--", folder])
        except RlmBrokerError as error:
            raise SandboxCreateError(str(error)) from error
        if problem := problem_of(made):
            await shell.aclose()
            raise SandboxCreateError(refusal(f"workdir = {folder!r}", problem))
        handle = SandboxHandle(f"rlm-broker-{uuid.uuid4().hex[:12]}", self.name, folder)
        self._shells[handle.sandbox_id] = shell
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command line. `error_type` is "timeout" or "sandbox" if it has no exit code of its own."""
        if user not in OWN_USERS:
            return SandboxExecResult(None, refusal(f"user = {user!r}", ONE_USER), _NOT_RUN, "sandbox")
        try:
            result = await self._shell(handle).arun(command, cwd=cwd or handle.raw, env=env, timeout_s=timeout_s)
        except RlmBrokerError as error:
            return SandboxExecResult(None, str(error), _NOT_RUN, "sandbox")
        if result.status == "timeout":
            return SandboxExecResult(result.stdout, stderr_of(result), _NOT_RUN, "timeout")
        return SandboxExecResult(result.stdout, stderr_of(result), exit_code_of(result))

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a file of the host into a sandbox."""
        await self._shell(handle).awrite(target_path, source_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a file of a sandbox to the host."""
        await self._shell(handle).asave(source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Return whether a sandbox runs."""
        shell = self._shells.get(handle.sandbox_id)
        return SandboxStatus.RUNNING if shell is not None and shell.is_open else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        """End a sandbox."""
        if (shell := self._shells.pop(handle.sandbox_id, None)) is not None:
            await shell.aclose()

    async def aclose(self) -> None:
        """End all sandboxes."""
        while self._shells:
            await self._shells.popitem()[1].aclose()

    def _shell(self, handle: SandboxHandle) -> Shell:
        if (shell := self._shells.get(handle.sandbox_id)) is None:
            raise RuntimeError(f"there is no sandbox {handle.sandbox_id!r}: it was closed")
        return shell
