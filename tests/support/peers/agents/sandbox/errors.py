"""Errors with a message, a code and facts."""

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """Codes for programs."""

    SANDBOX_CONFIG_INVALID = "sandbox_config_invalid"


class SandboxError(Exception):
    """The base of them."""

    def __init__(self, *, message: str = "", cause: BaseException | None = None, **facts: Any) -> None:
        super().__init__(message or f"{type(self).__name__} {facts}")
        self.cause, self.facts = cause, facts


ConfigurationError = type("ConfigurationError", (SandboxError,), {})
ExecTimeoutError = type("ExecTimeoutError", (SandboxError,), {})
ExecTransportError = type("ExecTransportError", (SandboxError,), {})
InvalidManifestPathError = type("InvalidManifestPathError", (SandboxError,), {})
WorkspaceArchiveReadError = type("WorkspaceArchiveReadError", (SandboxError,), {})
WorkspaceArchiveWriteError = type("WorkspaceArchiveWriteError", (SandboxError,), {})
WorkspaceReadNotFoundError = type("WorkspaceReadNotFoundError", (SandboxError,), {})
WorkspaceStartError = type("WorkspaceStartError", (SandboxError,), {})
