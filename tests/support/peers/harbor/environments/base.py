"""The base of environments: what it makes of a task before a machine starts."""

import abc
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from harbor.models.task.config import NetworkPolicy


@dataclass
class ExecResult:
    """Outcome of a command."""

    stdout: str | None
    stderr: str | None
    return_code: int


def transfer_tar_filter(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Leave out what is no file, folder or inner link."""
    return None if member.isdev() else tarfile.data_filter(member, path)


class BaseEnvironment(abc.ABC):
    """The machine of one trial."""

    default_user: str | int | None = None

    def __init__(self, environment_dir: Path, task_env_config: SimpleNamespace, network_policy: NetworkPolicy) -> None:
        self.environment_dir, self.task_env_config = environment_dir, task_env_config
        self.network_policy = network_policy
        self._effective_memory_mb: int | None = task_env_config.memory_mb
        self._effective_storage_mb: int | None = None
        self._validate_definition()
        self.validate_network_policy_support()

    def _resolve_user(self, user: str | int | None) -> str | int | None:
        return user if user is not None else self.default_user

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return env

    @abc.abstractmethod
    def _validate_definition(self) -> None: ...

    @abc.abstractmethod
    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None: ...
