"""Forks of this process: a lock against forks at a wrong moment, and descriptors that no child may keep.

A forked process inherits every descriptor. The other end of a socket learns that this process has ended when the last
copy is closed. So a data loader, or a pool of `multiprocessing`, would keep fork servers and REPLs alive after a
SIGKILL of this process. Therefore each child closes its copies.
"""

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

FORKING: Final = threading.RLock()
"""Held by each fork of this process, so that no child finds it held by a thread that was not forked. Held also while a
program is started, a loop is chosen, and from the opening of a descriptor until it is `left_to_parent`.

`Popen` waits until its pipe for a failed exec is closed. A process forked in between inherits the write end of that
pipe, and `Popen` would wait for as long as that process lives."""

_left: "weakref.WeakKeyDictionary[Any, Callable[[Any], object]]" = weakref.WeakKeyDictionary()


def left_to_parent(held: T, leave: Callable[[T], object]) -> T:
    """Have each process forked from now on call `leave` with its copy of `held`, and return `held`.

    Args:
        held: Object with a descriptor. A weak reference to it is kept.
        leave: Closes the descriptor, and does no more. The forked process shares all else with its parent: if it shut
            a socket down, or removed a descriptor from a loop's epoll, the parent would lose it.
    """
    with FORKING:
        _left[held] = leave
    return held


def socket_of_parent(opened: socket.socket) -> socket.socket:
    """Have each process forked from now on close its copy of a socket, and return the socket."""
    return left_to_parent(opened, _close)


def socketpair_of_parent() -> tuple[socket.socket, socket.socket]:
    """Return two connected packet sockets, which no forked process keeps."""
    with FORKING:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return socket_of_parent(one), socket_of_parent(other)


def _close(copy: socket.socket) -> None:
    """Close the descriptor at once, also if a file made of the socket is open."""
    if (fd := copy.detach()) >= 0:
        os.close(fd)


def _leave_all() -> None:
    left = list(_left.items())
    _left.clear()
    for held, leave in left:
        with contextlib.suppress(Exception):  # the interpreter would print it, in a process of the user's
            leave(held)


os.register_at_fork(before=FORKING.acquire, after_in_parent=FORKING.release, after_in_child=FORKING.release)
os.register_at_fork(after_in_child=_leave_all)
