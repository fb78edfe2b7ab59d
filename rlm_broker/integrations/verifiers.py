"""Verifiers: a runtime for rollouts, which an agent borrows: `await agent.run(task, runtime=runtime)`."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from rlm_broker.errors import RlmBrokerError
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.shell_base import LIMITS, Shell, exit_code_of, stderr_of

require("verifiers", "verifiers", tested=("0.4", "0.5"))

from pydantic_config import BaseConfig
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime, register


class SandboxRuntimeConfig(BaseConfig):  # type: ignore[misc]
    """Configuration of a runtime: limits by their names."""

    type: Literal["rlm_broker"] = "rlm_broker"
    limits: dict[str, float] = {}  # noqa: RUF012 - a field of pydantic's


class SandboxRuntimeInfo(SandboxRuntimeConfig, BaseRuntimeInfo):  # type: ignore[misc]
    """Facts about a runtime, for a trace."""


class SandboxRuntime(Runtime):  # type: ignore[misc]
    """A sandbox as the place of rollouts.

    A rollout's scripts cannot install packages, and its harness reaches no server: there is no network.

    Example:
        ```python
        runtime = SandboxRuntime(SandboxRuntimeConfig())
        await runtime.start()
        trace = await agent.run(task, runtime=runtime)
        await runtime.stop()
        ```
    """

    def __init__(self, config: SandboxRuntimeConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = SandboxRuntimeInfo(**config.model_dump())
        self._shell = Shell(limits=LIMITS.replace(**config.limits))
        register(self)  # its `cleanup` is called at exit, if `stop` was not

    async def start(self) -> None:
        """Open the sandbox. Raise verifiers' SandboxError if that is not possible."""
        with _errors():
            await self._shell.aopen()
        self.info.id = self.name

    def cleanup(self) -> None:
        """End the sandbox."""
        self._shell.close()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program, without a shell."""
        with _errors():
            result = await self._shell.arun(argv, env=self.process_env(env))
        return ProgramResult(exit_code_of(result), result.stdout, stderr_of(result))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        with _errors():
            if max_bytes is None:
                return await self._shell.aread(path)
            start: bytes = await super()._read(path, max_bytes)
            return start

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, relative to the home of the sandbox."""
        with _errors():
            await self._shell.awrite(path, data)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise an error of rlm-broker as one of verifiers'."""
    try:
        yield
    except RlmBrokerError as error:
        raise SandboxError(str(error)) from error
