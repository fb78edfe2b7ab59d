"""inspect_ai: samples whose tools run in a sandbox, by `inspect eval TASK --sandbox rlm_broker`.

Each sample has a machine of its own, a `Shell`: its files begin empty in `/w`, and its commands are programs there. All
samples with the same settings share one sandbox. inspect finds this module by an entry point.
"""

import asyncio
import contextlib
import errno
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, overload

from pydantic import BaseModel, ConfigDict, ValidationError

from rlm_broker.errors import ConfigurationError, FileRefused, ProgramNotStarted, RlmBrokerError
from rlm_broker.integrations.peers import ONE_USER, refusal, require
from rlm_broker.integrations.shell_base import HOME, LEVEL, LIMITS, Shell, exit_code_of, stderr_of
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox

require("inspect_ai", "inspect", tested=("0.3.285", "0.4"))

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)

NAME: Final = "rlm_broker"
"""Name of the sandbox in tasks and on the command line."""
FORMS: Final = "a TOML file with limits, packages, python and env, or a SampleSettings"
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a shell for a program that cannot be executed, and for one that does not exist."""
_ERRNO: Final = {
    "missing": errno.ENOENT,
    "folder": errno.EISDIR,
    "permission": errno.EACCES,
    "no_room": errno.ENOSPC,
}
"""Kind of a refusal of a file -> the number by which Python makes the class of its error."""


class SampleSettings(BaseModel):
    """Settings of a sample's machine, in place of a compose file. All samples of a task may share them.

    Example:
        ```python
        settings = SampleSettings(limits={"memory_bytes": "4GB"}, packages=["numpy>=2"])
        Task(dataset, sandbox=SandboxEnvironmentSpec("rlm_broker", settings))
        ```

    Attributes:
        limits: Limits by name, as `ReplLimits.from_dict` takes them, for all commands of a sample together.
        packages: Packages of its Python, see `Sandbox`; None has those of inspect's own environment.
        python: Folder of a virtual environment, in place of such a list.
        env: Variables of all commands.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, Any] = {}
    packages: list[str] | None = None
    python: str | None = None
    env: dict[str, str] = {}

    @classmethod
    def of(cls, given: SandboxEnvironmentConfigType | None) -> "SampleSettings":
        """Return the settings that a task or the command line names.

        Raises:
            ConfigurationError: They cannot be used. The message names the option.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if isinstance(given, BaseModel):
            named = ", ".join(sorted(given.model_dump(exclude_none=True, exclude_defaults=True)))
            raise ConfigurationError(refusal(named or type(given).__name__, f"give {FORMS}"))
        path = Path(given)
        if path.suffix != ".toml":
            why = "a sandbox has no images, users, networks and mounts"
            raise ConfigurationError(refusal(path.name, f"{why}; give {FORMS}"))
        try:
            return cls(**tomllib.loads(path.read_text()))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationError(f"{given}: {where}: {first['msg']}; give {FORMS}") from None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{given} cannot be read: {error}") from None

    @property
    def all_limits(self) -> ReplLimits:
        """The limits, with those of a shell where none are given."""
        return LIMITS.replace(**self.limits)

    async def sandbox(self) -> Sandbox:
        """Return the open sandbox of all samples with these settings."""
        return await Sandbox.ashared(self.all_limits, LEVEL, packages=self.packages, python=self.python)


@sandboxenv(name=NAME)
class SampleSandbox(SandboxEnvironment):  # type: ignore[misc] # inspect_ai may be absent
    """The machine of one sample.

    Args:
        shell: Its commands and files. It opens with the first of them.
        max_programs: Commands at the same time; further ones wait.
    """

    def __init__(self, shell: Shell, max_programs: int) -> None:
        super().__init__()
        self.shell = shell
        self._places = asyncio.Semaphore(max_programs)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Open the sandbox: if this machine has none, then no sample begins."""
        await SampleSettings.of(config).sandbox()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Return the machine of a sample."""
        settings = SampleSettings.of(config)
        shell = Shell(sandbox=await settings.sandbox(), limits=settings.all_limits, env=settings.env)
        return {"default": cls(shell, shell.limits.max_programs)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End all commands of a sample, and remove its files."""
        for each in environments.values():
            await each.as_type(SampleSandbox).shell.aclose()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> SampleSettings:
        """Return settings from a log."""
        return SampleSettings(**config)

    def default_polling_interval(self) -> float:
        """Return the seconds between two looks for a request of a service, as for inspect's own local sandbox."""
        return 0.2

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. It has the limits of the sample; processes that it leaves end with it.

        Raises:
            SandboxUserUnsupportedError: `user` is given: there is one user.
            TimeoutError: It took longer than `timeout`. It was killed with all its processes.
            OutputLimitExceededError: It wrote more than inspect takes.
            PermissionError: It may not be executed.
            SandboxUnavailableError: The sandbox has broken.
            ValueError: An argument cannot be used.
        """
        if user is not None:
            raise SandboxUserUnsupportedError(refusal(f"user = {user!r}", ONE_USER))
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            async with self._places:
                with _as_inspects(cwd or HOME):
                    result = await self.shell.arun(
                        cmd, input=input, cwd=cwd or HOME, env=env, timeout_s=timeout, max_output_bytes=most
                    )
        except ProgramNotStarted as error:
            if "ermission" in str(error):
                raise PermissionError(errno.EACCES, str(error), cmd[0]) from None
            return ExecResult(False, NOT_FOUND, "", f"{error}\n")
        if result.status == "timeout":
            raise TimeoutError(result.error)
        if result.is_cut:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout)
        code = exit_code_of(result)
        return ExecResult(code == 0, code, result.stdout, stderr_of(result))

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with its folders, below `/w` or `/tmp`.

        Raises:
            PermissionError, IsADirectoryError, OSError: It cannot be written.
            SandboxUnavailableError: The sandbox has broken.
        """
        with _as_inspects(file):
            await self.shell.awrite(file, contents.encode() if isinstance(contents, str) else contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return a file, as text or as bytes.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError, OSError: It cannot be read.
            OutputLimitExceededError: It is larger than inspect takes.
            UnicodeDecodeError: It is no UTF-8 text.
            SandboxUnavailableError: The sandbox has broken.
        """
        with _as_inspects(file):
            data = await self.shell.aread(file, SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        return data.decode() if text else data


@contextlib.contextmanager
def _as_inspects(path: str) -> Iterator[None]:
    """Turn an error of rlm-broker's into the one that inspect documents."""
    try:
        yield
    except FileRefused as error:
        if error.kind == "too_large":
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from None
        number = _ERRNO.get(error.kind, errno.EIO)
        raise OSError(number, f"{os.strerror(number)}: {error}", path) from None
    except ProgramNotStarted:
        raise
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    except RlmBrokerError as error:
        raise SandboxUnavailableError(str(error)) from None
