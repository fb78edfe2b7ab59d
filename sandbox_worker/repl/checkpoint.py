"""A checkpoint: a frozen copy of the REPL, which goes on in its place if a later block has to be killed.

Theory of operation
===================
The orchestrator asks for a checkpoint with the block before which it is made. Init has then handed over one end of a
socket pair, and the REPL forks before the block's code runs:

1. The REPL forks a child, and the child forks the copy and ends. So the copy is a child of init, and not of the REPL:
   `os.wait` in model code finds no child that it has not started. The REPL stays the process it was.
2. The copy closes the connection, tells init its pid by the socket, and waits there.
3. The REPL goes on once the copy has spoken. Only the copy still has the socket, so a later block cannot speak for it.
4. If the block is killed, init stops all processes, kills all but the copy, hands it a fresh connection, and wakes it.
   The copy says ready, as a fresh REPL does. Its variables are those of the moment of the fork.

The copy holds what model code has made of this process, and so is as untrusted as the REPL. Init counts it with the
REPL's processes. Functions that code has registered with `os.register_at_fork` run in it; they can spoil the copy, and
so lose their own rollback, no more.

A fork copies one thread alone, and locks that others hold would stay locked. So init refuses a checkpoint while the
REPL has further threads.
"""

import contextlib
import faulthandler
import os
import resource
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, partial

from sandbox_worker.wire.descriptors import (
    A_CHECKPOINT,
    CHECKPOINT_MADE,
    CONNECTION_FD,
    HANDED_FD,
    STACK_FD,
    receive,
)


class HandedDescriptors:
    """Receiver of the descriptors that init hands to this process, sorted by the packets beside them."""

    def __init__(self) -> None:
        self._waiting: defaultdict[bytes, list[int]] = defaultdict(list)

    @cached_property
    def _socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, HANDED_FD)

    def take(self, packet: bytes) -> int | None:
        """Return the next descriptor that came with this packet, for the caller to close; None if there is none."""
        while not self._waiting[packet]:  # no more is received than is needed: a process may have few descriptors
            try:
                kind, fds = receive(self._socket, 1, 1, socket.MSG_DONTWAIT)
            except OSError:  # there is no further one; or model code has closed the socket
                return None
            if not fds:
                return None
            self._waiting[kind] += fds
        return self._waiting[packet].pop(0)

    def newest(self, packet: bytes) -> int | None:
        """Return the last descriptor that came with this packet; None if there is none. Older ones are closed: they are
        of blocks that were cancelled before they began."""
        newest = None
        while (fd := self.take(packet)) is not None:
            if newest is not None:
                os.close(newest)
            newest = fd
        return newest

    def close_all(self) -> None:
        """Close all descriptors that were not taken."""
        for fd in [fd for fds in self._waiting.values() for fd in fds]:
            os.close(fd)
        self._waiting.clear()


def make_checkpoint(handed: HandedDescriptors, copies: int) -> bool:
    """Fork a checkpoint by the socket that init has handed over. If there is none, or it cannot be made, do without.

    Args:
        copies: Processes that checkpoints may have, beyond those of code.

    Returns:
        False in the REPL; True in the checkpoint, when it goes on as the REPL on a fresh connection.
    """
    speaking = handed.newest(A_CHECKPOINT)
    if speaking is None:
        return False
    if not faulthandler.is_enabled():  # not in each fresh REPL: it takes eight system calls
        faulthandler.enable(file=STACK_FD)  # a crash in C code prints its stack there
    began = time.monotonic()
    restore_random = random_kept()
    try:
        made, there = os.pipe()
    except OSError:  # model code has left too few descriptors
        os.close(speaking)
        return False
    allow_processes(copies, 0)
    try:
        middle = os.fork()
    except OSError:  # too many processes, or too little memory
        middle = -1
    if middle == 0:
        try:
            if os.fork():
                os._exit(0)
            os.close(made)
            _freeze(speaking, there, began)
            handed.close_all()  # those of later contexts are handed over again
            restore_random()
            allow_processes(copies, 2)  # nor is this copy one
        except BaseException:  # noqa: BLE001 - functions of model code may raise anything: this copy must run no block
            os._exit(0)
        return True
    os.close(speaking)
    os.close(there)
    if middle > 0:
        os.read(made, 1)  # the end of the pipe: the copy has spoken, and its parent has ended, or both have ended
        with contextlib.suppress(ChildProcessError):  # model code ignores SIGCHLD
            os.waitpid(middle, 0)
    os.close(made)
    allow_processes(copies, 1)  # no parent of a copy is left
    return False


def _freeze(speaking: int, there: int, began: float) -> None:
    """Tell init of this copy, and wait until it is to go on, with a fresh connection. Raise IndexError if it is not."""
    os.setpgid(0, 0)  # model code may signal its own process group
    os.dup2(HANDED_FD, CONNECTION_FD, inheritable=False)  # the old connection's number, where this one waits, too
    os.dup2(speaking, HANDED_FD, inheritable=False)  # the filter lets no other socket receive descriptors
    os.close(speaking)
    os.write(HANDED_FD, CHECKPOINT_MADE.pack(os.getpid(), time.monotonic() - began))
    os.close(there)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, HANDED_FD)
    _, connections = receive(waiting, 1, 1)
    os.dup2(CONNECTION_FD, waiting.detach(), inheritable=False)
    os.dup2(connections[0], CONNECTION_FD, inheritable=False)  # so that all objects find it
    os.close(connections[0])


def random_kept() -> Callable[[], object]:
    """Return a function that gives `random` its present state again, after it has drawn a new one in a forked process.

    `random` is not imported here: it would draw one in each process that is forked.
    """
    random = sys.modules.get("random")
    return (lambda: None) if random is None else partial(random.setstate, random.getstate())


def allow_processes(copies: int, unused: int) -> None:
    """Allow so many more processes than code may have, but for unused ones, unless code has lowered the limit."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if allowed >= most - copies:
        resource.setrlimit(resource.RLIMIT_NPROC, (max(0, most - unused), most))
