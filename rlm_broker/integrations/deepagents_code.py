"""Deep Agents Code, the command line of Deep Agents: sandboxes for its `--sandbox rlm_broker`.

It finds the provider by the entry point `rlm_broker` in the group `deepagents_code.sandbox_providers`.
"""

from typing import Any

from rlm_broker.integrations.langchain import Backend
from rlm_broker.integrations.peers import require
from rlm_broker.integrations.shell_base import HOME, LIMITS

require("deepagents-code", "langchain", tested=("0.1.88", "0.3"))

from deepagents_code.integrations.sandbox_provider import (
    SandboxNotFoundError,
    SandboxProvider,
    SandboxProviderMetadata,
)


class CodeProvider(SandboxProvider):  # type: ignore[misc]
    """Sandboxes by their id, which live no longer than their process. The parameters in its configuration are limits.

    Example:
        ```toml
        [sandboxes.providers.rlm_broker]
        class_path = "rlm_broker.integrations.deepagents_code:CodeProvider"
        params = { memory_bytes = 4294967296 }
        ```
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    @property
    def metadata(self) -> SandboxProviderMetadata:
        """Facts for the command line."""
        return SandboxProviderMetadata(name="rlm_broker", working_dir=HOME, supports_sandbox_id=False)

    def get_or_create(self, *, sandbox_id: str | None = None, **limits: Any) -> Backend:
        """Return the sandbox of that id, or open one.

        Raises:
            SandboxNotFoundError: No sandbox of that id lives in this process.
            ConfigurationError: A parameter is no limit, such as an image or a network.
            IsolationUnavailable: This machine has no `strict`.
        """
        if sandbox_id is not None:
            if sandbox_id not in self._backends:
                raise SandboxNotFoundError(
                    f"no sandbox {sandbox_id!r} lives in this process, with which all of them end"
                )
            return self._backends[sandbox_id]
        backend = Backend(limits=LIMITS.replace(**limits))
        backend.open()
        self._backends[backend.id] = backend
        return backend

    def delete(self, *, sandbox_id: str, **_more: Any) -> None:
        """End a sandbox. Has no effect if there is none of that id."""
        if (backend := self._backends.pop(sandbox_id, None)) is not None:
            backend.close()
