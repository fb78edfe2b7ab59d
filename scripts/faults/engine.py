"""Plays each cell in a process of its own, and looks at what that process leaves behind."""

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from rlm_broker.sandbox.workers import private_folder
from scripts.faults import leftovers
from scripts.faults.cell import Cell, Report, Result, judged

DEADLINE_S = 150.0
"""Most seconds of a run. Beyond it the caller counts as hanging, and its processes are killed."""
LONG_DEADLINE_S = 900.0
"""The same for a cell that is not a run, such as the many cuts of a file."""
STOPPED_S = 1.0
"""Seconds for which a stopped process stays stopped."""
REPORT, TEMPORARY, SAID = "report.json", "tmp", "stderr"


def play_all(cells: Iterable[Cell]) -> Iterator[Result]:
    """Play each cell, one after the other."""
    leftovers.adopt_orphans()
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            yield play(cell, Path(folder))


def play(cell: Cell, folder: Path) -> Result:
    """Play one cell in an empty folder."""
    (folder / TEMPORARY).mkdir()
    folder.chmod(0o711)
    (folder / TEMPORARY).chmod(0o711)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _play_here(cell, folder)
    status = _ended(pid, cell)
    report = Report.read(folder / REPORT) or _without_report(cell, status, folder)
    left = leftovers.after_a_while(leftovers.processes)
    _kill_the_rest()
    if cell.dies is not None or cell.leaves_folder:
        left = [*left, *_unswept(folder / TEMPORARY)]
    else:
        left = [*left, *leftovers.folders(folder / TEMPORARY)]
    report.left += [*left, *leftovers.mounts(folder)]
    return judged(cell, report, time.monotonic() - started)


def _play_here(cell: Cell, folder: Path) -> None:
    """Play in the child, leave the report, and exit without the engine's own clean-up."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        tempfile.tempdir = str(folder / TEMPORARY)
        os.environ["TMPDIR"] = tempfile.tempdir
        said = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(said, 2)
        os.close(said)
        cell.scene(folder).write(folder / REPORT)
        code = 0
    except BaseException:  # noqa: BLE001 - the engine says that there is no report, and why
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int, cell: Cell) -> int | None:
    """Wait for the end of the playing process; its wait status, or None if it was killed at the deadline."""
    until = time.monotonic() + (LONG_DEADLINE_S if cell.phase == "-" else DEADLINE_S)
    pidfd = os.pidfd_open(pid)
    try:
        while time.monotonic() < until:
            if select.select([pidfd], [], [], 0.05)[0]:
                return os.waitpid(pid, 0)[1]
            if cell.stops and os.waitpid(pid, os.WUNTRACED | os.WNOHANG) != (0, 0):
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGABRT)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    finally:
        os.close(pidfd)


def _without_report(cell: Cell, status: int | None, folder: Path) -> Report:
    if status is None:
        return Report(told="nothing in time")
    code = os.waitstatus_to_exitcode(status)
    if cell.dies is not None and code == -cell.dies:
        return Report(told=f"the process was ended by {signal.Signals(cell.dies).name}", is_sensible=True)
    said = (folder / SAID).read_text(errors="replace").strip().splitlines() if (folder / SAID).exists() else []
    return Report(told=f"no report, exit code {code}: {said[-1] if said else ''}")


def _kill_the_rest() -> None:
    for process in leftovers.below():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    leftovers.after_a_while(leftovers.processes)
    leftovers.reap()


def _unswept(temporary: Path) -> list[str]:
    """Return what the next start does not remove of a folder that a killed process left."""
    kept, tempfile.tempdir = tempfile.tempdir, str(temporary)
    try:
        private_folder.PrivateFolder().remove()
    finally:
        tempfile.tempdir = kept
    return leftovers.folders(temporary)
