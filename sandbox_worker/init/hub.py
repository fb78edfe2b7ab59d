"""A hub: a REPL that has become a frozen copy of itself, from which its forks are made.

Theory of operation
===================
`SandboxedRepl.fork` makes a second live REPL with the same variables, in the same worker:

1. The orchestrator has a block begin that has no code. Init has handed the REPL one end of a socket pair. The REPL
   becomes a hub there, between two blocks: it runs no model code any more, and waits on that socket.
2. Init has the hub fork. The hub forks a keeper, and the keeper forks a REPL. The first REPL takes the connection and
   the pipes of the hub, and goes on where that was: it is the original, in another process. Each further one takes a
   connection, pipes and a bell of its own, and says ready. So all are made alike, and none is below another.
3. The keeper enters a Landlock domain before it forks its REPL, and the REPL enters another one within. From there code
   reaches neither hub, nor keeper, nor the other REPLs: it cannot signal, trace or read them. The keeper reaches its
   REPL and all that this has started, and nothing else: no process leaves its domain.
4. If a REPL has to be killed, its keeper sends SIGKILL to all that it can reach, at once (`kill(-1)`, as init does
   where there is no fork), and waits for their end. It is the reaper of orphans among them. So init also knows by their
   parents whose CPU time and memory each process uses.
5. A REPL that was forked can become a hub, too. Landlock nests 16 domains; a worker has two, and each moment at which a
   REPL is forked adds two. So seven moments follow one another at most. Any number of forks is made at one moment.

What is the same in all of them is what model code has made before: its open files and pipes, and its functions for
`os.register_at_fork`. Hub and keeper hold model code's memory. But nothing that code does after the fork reaches them.

A second process for each REPL is the price of an end that touches no other REPL. Without it init could not tell whose
an orphan is: the system call filter of the hub denies new sessions for good, and process groups are model code's own.
Rejected: the original stays the process that it was, and restricts itself. It would need a keeper all the same, made
in another way.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import time
from typing import NoReturn

from sandbox_worker.init.child import MOST_DESCRIPTORS, have_no_threads, kill_until_alone, may_have_threads
from sandbox_worker.isolation import landlock, syscalls
from sandbox_worker.repl.checkpoint import HandedDescriptors, allow_processes, random_kept
from sandbox_worker.wire.descriptors import (
    A_HUB,
    CONNECTION_FD,
    FORKED,
    GOES_ON,
    HANDED_FD,
    KILL,
    REPL_ENDED,
    STACK_FD,
    receive,
)

MOST_FORK_FDS = 8
"""Descriptors beside a packet to a hub, at most."""
KEEPERS_END_S, LOOK_AGAIN_S = 1.0, 0.001
"""Most seconds until the keepers of a hub that goes on have ended, and those between two looks. Init ends them, unless
model code in them holds that up."""
_PLACES = (CONNECTION_FD, 1, 2, STACK_FD, HANDED_FD)
"""Numbers of a further REPL's descriptors, in the order in which they come. Its bell follows."""


def become_hub(handed: HandedDescriptors, landlock_abi: int, copies: int) -> mmap.mmap | None:
    """Become a hub, by the socket that init has handed over. Return in each REPL that is forked from it.

    Args:
        handed: Receiver of the socket.
        landlock_abi: Version of Landlock.
        copies: Processes that checkpoints may have, beyond those of code.

    Returns:
        The bell of a further REPL. None in the REPL that goes on; also if there is no socket, or no process can be
        forked for it: then it goes on in this process.
    """
    speaking = handed.newest(A_HUB)
    if speaking is None:
        return None
    restore_random = random_kept()
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    allow_processes(copies, copies)  # REPLs of a family make no checkpoints
    have_no_threads()  # it has one: no fork need look for others
    hands = os.dup(HANDED_FD)
    os.dup2(speaking, HANDED_FD, inheritable=False)  # the filter lets no other socket receive descriptors
    os.close(speaking)
    hub = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, HANDED_FD)
    while True:
        packet, fds = receive(hub, 1, MOST_FORK_FDS)
        if not fds:
            os._exit(0)
        goes_on = packet == GOES_ON
        if _is_repl(fds[0], fds[1], landlock_abi, waits=goes_on):
            break
        for fd in fds:
            os.close(fd)
        if goes_on:  # the REPL that goes on has these two
            for number in (CONNECTION_FD, hands):
                os.dup2(HANDED_FD, number, inheritable=False)
    hub.detach()
    os.dup2(hands, HANDED_FD, inheritable=False)
    bell = None if goes_on else _settle(fds[2:])
    for fd in (*fds, hands):
        os.close(fd)
    may_have_threads()
    restore_random()
    _wait_for_children()
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 0)
    if on_child is not None:
        signal.signal(signal.SIGCHLD, on_child)
    return bell


def _wait_for_children() -> None:
    """Wait for the ends of keepers and of orphans of theirs: code would find them among its children."""
    until = time.monotonic() + KEEPERS_END_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(LOOK_AGAIN_S)


def _is_repl(keeping: int, ruleset: int, landlock_abi: int, *, waits: bool) -> bool:
    """Fork a keeper with its REPL. They tell init of themselves. Return whether this process is the REPL.

    Args:
        keeping: The keeper's socket.
        ruleset: Landlock ruleset of its domain, and of the one within.
        landlock_abi: Version of Landlock.
        waits: Whether to wait until both are there, and to be the REPL if they cannot be.
    """
    made, there = os.pipe()
    try:
        keeper = os.fork()
    except OSError as error:
        _tell_failure(keeping, error)
        os.close(there)
        os.close(made)
        return waits
    if keeper:
        os.close(there)
        is_there = not waits or bool(os.read(made, 1))
        os.close(made)
        return not is_there
    try:
        os.close(made)
        landlock.restrict(ruleset, landlock_abi)
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        if repl := os.fork():
            os.close(there)
            _keep(keeping, repl)
        landlock.restrict(ruleset, landlock_abi)
        os.setpgid(0, 0)  # model code may signal its own process group
        os.write(keeping, FORKED.pack(0, os.getppid(), os.getpid()))
        if waits:
            os.write(there, GOES_ON)
        os.close(there)
    except OSError as error:
        _tell_failure(keeping, error)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - functions of model code may raise anything: this process must run no block
        os._exit(1)
    return True


def _tell_failure(keeping: int, error: OSError) -> None:
    with contextlib.suppress(OSError):  # init has given the fork up meanwhile: the hub goes on all the same
        os.write(keeping, FORKED.pack(error.errno or errno.ECHILD, 0, 0))


def _settle(fds: list[int]) -> mmap.mmap:
    """Take the descriptors of a further REPL. Return its bell."""
    try:
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, HANDED_FD + 1) for fd in fds]  # none has the number of another one
        for copy, number in zip(copies, _PLACES, strict=False):
            os.dup2(copy, number, inheritable=number <= 2)
        bell = mmap.mmap(copies[len(_PLACES)], mmap.PAGESIZE)
        for copy in copies:
            os.close(copy)
    except BaseException:  # noqa: BLE001 - as above
        os._exit(1)
    return bell


def _keep(keeping: int, repl: int) -> NoReturn:
    """Be the keeper of a REPL: report its end, and kill all that it has started when init says so."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        own = fcntl.fcntl(keeping, fcntl.F_DUPFD, 0)
        os.closerange(0, own)
        os.closerange(own + 1, MOST_DESCRIPTORS)
        ended = syscalls.ended_children()
        poll = select.poll()
        poll.register(own, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    if found[0] == repl:
                        os.write(own, REPL_ENDED.pack(found[1]))
            for fd, _ in poll.poll():
                if fd == ended:
                    os.read(ended, 4096)
                elif os.read(own, len(KILL)) != KILL:
                    os._exit(0)
                else:
                    kill_until_alone(_kill_others)
                    os.write(own, KILL)
                    os._exit(0)
    finally:
        os._exit(1)


def _kill_others() -> None:
    """Kill all processes of this domain but this one."""
    with contextlib.suppress(PermissionError):  # all others are outside
        os.kill(-1, signal.SIGKILL)
