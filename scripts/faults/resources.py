"""Faults of the machine: descriptors, memory, disk, threads, forks, connections, clocks, and a loop that is blocked."""

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rlm_broker import Models
from rlm_broker.concurrency.event_loop import EventLoopRef
from scripts.faults import processes
from scripts.faults.cell import IDLE
from scripts.faults.stage import NOTHING_ASKED, Stage, Strike

SPARE_DESCRIPTORS = 64
"""Descriptors that are left to the process, and then taken."""
SPARE_BYTES = 1 << 20
"""Memory that the orchestrator may still map."""
BLOCKED_S = 3.0
"""Time in seconds that the loop is blocked: more than a block may run and be interrupted."""
YEAR_S = 366 * 86_400.0
_CLONE_NEWNS = 0x00020000  # include/uapi/linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18  # include/uapi/linux/mount.h
NEEDS_ROOT = "" if os.geteuid() == 0 else "it needs root, to mount a small file system"


def _why_no_user() -> str:
    if os.geteuid() != 0:
        return "it needs root, to become an ordinary user"
    places = [Path(sys.base_prefix).resolve(), Path(__file__).resolve()]
    for place in (each for path in places for each in (path, *path.parents)):
        if not place.stat().st_mode & 0o001 and place.is_dir():
            return f"an ordinary user cannot enter {place}, where Python or this project is"
    return ""


NEEDS_A_USER = _why_no_user()


def no_descriptor(_stage: Stage) -> Callable[[], None]:
    """Take every descriptor that the process may have (EMFILE)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    lowered = highest + SPARE_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, before[1]))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))

    def undo() -> None:
        for fd in taken:
            os.close(fd)
        taken.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    return undo


def no_memory(_stage: Stage) -> Callable[[], None]:
    """Let the orchestrator map almost no more memory (ENOMEM)."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, before)


def put(place: Any, name: str, value: object) -> Callable[[], None]:
    """Replace what a name means; what is returned puts it back."""
    before = getattr(place, name)
    setattr(place, name, value)
    return lambda: setattr(place, name, before)


def no_thread(_stage: Stage) -> Callable[[], None]:
    """Have each start of a thread fail, as it does where a limit of processes is reached."""

    def refused(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    return put(threading.Thread, "start", refused)


def no_process(stage: Stage) -> None:
    """Have the start of a fork server fail (EAGAIN), until the run has ended."""

    def refused(*_args: Any, **_options: Any) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    stage.undone.append(put(subprocess, "Popen", refused))


def no_fork(_stage: Stage) -> Callable[[], None]:
    """Have the fork server's forks fail (EAGAIN). The limit binds ordinary users alone."""
    met = processes.fork_servers()
    before = [each.rlimit(resource.RLIMIT_NPROC) for each in met]
    for each, (_, hard) in zip(met, before, strict=True):
        each.rlimit(resource.RLIMIT_NPROC, (0, hard))

    def undo() -> None:
        for each, limits in zip(met, before, strict=True):
            with contextlib.suppress(Exception):
                each.rlimit(resource.RLIMIT_NPROC, limits)

    return undo


def become_ordinary(stage: Stage, code: str) -> None:
    """Go on as a user without rights, with this block at the phase."""
    stage.code = code
    nobody = 65_534
    os.chown(stage.folder, nobody, nobody)
    for path in stage.folder.iterdir():
        os.chown(path, nobody, nobody)
    os.environ["HOME"] = str(stage.folder)
    os.setgroups([])
    os.setresgid(nobody, nobody, nobody)
    os.setresuid(nobody, nobody, nobody)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self would be root's


def small_disk(folder: Path) -> Path:
    """A file system of 64 files and 256 KiB, in a mount namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = folder / "small"
    place.mkdir()
    _require(libc.unshare(_CLONE_NEWNS), "unshare")
    _require(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    _require(libc.mount(b"none", str(place).encode(), b"tmpfs", 0, b"size=256k,nr_inodes=64,mode=711"), "mount")
    return place


def fill(place: Path) -> Callable[[], None]:
    """Use up the bytes and the files of a small file system (ENOSPC)."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        made.append(place / "filler")
        made[0].write_bytes(bytes(1 << 19))
    with contextlib.suppress(OSError):
        for number in range(100):
            made.append(place / f"filler-{number}")
            made[-1].touch()

    def undo() -> None:
        for path in made:
            path.unlink(missing_ok=True)

    return undo


def full_disk(stage: Stage) -> Callable[[], None]:
    """Fill the small file system of the stage."""
    return fill(stage.folder / "small")


def trace_on_small_disk(stage: Stage) -> None:
    """Have the trace written to a small file system."""
    stage.trace_path = small_disk(stage.folder) / "trace.jsonl"


def recording_on_small_disk(stage: Stage) -> None:
    """Have the recording written to a small file system; what is warned of is told."""
    stage.options["models"] = Models(record=small_disk(stage.folder) / "recording.jsonl")
    if stage.phase == IDLE:  # a reply that does not fit into what the file's last page has left
        stage.code = f"{NOTHING_ASKED}  # {'x' * 4096}"
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_args, **_options: stage.said.append(str(message))


def cache_on_small_disk(stage: Stage) -> None:
    """Have replies kept on a small file system."""
    stage.options["models"] = Models(cache=small_disk(stage.folder) / "cache.sqlite")
    stage.model.fingerprint = "script"


def temporary_on_small_disk(stage: Stage) -> None:
    """Have the temporary folder on a small file system, full from the beginning."""
    place = small_disk(stage.folder)
    stage.undone += [fill(place), put(tempfile, "tempdir", str(place))]


def trace_to_pipe(stage: Stage) -> None:
    """Have the trace written to a pipe, which is read until the fault comes."""
    stage.trace_path = stage.folder / "pipe"
    os.mkfifo(stage.trace_path)
    reader = os.open(stage.trace_path, os.O_RDONLY | os.O_NONBLOCK)
    stage.kept["reader"] = reader


def close_the_pipe(stage: Stage) -> None:
    """Stop reading the trace (EPIPE)."""
    os.close(stage.kept["reader"])


def cut_connections(_stage: Stage) -> None:
    """Shut down each TCP connection of this process, as a reset of the peer's does."""
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(fd.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as copy:
                if copy.family == socket.AF_INET and copy.getpeername():
                    copy.shutdown(socket.SHUT_RDWR)


def clock_jumps(by_s: float) -> Strike:
    """Set the wall clock, as this process sees it, forward or back."""
    real = time.time
    return lambda _stage: put(time, "time", lambda: real() + by_s)


def block_the_loop(stage: Stage) -> None:
    """Keep the event loop from everything else."""
    done = threading.Event()

    def blocked() -> None:
        time.sleep(BLOCKED_S)
        done.set()

    EventLoopRef.background()._loop.call_soon_threadsafe(blocked)
    stage.released.set()
    done.wait()


def _require(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"cannot {what}: {os.strerror(ctypes.get_errno())}")
