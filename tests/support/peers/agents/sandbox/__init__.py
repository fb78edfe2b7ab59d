"""A manifest: the files and the variables that a workspace begins with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field


class ManifestVariables(BaseModel):
    """Variables of all commands."""

    value: dict[str, str] = Field(default_factory=dict)

    async def resolve(self) -> dict[str, str]:
        """Return them, once secrets are looked up."""
        return dict(self.value)


class Manifest(BaseModel):
    """Files by their paths below the root, and what else a workspace is to have."""

    root: str = "/workspace"
    entries: dict[str, Any] = Field(default_factory=dict)
    environment: ManifestVariables = Field(default_factory=ManifestVariables)
    users: list[Any] = Field(default_factory=list)
    groups: list[Any] = Field(default_factory=list)
    extra_path_grants: tuple[Any, ...] = ()
    mounts: list[Any] = Field(default_factory=list)

    def mount_targets(self) -> list[Any]:
        """Return the storage to mount."""
        return self.mounts

    def iter_entries(self) -> Iterator[tuple[Path, Any]]:
        """Yield each entry with its path."""
        return ((Path(path), entry) for path, entry in self.entries.items())
