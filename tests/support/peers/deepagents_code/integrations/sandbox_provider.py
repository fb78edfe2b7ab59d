"""The base of providers, and their error."""

import abc
import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SandboxProviderMetadata:
    """Facts about a provider."""

    name: str
    working_dir: str
    supports_sandbox_id: bool = True


class SandboxNotFoundError(Exception):
    """There is no sandbox of that id."""


class SandboxProvider(abc.ABC):
    """Makes sandboxes and ends them."""

    @abc.abstractmethod
    def get_or_create(self, *, sandbox_id: str | None = None, **params: Any) -> Any: ...

    @abc.abstractmethod
    def delete(self, *, sandbox_id: str, **params: Any) -> None: ...

    async def aget_or_create(self, *, sandbox_id: str | None = None) -> Any:
        """Do the same in a thread."""
        return await asyncio.to_thread(self.get_or_create, sandbox_id=sandbox_id)
