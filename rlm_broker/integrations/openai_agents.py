"""OpenAI Agents SDK: sandboxes for a `SandboxAgent`, in place of `UnixLocalSandboxClient` or Docker.

A session's workspace is the scratch folder of a `Shell`. What the SDK makes of files, patches and archives it makes by
commands, which run in the sandbox. A session that is shut down keeps its workspace until the client deletes it, so that
the same process resumes it; elsewhere its snapshot is unpacked into a new one.
"""

import io
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NoReturn

from rlm_broker.errors import FileRefused, RlmBrokerError
from rlm_broker.integrations.peers import NO_NETWORK, ONE_USER, refusal, require
from rlm_broker.integrations.shell_base import HOME, LIMITS, Shell, exit_code_of, problem_of
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox

require("openai-agents", "openai-agents", tested=("0.24", "0.25"))

from agents.sandbox import Manifest
from agents.sandbox.entries import GitRepo
from agents.sandbox.errors import (
    ConfigurationError,
    ErrorCode,
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, User

BACKEND: Final = "rlm_broker"
WORKSPACE: Final = f"{HOME}/workspace"
"""Root of a session whose manifest names none. It is not `HOME` itself, which is also the sandbox's /tmp."""
_ROOTS: Final = (HOME, "/tmp")
"""Absolute names of the folder that commands can write to."""
_ANY_ROOT: Final = Manifest().root
"""Root of a manifest that names none."""


class ClientOptions(BaseSandboxClientOptions):  # type: ignore[misc]
    """Options of one session: limits by their names, in addition to those of the client."""

    type: Literal["rlm_broker"] = BACKEND
    limits: dict[str, int | float] | None = None


class SessionState(SandboxSessionState):  # type: ignore[misc]
    """State of a session, from which it is resumed."""

    type: Literal["rlm_broker"] = BACKEND
    limits: dict[str, int | float] | None = None


class AgentSession(BaseSandboxSession):  # type: ignore[misc]
    """A session with a sandbox of its own."""

    state: SessionState

    def __init__(self, state: SessionState, shell: Shell) -> None:
        self.state = state
        self.shell = shell
        self._set_start_state_preserved(shell.is_open)
        self._is_up = False

    async def _prepare_backend_workspace(self) -> None:
        root = Path(self.state.manifest.root)
        try:
            made = await self.shell.arun(["mkdir", "-p", "--", str(root)])
        except RlmBrokerError as error:
            raise WorkspaceStartError(path=root, cause=error, message=str(error)) from error
        if problem := problem_of(made):
            raise WorkspaceStartError(path=root, context={"reason": problem})
        self._is_up = True

    async def _after_shutdown(self) -> None:
        self._is_up = False

    async def running(self) -> bool:
        """Return whether the session was started, and not shut down since."""
        return self._is_up and self.shell.is_open

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        _require_no_user(user)
        prepared: list[str] = super()._prepare_exec_command(*command, shell=shell, user=None)
        return prepared

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        argv = [str(part) for part in command]
        env, root = await self.state.manifest.environment.resolve(), self.state.manifest.root
        try:
            result = await self.shell.arun(argv, cwd=root, env=env, timeout_s=timeout)
        except RlmBrokerError as error:
            raise ExecTransportError(command=argv, cause=error, message=str(error)) from error
        if result.status == "timeout":
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        why = f"\n{result.error}" if result.error else ""
        return ExecResult(
            stdout=result.stdout_bytes, stderr=result.stderr_bytes + why.encode(), exit_code=exit_code_of(result)
        )

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """Return a file of the workspace. A link is followed if it leads to one."""
        _require_no_user(user)
        allowed: Path = await self._validate_path_access(path)
        try:
            return io.BytesIO(await self._read(str(allowed)))
        except FileRefused as refused:
            if refused.kind != "permission":
                _raise_unread(path, refused)
        found = await self._exec_internal("readlink", "-f", "--", allowed)
        target = found.stdout.decode("utf-8", "surrogateescape")
        try:
            return io.BytesIO(await self._read(str(await self._validate_path_access(target.rstrip("\n")))))
        except FileRefused as refused:
            _raise_unread(path, refused)

    async def _read(self, path: str) -> bytes:
        return await self.shell.aread(path, self.shell.limits.scratch_bytes)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file of the workspace, with its folders."""
        _require_no_user(user)
        allowed: Path = await self._validate_path_access(path, for_write=True)
        content = coerce_write_payload(path=path, data=data).stream.read()
        try:
            await self.shell.awrite(str(allowed), content)
        except FileRefused as refused:
            raise WorkspaceArchiveWriteError(path=path, cause=refused, message=str(refused)) from refused

    async def persist_workspace(self) -> io.IOBase:
        """Return the workspace as a tar archive, without what is not to be kept."""
        root = Path(self.state.manifest.root)
        try:
            return io.BytesIO(await self.shell.apack(root, self._persist_workspace_skip_relpaths()))
        except RlmBrokerError as error:
            raise WorkspaceArchiveReadError(path=root, context={"reason": str(error)}, cause=error) from error

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar archive into the workspace. What it may do there a command may do, too."""
        root = Path(self.state.manifest.root)
        try:
            await self.shell.aunpack(coerce_write_payload(path=root, data=data).stream.read(), root)
        except RlmBrokerError as error:
            raise WorkspaceArchiveWriteError(path=root, context={"reason": str(error)}, cause=error) from error


class Client(BaseSandboxClient):  # type: ignore[misc]
    """Makes sandboxes for agents.

    Example:
        ```python
        run_config = RunConfig(sandbox=SandboxRunConfig(client=Client()))
        result = await Runner.run(agent, "Fix the failing test.", run_config=run_config)
        ```

    A manifest's root is a folder below `/w`, and "/workspace", the default, stands for `/w/workspace`. Users, folders
    of the host, mounts and Git repositories are refused when a session is made: they need what a sandbox has not.

    Args:
        sandbox: An open sandbox of the caller's, at `strict`; None shares one of the process.
        limits: Limits of each session without its own.
        env: Variables of all commands, below those of a manifest.
        instrumentation: As for the clients of the SDK.
    """

    backend_id = BACKEND
    supports_default_options = True

    def __init__(
        self,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
        instrumentation: Instrumentation | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits or LIMITS
        self._env = env
        self._instrumentation = instrumentation or Instrumentation()
        self._shells: dict[uuid.UUID, Shell] = {}

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: ClientOptions | None = None,
    ) -> SandboxSession:
        """Make a session. Its sandbox is opened when it is started.

        Raises:
            agents.sandbox.errors.ConfigurationError: The manifest asks for what a sandbox has not.
        """
        manifest = manifest if manifest is not None else Manifest()
        self._validate_manifest_for_create(manifest)
        if manifest.root == _ANY_ROOT:
            manifest = manifest.model_copy(update={"root": WORKSPACE}, deep=True)
        _require_possible(manifest)
        session_id = uuid.uuid4()
        kept = resolve_snapshot(snapshot, str(session_id))
        limits = None if options is None else options.limits
        state = SessionState(session_id=session_id, manifest=manifest, snapshot=kept, limits=limits)
        return self._session(state)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Go on with a session: with its own sandbox if this client has it, else with its snapshot in a new one."""
        if not isinstance(state, SessionState):
            raise TypeError(f"a session of {BACKEND!r} is resumed by its own state, not by {type(state).__name__}")
        state.assert_path_grants_rebound()
        _require_possible(state.manifest)
        return self._session(state)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End a session's commands and remove its workspace."""
        if (shell := self._shells.pop(session.state.session_id, None)) is not None:
            await shell.aclose()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """Return the state that `serialize_session_state` made text of."""
        return self._deserialize_session_state_payload(payload, SessionState)

    def _session(self, state: SessionState) -> SandboxSession:
        shell = self._shells.get(state.session_id)
        if shell is None or shell.is_closed:
            shell = Shell(sandbox=self._sandbox, limits=self._limits.replace(**(state.limits or {})), env=self._env)
            self._shells[state.session_id] = shell
        return self._wrap_session(AgentSession(state, shell), instrumentation=self._instrumentation)


def _require_possible(manifest: Manifest) -> None:
    """Raise the SDK's ConfigurationError for what no sandbox here has."""
    if not any(manifest.root == root or manifest.root.startswith(f"{root}/") for root in _ROOTS):
        _refuse("manifest.root", f"{manifest.root!r} is outside of {HOME}, the folder that commands can write to")
    if manifest.users or manifest.groups:
        _refuse("manifest.users", ONE_USER)
    if any(grant.host_path is not None for grant in manifest.extra_path_grants):
        _refuse("extra_path_grants", "no folder of the host is shown in the sandbox")
    if manifest.mount_targets():
        _refuse("mounts", NO_NETWORK)
    if any(isinstance(entry, GitRepo) for _, entry in manifest.iter_entries()):
        _refuse("GitRepo", f"{NO_NETWORK}: clone it on the host, and give it as a LocalDir")


def _require_no_user(user: str | User | None) -> None:
    if user is not None:
        _refuse("user", ONE_USER)


def _refuse(option: str, why: str) -> NoReturn:
    code, message = ErrorCode.SANDBOX_CONFIG_INVALID, refusal(option, why)
    raise ConfigurationError(message=message, error_code=code, op="start", context={"option": option})


def _raise_unread(path: Path, refused: FileRefused) -> NoReturn:
    if refused.kind == "missing":
        raise WorkspaceReadNotFoundError(path=path, cause=refused) from refused
    raise WorkspaceArchiveReadError(path=path, context={"reason": str(refused)}, cause=refused) from refused
