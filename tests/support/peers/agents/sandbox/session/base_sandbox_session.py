"""The base of a provider's session: the order of its life, and paths."""

import abc
import io
import posixpath
import shlex
from pathlib import Path
from typing import Any

from agents.sandbox.errors import InvalidManifestPathError


class BaseSandboxSession(abc.ABC):
    """Starts with the manifest or the snapshot, and ends with a snapshot."""

    state: Any
    is_preserved = False

    def _set_start_state_preserved(self, is_preserved: bool) -> None:
        self.is_preserved = is_preserved

    async def start(self) -> None:
        """Prepare the workspace, unless it is there."""
        await self._prepare_backend_workspace()
        if not self.is_preserved and self.state.snapshot.kept is not None:
            await self.hydrate_workspace(self.state.snapshot.restore())
        elif not self.is_preserved:
            for path, content in self.state.manifest.iter_entries():
                await self.write(path, io.BytesIO(content))

    async def aclose(self) -> None:
        """Keep a snapshot, and shut down."""
        self.state.snapshot.keep((await self.persist_workspace()).read())
        await self._after_shutdown()

    def _persist_workspace_skip_relpaths(self) -> set[Path]:
        return {Path("left/out")}

    async def exec(self, *command: str, timeout: float | None = None, shell: bool = True, user: Any = None) -> Any:
        """Run a command, in a shell or as it is."""
        return await self._exec_internal(*self._prepare_exec_command(*command, shell=shell, user=user), timeout=timeout)

    def _prepare_exec_command(self, *command: str, shell: bool, user: Any) -> list[str]:
        assert user is None
        return ["sh", "-lc", command[0] if len(command) == 1 else shlex.join(command)] if shell else [*command]

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        root = self.state.manifest.root
        whole = posixpath.normpath(posixpath.join(root, str(path)))
        if not whole.startswith(f"{root}/"):
            raise InvalidManifestPathError(rel=str(path), for_write=for_write)
        return Path(whole)

    @abc.abstractmethod
    async def _prepare_backend_workspace(self) -> None: ...

    @abc.abstractmethod
    async def _after_shutdown(self) -> None: ...

    @abc.abstractmethod
    async def _exec_internal(self, *command: str, timeout: float | None = None) -> Any: ...

    @abc.abstractmethod
    async def write(self, path: Path, data: io.IOBase) -> None: ...

    @abc.abstractmethod
    async def persist_workspace(self) -> io.IOBase: ...

    @abc.abstractmethod
    async def hydrate_workspace(self, data: io.IOBase) -> None: ...
