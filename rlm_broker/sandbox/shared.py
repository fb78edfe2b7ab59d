"""Shared sandboxes of the process: one for each set of settings, for callers that come and go by the thousand."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlm_broker.sandbox.sandbox import Sandbox

_lock = threading.Lock()
"""Held while the table is looked at, and never while a sandbox opens."""
_sandboxes: "dict[tuple[Any, ...], Sandbox]" = {}
"""Process id and settings → sandbox. A forked process inherits the table, and must not use its parent's sandboxes."""


def shared(key: tuple[Any, ...], make: "Callable[[], Sandbox]") -> "Sandbox":
    """Return the sandbox of this process for `key`, which lives on the background loop. The caller opens it.

    Several callers may open it at the same time: one does, and the others wait for that alone. It is closed at exit.

    Args:
        key: Settings of the sandbox.
        make: Makes the sandbox if there is none.
    """
    with _lock:
        sandbox = _sandboxes.get((os.getpid(), *key))
        if sandbox is None:
            sandbox = _sandboxes[(os.getpid(), *key)] = make()
    sandbox.bind_loop()
    return sandbox


def close_all() -> None:
    """Close the shared sandboxes of this process. The next call of `shared` makes new ones."""
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
