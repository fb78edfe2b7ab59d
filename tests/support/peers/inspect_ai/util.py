"""The base class of a sandbox, its results, its errors and its bounds."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

T = TypeVar("T")
SandboxEnvironmentConfigType = BaseModel | str
registered: dict[str, type["SandboxEnvironment"]] = {}
"""Name -> class, as the decorator has them."""


class SandboxUserUnsupportedError(RuntimeError):
    """There is no such user."""


class SandboxUnavailableError(RuntimeError):
    """The sandbox does not run."""


class OutputLimitExceededError(Exception):
    """More came out of a sandbox than is taken."""

    def __init__(self, limit_str: str, truncated_output: str | None) -> None:
        super().__init__(f"The sandbox output stream limit of {limit_str} was exceeded.")
        self.truncated_output = truncated_output


@dataclass
class ExecResult(Generic[T]):
    """Outcome of a command."""

    success: bool
    returncode: int
    stdout: T
    stderr: T


class SandboxEnvironmentLimits:
    """Bounds of what comes out."""

    MAX_EXEC_OUTPUT_SIZE = 10 << 20
    MAX_EXEC_OUTPUT_SIZE_STR = "10 MiB"
    MAX_READ_FILE_SIZE = 100 << 20
    MAX_READ_FILE_SIZE_STR = "100 MiB"


class SandboxEnvironment(abc.ABC):
    """Base of all sandboxes."""

    def as_type(self, kind: type[T]) -> T:
        """Return this object, if it is of that class."""
        assert isinstance(self, kind)
        return self

    @abc.abstractmethod
    async def exec(self, cmd: list[str]) -> ExecResult[str]:
        """Run a command."""

    @abc.abstractmethod
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file."""

    @abc.abstractmethod
    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file."""


def sandboxenv(name: str) -> Callable[[type[SandboxEnvironment]], type[SandboxEnvironment]]:
    """Register a class by a name."""

    def register(kind: type[SandboxEnvironment]) -> type[SandboxEnvironment]:
        registered[name] = kind
        return kind

    return register
