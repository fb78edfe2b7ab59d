"""Contexts as a worker loads them, and files to make them of."""

from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.context import load_into
from sandbox_worker.loading.form import ContextForm
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context


def loaded(stored: StoredContext, maps: bool = True) -> Any:
    """Return the value that a worker would have; `maps` says whether it can map texts."""
    into: dict[str, Any] = {}
    for fd, piece in stored.pieces():
        load_into(into, CONTEXT, fd, piece, maps, decode_context)
    return into[CONTEXT]


def value_of(given: object) -> Any:
    """Store what a caller gives, and return the value that a worker would have."""
    with store(given) as stored:
        return loaded(stored)


def fd_of(stored: StoredContext) -> int:
    """Return the descriptor of a context of one piece."""
    ((fd, _),) = stored.pieces()
    return fd


def form_of(stored: StoredContext) -> ContextForm:
    """Return how a context of one piece lies in its memfd."""
    ((_, piece),) = stored.pieces()
    return piece.form


def written(path: Path, content: str | bytes = "text") -> Path:
    """Write a file, in folders that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def found_in(given: object) -> tuple[Any, dict[str, int]]:
    """Store files, and return the value that a worker would have, and how many files were skipped for which reason."""
    with store(given) as stored:
        return loaded(stored), dict(stored.info.skipped)


def refused(given: object, match: str | None = None) -> str:
    """Return the sentence with which what a caller gives is refused; it matches."""
    with pytest.raises(ContextRefused, match=match) as refusal:
        store(given).close()
    return str(refusal.value)
