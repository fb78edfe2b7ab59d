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
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sandbox_worker.init.child import Confinement
from sandbox_worker.init.main import Init, worker_bounds
from sandbox_worker.init.output_pipes import ReplOutput
from sandbox_worker.init.procfs import Proc
from sandbox_worker.init.repl_process import ReplProcess
from sandbox_worker.init.sockets import Events, Hands, InitSocket
from sandbox_worker.init.usage_watch import Watch
from sandbox_worker.isolation import landlock, rlimits, syscalls
from sandbox_worker.isolation.landlock import Grant
from sandbox_worker.isolation.layer import ZygoteLayers
from sandbox_worker.loading.context import Preloaded, load
from sandbox_worker.loading.form import SEALS, ContextForm, span_bytes
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import Begin, Control, Drain, Load, Spawn, pack
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Execute, encode

TIMES = 10
"""Number of rounds. CPython specialises the bytecode of a function from its eighth call on."""
ENOUGH = 1 << 16
"""Value of every bound: more than the warm-up uses."""
BLOCK = "x = len(context)\nprint(x)\nFINAL(str(x))"
SPAWN = Spawn(
    allow_exec=False,
    scratch="/",
    bounds=ReplBounds(
        max_output_bytes=ENOUGH,
        memory_bytes=1 << 40,
        max_processes=ENOUGH,
        max_open_files=ENOUGH,
        scratch_bytes=ENOUGH,
        max_scratch_files=ENOUGH,
        cpu_s=None,
        max_frame_bytes=ENOUGH,
    ),
)
SAID_TO_INIT: tuple[Control, ...] = (Load(None), Begin(cpu_s=1.0), Drain())


def rehearse(shared: ZygoteLayers) -> None:
    """Run the code of init and REPL `TIMES` times, and restore the state of the process.

    SIGINT keeps the REPL's handler. Further effects are caches inside of CPython alone.

    Args:
        shared: Layers of the workers.
    """
    sys._clear_type_cache()  # of names that only imports have looked up: a worker would count references to them
    proc = Proc()
    with _everything_put_back():
        for _ in range(TIMES):
            _load_context()
            with mmap.mmap(-1, mmap.PAGESIZE) as bell:
                _live(shared, proc, bell)
            if shared.landlock_abi:
                os.close(landlock.make_ruleset([Grant("/", landlock.READ)], shared.landlock_abi))
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


def _live(shared: ZygoteLayers, proc: Proc, bell: mmap.mmap) -> None:
    """Be init, and be the REPL that it would fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = syscalls.ended_children()
    confinement = Confinement(shared, worker_bounds(SPAWN), None, proc, has_group=False)
    preloaded, hands = Preloaded(contexts={"context": ""}), Hands()
    with ours, theirs:
        init = Init(theirs, bell, ended, SPAWN, confinement, ["seccomp"], True, preloaded, hands)
        for message in SAID_TO_INIT:
            ours.send(pack(message))
            init.take_turn()
        events = Events()
        control = InitSocket(ours, events, list)
        output = ReplOutput(events, SPAWN.bounds, control.say, bell)
        for fd in output.open():
            os.close(fd)
        output.regulate(control.is_clear)
        output.drain()
        output.close()
        watch = Watch(proc, ENOUGH, ENOUGH, lambda: proc.others()[:1])  # the host may have thousands
        watch.repl_started(proc.own_pid, 0)
        watch.block_started()
        watch.look()
        _be_repl(ReplProcess(confinement, control, output, bell, hands, preloaded, True))
    os.close(ended)


def _be_repl(process: ReplProcess) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        syscalls.unblock_child_signals()
        rlimits.forbid_core_dumps()
        rlimits.set_hard(resource.RLIMIT_CORE, 1)
        interrupts = Interrupts()
        interrupts.install()
        repl = process.repl_on(theirs, interrupts)
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
