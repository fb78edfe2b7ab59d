"""Contexts as a worker loads them, and files to make them of."""

from pathlib import Path
from typing import Any

from rlm_broker.context.store import StoredContext
from sandbox_worker.loading.context import load


def loaded(stored: StoredContext, maps: bool = True) -> Any:
    """Return the value that a worker would have; `maps` says whether it can map texts."""
    return load(stored.fd, stored.info.form, maps)


def written(path: Path, content: str | bytes = "text") -> Path:
    """Write a file, in folders that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
