"""The base of runtimes."""

import abc
import asyncio
import base64
from dataclasses import dataclass
from typing import Any

from pydantic_config import BaseConfig

from verifiers.v1.errors import SandboxError


@dataclass(frozen=True)
class ProgramResult:
    """Outcome of a program."""

    exit_code: int
    stdout: str
    stderr: str


class BaseRuntimeInfo(BaseConfig):  # type: ignore[misc]
    """Facts for a trace."""

    id: str | None = None


class Runtime(abc.ABC):
    """Runs programs, and reads and writes files."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or "vf-1"
        self.env: dict[str, str] = {}

    def process_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return the variables of one program."""
        return {**self.env, **env}

    async def stop(self) -> None:
        """End it."""
        await asyncio.to_thread(self.cleanup)

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return a file, if it is no larger than `max_bytes`."""
        data = await self._read(path, None if max_bytes is None else max_bytes + 1)
        if max_bytes is not None and len(data) > max_bytes:
            raise SandboxError("over the limit")
        return data

    @abc.abstractmethod
    def cleanup(self) -> None: ...

    @abc.abstractmethod
    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult: ...

    @abc.abstractmethod
    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        done = await self.run(["sh", "-c", 'head -c "$1" -- "$2" | base64', "sh", str(max_bytes), path], {})
        return base64.b64decode(done.stdout)


registered: list[Any] = []


def register(runtime: Runtime) -> None:
    """Have it ended at exit."""
    registered.append(runtime)
