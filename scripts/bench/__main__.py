"""Measures what the README promises, next to a bare floor in the same run, and prints one table.

    .venv/bin/python -m scripts.bench                  # everything, about a minute
    .venv/bin/python -m scripts.bench spawn memory

Figures of a shared machine wander: compare the ratios, and run it twice.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from scripts import make_log
from scripts.bench import load

BLOCK = "x = 1; print(x)"
LOG_BYTES = 50_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` and `floor` are in the same unit.

    Attributes:
        floor_is: What the floor is.
    """

    what: str
    target: str
    value: float
    unit: str
    floor: float
    floor_is: str
    note: str = ""


def seconds(work: Callable[[], object], times: int) -> list[float]:
    """How long each of `times` runs of `work` took, in seconds."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def spawn() -> Row:
    """From the call to a REPL that is behind its walls and says ready, and its end not counted."""
    taken = []
    with Sandbox() as sandbox:
        for _ in range(110):
            started = time.perf_counter()
            with sandbox.repl("context"):
                taken.append(time.perf_counter() - started)
    return Row(
        "spawn of a strict REPL",
        "10 ms",
        statistics.median(taken[10:]) * 1e3,
        "ms",
        statistics.median(seconds(_fork, 200)) * 1e3,
        "fork, exit, wait",
        f"p95 {_p95(taken[10:]) * 1e3:.1f} ms",
    )


def round_trip() -> Row:
    """One block through the synchronous API, from the call to its result."""
    with Sandbox() as sandbox, sandbox.repl() as repl:
        seconds(lambda: repl.execute(BLOCK), 300)
        taken = seconds(lambda: repl.execute(BLOCK), 2_000)
    return Row(
        f"round trip of `{BLOCK}`",
        "0.5 ms",
        statistics.median(taken) * 1e3,
        "ms",
        statistics.median(_echo(2_000)) * 1e3,
        "100 bytes to a forked echo and back",
        f"p95 {_p95(taken) * 1e3:.2f} ms",
    )


def answer() -> Row:
    """The whole command, from its start to its exit."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        make_log.write(log, LOG_BYTES, seed=7)
        question, fact = make_log.FACTS[0]
        ask = [sys.executable, "-m", "rlm_broker", "ask", "-q", question, str(log)]
        found = fact in subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        taken = seconds(lambda: subprocess.run(ask, capture_output=True, check=True), 5)
        read = f"open({str(log)!r}).read().find({fact!r})"
        floor = seconds(lambda: subprocess.run([sys.executable, "-I", "-c", read], check=True), 5)
    return Row(
        "offline answer over 50 MB",
        "5 s",
        statistics.median(taken),
        "s",
        statistics.median(floor),
        "python that reads the file and finds the fact",
        "found" if found else "NOT FOUND",
    )


def memory() -> Row:
    """Unique memory of an idle worker's two processes, the median of 20."""
    with Sandbox() as sandbox, contextlib.ExitStack() as open_repls:
        for _ in range(20):
            open_repls.enter_context(sandbox.repl("context"))
        descendants = psutil.Process().children(recursive=True)
        workers = [(repl, repl.parent()) for repl in descendants if not repl.children()]
        uss = [sum(process.memory_full_info().uss for process in worker if process) for worker in workers]
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as bare:
        assert bare.stdout is not None
        bare.stdout.readline()
        floor = psutil.Process(bare.pid).memory_full_info().uss
    return Row(
        "USS of an idle worker, its init included",
        "6 MB",
        statistics.median(uss) / 1e6,
        "MB",
        floor / 1e6,
        "a bare python -I -S",
    )


def kill() -> Row:
    """From the order to the news that a REPL and its 100 hostile descendants are gone, the median of 20."""
    code = (
        "import os, signal\n"
        "for n in range(1, 64):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "for _ in range(100):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        while True: signal.pause()"
    )

    async def measure() -> list[float]:
        taken = []
        async with Sandbox(Limits(max_processes=128)) as sandbox:
            for _ in range(20):
                async with sandbox.repl() as repl:
                    await repl.aexecute(code)
                    started = time.perf_counter()
                taken.append(time.perf_counter() - started)
        return taken

    def bare() -> float:
        pids = []
        for _ in range(100):
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.pause()
        started = time.perf_counter()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        return time.perf_counter() - started

    taken = asyncio.run(measure())
    return Row(
        "kill with 100 descendants, to all gone",
        "50 ms",
        statistics.median(taken) * 1e3,
        "ms",
        statistics.median(bare() for _ in range(20)) * 1e3,
        "kill and wait for 100 forks",
        f"p95 {_p95(taken) * 1e3:.0f} ms",
    )


def requests() -> Row:
    """Queries of many sessions at once, each waiting for its reply before the next, to a client that does nothing."""
    floor = load.echo_rate()
    rate = load.handler_rate()
    return Row(
        f"handler, {load.SESSIONS} sessions, no-op client",
        "10000 /s",
        rate,
        "/s",
        floor,
        "the same frames to a bare asyncio echo",
        f"{load.REQUESTS:,} requests",
    )


MEASUREMENTS = {
    "spawn": spawn,
    "round_trip": round_trip,
    "answer": answer,
    "memory": memory,
    "kill": kill,
    "requests": requests,
}


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description="Measure, and print one table.")
    parser.add_argument("what", nargs="*", choices=[[], *MEASUREMENTS], help=f"of {', '.join(MEASUREMENTS)}")
    table = Table("what", "target", "measured", "floor", "ratio", "the floor is", "note")
    for name in parser.parse_args().what or MEASUREMENTS:
        row = MEASUREMENTS[name]()
        table.add_row(
            row.what,
            row.target,
            f"{row.value:,.3g} {row.unit}" if row.value < 1000 else f"{row.value:,.0f} {row.unit}",
            f"{row.floor:,.3g} {row.unit}" if row.floor < 1000 else f"{row.floor:,.0f} {row.unit}",
            f"{row.value / row.floor:.2g}",
            row.floor_is,
            row.note,
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _p95(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=20)[-1]


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _echo(times: int) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        pid = os.fork()
        if pid == 0:
            theirs, _ = server.accept()
            ours.close()
            while data := theirs.recv(4096):
                theirs.sendall(data)
            os._exit(0)

        def once() -> None:
            ours.sendall(b"x" * 100)
            ours.recv(4096)

        taken = seconds(once, times)
    os.waitpid(pid, 0)
    return taken


if __name__ == "__main__":
    main()
