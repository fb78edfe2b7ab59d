"""Snapshots: copies of a workspace."""

import base64
import io

from pydantic import BaseModel


class SnapshotBase(BaseModel):
    """A copy in memory, as base64; `kept` is None before the first one."""

    id: str = ""
    kept: str | None = None

    def keep(self, archive: bytes) -> None:
        """Take an archive."""
        self.kept = base64.b64encode(archive).decode()

    def restore(self) -> io.BytesIO:
        """Return the archive."""
        return io.BytesIO(base64.b64decode(self.kept or ""))


SnapshotSpec = SnapshotBase


def resolve_snapshot(spec: SnapshotBase | None, id: str) -> SnapshotBase:
    """Return a snapshot for a session."""
    return spec or SnapshotBase(id=id)
