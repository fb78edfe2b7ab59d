"""Sandboxes of the process: one for each set of settings, for callers that come and go by the thousand."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlm_broker.sandbox.sandbox import Sandbox

_lock = threading.Lock()
_sandboxes: "dict[tuple[Any, ...], Sandbox]" = {}
"""By process id and settings: what a forked process has inherited is not its own."""


def shared(key: tuple[Any, ...], make: "Callable[[], Sandbox]") -> "Sandbox":
    """Return the open sandbox of this process for `key`: made and opened where there is none, closed at exit."""
    with _lock:
        known = (os.getpid(), *key)
        sandbox = _sandboxes.get(known)
        if sandbox is None or not sandbox.is_open:  # its owner may have closed it: then another takes its place
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
    """In a forked child: the lock may be held by a thread that is not there."""
    global _lock
    _lock = threading.Lock()
    _sandboxes.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close_all)
