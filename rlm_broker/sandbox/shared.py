"""Shared sandboxes of the process: one for each set of settings, for callers that come and go by the thousand."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlm_broker.sandbox.sandbox import Sandbox

_lock = threading.Lock()
_sandboxes: "dict[tuple[Any, ...], Sandbox]" = {}
"""Process id and settings → sandbox. A forked process inherits the table, and must not use its parent's sandboxes."""


def shared(key: tuple[Any, ...], make: "Callable[[], Sandbox]") -> "Sandbox":
    """Return the open sandbox of this process for `key`. If there is none, `make` makes it. It is closed at exit."""
    with _lock:
        known = (os.getpid(), *key)
        sandbox = _sandboxes.get(known)
        if sandbox is None or not sandbox.is_open:  # a caller may have closed it: a new one then takes its place
            sandbox = make()
            sandbox.__enter__()
            _sandboxes[known] = sandbox
        return sandbox


def close_all() -> None:
    """Close the shared sandboxes of this process. The next call of `shared` opens new ones."""
    with _lock:
        own = [key for key in _sandboxes if key[0] == os.getpid()]
        sandboxes = [_sandboxes.pop(key) for key in own]
    for sandbox in sandboxes:
        sandbox.close()


def _forget() -> None:
    """Start empty in a forked child. The lock may be held there by a thread that was not forked."""
    global _lock
    _lock = threading.Lock()
    _sandboxes.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close_all)
