"""Deep Agents of LangChain: a sandbox as the backend of an agent.

`BaseSandbox` of deepagents makes its file tools of three primitives: a command line, upload and download. Errors are
values there, and so they are here: a response per file with a code, a command's output and exit code. A backend that
was closed, or cannot be opened, raises an error of rlm-broker.
"""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from rlm_broker.errors import ConfigurationError, FileRefused
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.shell_base import Shell, exit_code_of
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.programs import ProgramResult
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.errors import FileKind

require("deepagents", "langchain", tested=("0.7", "0.8"))

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

_CODES: Final[Mapping[FileKind, str]] = {
    "missing": "file_not_found",
    "folder": "is_directory",
    "permission": "permission_denied",
    "file": "invalid_path",
}
"""Kind of a refusal → deepagents' code for it. Any other kind is told in words."""
_REFUSED: Final = 1
"""Exit code of a command that was refused before it began."""


class Backend(BaseSandbox):  # type: ignore[misc]
    """A sandbox as the backend of a deep agent. It is opened at its first use, and ends with `close`.

    Example:
        ```python
        with Backend() as backend:
            agent = create_deep_agent(model, backend=backend)
        ```

    Args:
        sandbox: An open sandbox of the caller's, at `strict`; None shares one of the process.
        limits: Limits of the agent's commands together. A command has `block_timeout_s` unless the agent says else.
        env: Variables of all commands.
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._shell = Shell(sandbox=sandbox, limits=limits, env=env)
        self._id = f"rlm-broker-{secrets.token_hex(4)}"

    def __enter__(self) -> "Backend":
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the sandbox now, and not at its first use. Raise an error of rlm-broker if that is not possible."""
        self._shell.open()

    def close(self) -> None:
        """End all commands and remove all files. Has no effect when repeated."""
        self._shell.close()

    @property
    def id(self) -> str:
        """Name of the sandbox, unique in this process."""
        return self._id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command line. Its errors are mixed into its output, and a command past `timeout` has exit code 124."""
        try:
            return _response(self._shell.run(command, timeout_s=timeout or None, is_mixed=True))
        except ConfigurationError as refused:
            return ExecuteResponse(output=f"Error: {refused}", exit_code=_REFUSED)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command line as `execute` does, awaited. If the caller is cancelled, the command is killed."""
        try:
            return _response(await self._shell.arun(command, timeout_s=timeout or None, is_mixed=True))
        except ConfigurationError as refused:
            return ExecuteResponse(output=f"Error: {refused}", exit_code=_REFUSED)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files at absolute paths. Each has a response of its own."""
        return [
            FileUploadResponse(path, _problem(path, partial(self._shell.write, path, data))) for path, data in files
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files at absolute paths. Each has a response of its own."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        content: list[bytes] = []
        problem = _problem(path, lambda: content.append(self._shell.read(path)))
        return FileDownloadResponse(path, *content, error=problem)


def _response(result: ProgramResult) -> ExecuteResponse:
    output = result.stdout + (f"\nError: {result.error}" if result.error else "")
    return ExecuteResponse(output=output, exit_code=exit_code_of(result), truncated=result.is_cut)


def _problem(path: str, work: Callable[[], None]) -> str | None:
    """Do something with a file, and return deepagents' code for a refusal, or its sentence; None if it was done."""
    if not path.startswith("/"):
        return "invalid_path"
    try:
        work()
    except FileRefused as refused:
        return _CODES.get(refused.kind, str(refused))
    return None
