"""Warm-up: the fork server runs the code of a worker's life before the first fork, without layers and processes.

CPython makes much of its state on first use: the type cache of attributes, and specialised bytecode (PEP 659). In a
forked process each of these writes copies a page. The fork server makes them once, and all workers inherit them.
Without the warm-up, a spawn takes a sixth longer, and an idle worker has a fifth more memory.
"""

import fcntl
import gc
import linecache
import mmap
import os
import resource
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sandbox_worker.init.output_pipes import ReplOutput
from sandbox_worker.init.procfs import Proc
from sandbox_worker.init.sockets import InitSocket
from sandbox_worker.init.usage_watch import Watch
from sandbox_worker.isolation import landlock, rlimits, syscalls
from sandbox_worker.isolation.landlock import Grant
from sandbox_worker.loading.context import load
from sandbox_worker.loading.form import SEALS, ContextForm, span_bytes
from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.repl import Repl
from sandbox_worker.wire.bounds import OutputBounds
from sandbox_worker.wire.control import Begin, Control, Loaded, Start, Started, Stop, pack, unpack_to_init
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Execute, encode

TIMES = 10
"""Number of rounds. CPython specialises the bytecode of a function from its eighth call on."""
ENOUGH = 1 << 16
"""Value of every bound: more than the warm-up uses."""
PRINTED = OutputBounds(max_output_bytes=ENOUGH)
BLOCK = "x = len(context)\nprint(x)\nFINAL(str(x))"
SAID_BY_INIT: tuple[Control, ...] = (Loaded(layers=["seccomp"]), Started(layers=["seccomp"]))
SAID_TO_INIT: tuple[Control, ...] = (Start(), Begin(cpu_s=1.0), Stop())


def rehearse(landlock_abi: int) -> None:
    """Run the code of init and REPL `TIMES` times, and restore the state of the process.

    SIGINT keeps the REPL's handler. Further effects are caches inside of CPython alone.

    Args:
        landlock_abi: Version of Landlock's interface in this kernel, or 0.
    """
    proc = Proc()
    with _everything_put_back():
        for _ in range(TIMES):
            _load_context()
            with mmap.mmap(-1, mmap.PAGESIZE) as bell:
                _be_init(proc, bell)
                _be_repl(bell)
            if landlock_abi:
                os.close(landlock.make_ruleset([Grant("/", landlock.READ)], landlock_abi))
    proc.close()
    gc.collect()  # a Repl is part of reference cycles, and holds descriptors until it is collected


def _load_context() -> None:
    with (
        suppress(OSError),  # memfd_create fails if the administrator has set vm.memfd_noexec=2
        open(os.memfd_create("context", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", buffering=0) as memfd,
    ):
        memfd.write(bytes(span_bytes(0, 1)))
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
        load(memfd.fileno(), ContextForm("text", 0, ascii=True), mapping_works=True)


def _be_init(proc: Proc, bell: mmap.mmap) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        poll = select.poll()
        control = InitSocket(theirs, poll)
        output = ReplOutput(poll, PRINTED, control.say, bell)
        watch = Watch(proc, ENOUGH, ENOUGH, lambda: proc.others()[:1])  # the host may have thousands
        for message in SAID_BY_INIT:
            control.say(message)
        for message in SAID_TO_INIT:
            socket.send_fds(ours, [pack(message)], [ours.fileno()])
            packet, fds = control.hear()
            unpack_to_init(packet)
            os.close(fds[0])
        for fd in output.open():
            os.close(fd)
        watch.repl_started(proc.own_pid, 0)
        output.begin_block()
        output.regulate(control.is_clear)
        watch.block_started()
        watch.look()
        output.drain()
        output.close()


def _be_repl(bell: mmap.mmap) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        syscalls.unblock_child_signals()
        rlimits.forbid_core_dumps()
        rlimits.set_hard(resource.RLIMIT_CORE, 1)
        interrupts = Interrupts()
        interrupts.install()
        reserve = Reserve()
        channel = Channel(theirs, ENOUGH, interrupts, reserve)
        repl = Repl({"context": ""}, channel, interrupts, reserve, PRINTED, bell)
        repl.say_ready()
        ours.sendall(encode_frame(encode(Execute(block=1, code=BLOCK, tells_variables=True)), ENOUGH))
        repl.run_next()


@contextmanager
def _everything_put_back() -> Iterator[None]:
    """Restore the interpreter's streams and main module afterwards, which a REPL replaces."""
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    main = sys.modules["__main__"]
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        sys.modules["__main__"] = main
        linecache.clearcache()
