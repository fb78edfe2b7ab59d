"""A real worker's attempts at forbidden operations, before any model code may run behind the same layers.

Each layer reports that it was applied, which does not prove that it holds. If one of the attempts succeeds, the level
is refused on this machine.
"""

import msgspec

from rlm_broker.errors import IsolationUnavailable
from sandbox_worker.wire.descriptors import CONNECTION_FD as FD
from sandbox_worker.wire.level import Level

ATTEMPTS = {
    "read the host's list of users": "open('/etc/passwd')",
    "list the machine's devices": "os.listdir('/sys')",
    "change the Python installation": "open(os.__file__, 'a')",
    "read its init's environment": "open(f'/proc/{os.getppid()}/environ')",
    "read its init's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "trace its init": "libc.ptrace(16, os.getppid(), 0, 0)",  # PTRACE_ATTACH
    "kill its init": "os.kill(os.getppid(), 9); assert os.getppid() != init",
    "become root": "os.setuid(0)",
    "make a namespace": "libc.unshare(0x10000000)",  # CLONE_NEWUSER
    "mount a file system": "libc.mount(b'none', b'.', b'tmpfs', 0, 0)",
    "open a socket": "socket.socket()",
    "listen on its connection": f"socket.socket(fileno=os.dup({FD})).listen()",
    "aim its connection elsewhere": f"socket.socket(fileno=os.dup({FD})).connect(('127.0.0.1', 9))",
    "open a connection by sending": f"socket.socket(fileno=os.dup({FD})).sendto(b'', 1 << 29, ('127.0.0.1', 9))",
    "use io_uring": "libc.syscall(425, 1, bytes(120))",  # io_uring_setup, on every architecture
    "take memory that no limit sees": "os.memfd_create('unseen')",
}
"""Forbidden operation → code for it, which must raise, and is harmless if it does not."""

PROGRAM = f"""
import ctypes, os, socket
library = ctypes.CDLL(None, use_errno=True)
class libc:
    def __getattr__(self, name):
        def call(*arguments):
            if getattr(library, name)(*arguments) < 0:
                raise OSError(ctypes.get_errno(), name)
        return call
libc, init, held = libc(), os.getppid(), {{}}
for name, code in {ATTEMPTS!r}.items():
    try:
        exec(code)
        held[name] = False
    except Exception:
        held[name] = True
FINAL(held)
"""

_decoder = msgspec.json.Decoder(dict[str, bool])


def verdict(level: Level, answer: str | None) -> dict[str, bool]:
    """Return each of `ATTEMPTS`, and whether it was prevented, from the canary's JSON.

    Raises:
        IsolationUnavailable: The canary did not report on all attempts, so the level is not proved.
    """
    try:
        held = _decoder.decode(answer or "")
    except msgspec.MsgspecError:
        held = {}
    if held.keys() != ATTEMPTS.keys():
        raise IsolationUnavailable(
            f"isolation level {level.name!r} cannot be checked here: its first worker did not report"
        )
    return held


def require_held(level: Level, held: dict[str, bool]) -> None:
    """Raise IsolationUnavailable if an attempt succeeded."""
    through = [name for name, was_held in held.items() if not was_held]
    if through:
        raise IsolationUnavailable(
            f"isolation level {level.name!r} does not hold here: a worker could {', '.join(through)}. Please report "
            "this; `rlm-broker doctor` shows every layer"
        )
