"""Specifications, handles and outcomes."""

from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any


class SandboxStatus(StrEnum):
    """States of a sandbox."""

    RUNNING = "running"
    STOPPED = "stopped"


def wanted(memory_mib: int | None = None, disk_gib: int | None = None, gpu: int | None = None) -> SimpleNamespace:
    """Return resources of a specification."""
    return SimpleNamespace(memory_mib=memory_mib, disk_gib=disk_gib, gpu=gpu)


@dataclass(frozen=True)
class SandboxSpec:
    """Wishes for one sandbox."""

    image: str | None = None
    ttl_s: float | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    resources: SimpleNamespace = field(default_factory=wanted)
    entrypoint: list[str] | None = None
    provider_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SandboxHandle:
    """One sandbox, for its provider."""

    sandbox_id: str
    provider_name: str
    raw: Any


@dataclass(frozen=True)
class SandboxExecResult:
    """Outcome of a command."""

    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None


class SandboxCreateError(RuntimeError):
    """A sandbox cannot be made."""
