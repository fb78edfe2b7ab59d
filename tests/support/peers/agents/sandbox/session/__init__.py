"""Sessions, their state, and the wrapper that users get."""

import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agents.sandbox import Manifest
from agents.sandbox.snapshot import SnapshotBase


class SandboxSessionState(BaseModel):
    """All that is needed to go on with a session."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    type: str
    session_id: uuid.UUID = Field(default_factory=uuid.uuid4)
    snapshot: SnapshotBase
    manifest: Manifest

    def assert_path_grants_rebound(self) -> None:
        """Grants of host folders have to be given anew."""


class SandboxSession:
    """Passes all on to a session of a provider's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> "SandboxSession":
        await self._inner.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._inner.aclose()
