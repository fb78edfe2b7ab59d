"""REPLs: how long until one is ready, many at once, with many alive, and what memory each takes."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial

import psutil

from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from scripts.bench.measure import Effort, bare_python, bare_pythons, by_turns, opening_seconds, seconds
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Curve, Row, Side, number, side

ALIVE = (1, 10, 100, 1_000)
BLOCK = "x = 1; print(x)"


def spawn(effort: Effort) -> list[Row]:
    """Time a spawn, from the call to a REPL that is isolated and ready. Its end is not counted."""
    with (
        Sandbox(warm=0) as sandbox,
        Peer("Jupyter", "jupyter_repl.py", "jupyter") as jupyter,
        Peer("rlms IPython", "rlms_repl.py", "rlms") as rlms,
        Peer("sandlock run", "sandlock_run.py", "sandlock") as sandlock,
        Peer("DSPy", "dspy_repl.py", "dspy") as dspy,
        Peer("fork, exit, wait", "bare.py") as bare,
    ):
        opening_seconds(sandbox.repl)
        ours, python, forks, locked = by_turns(
            effort.times(40),
            lambda: opening_seconds(sandbox.repl, 5),
            lambda: seconds(bare_python),
            lambda: bare.samples("fork"),
            lambda: sandlock.samples("spawn"),
        )
        kernel, ipython, wasm = by_turns(
            effort.times(5),
            lambda: jupyter.samples("spawn"),
            lambda: rlms.samples("spawn"),
            lambda: dspy.samples("spawn"),
        )
    taken, floor = side(OURS, "ms", ours), side("python -I", "ms", python)
    return [
        Row(
            f"spawn of a {sandbox.level} REPL, ready to execute",
            taken,
            (
                floor,
                bare.side("ms", forks),
                sandlock.side("ms", locked),
                jupyter.side("ms", kernel),
                rlms.side("ms", ipython),
                dspy.side("ms", wasm),
            ),
            (taken.at_most_times(0.5, floor),),
            _p99(taken),
        )
    ]


def burst(effort: Effort) -> list[Row]:
    """Time many spawns at once, until all REPLs are ready."""

    async def at_once(count: int) -> float:
        async with Sandbox(warm=0) as sandbox, contextlib.AsyncExitStack() as stack:
            started = time.perf_counter()
            await asyncio.gather(*(stack.enter_async_context(sandbox.repl()) for _ in range(count)))
            return time.perf_counter() - started

    def row(count: int, limit_s: float, rounds: int) -> Row:
        ours, pythons = by_turns(
            rounds, lambda: [asyncio.run(at_once(count))], lambda: seconds(lambda: bare_pythons(count))
        )
        taken = side(OURS, "s", ours)
        others = (side("python -I", "s", pythons),)
        return Row(f"{count:,} REPLs asked for at once, all ready", taken, others, (taken.at_most(limit_s),))

    return [row(effort.size(100), 0.25, effort.times(10)), row(effort.size(1_000), 3.0, 2)]


def alive(effort: Effort) -> list[Row | Curve]:
    """Time spawning and a round trip for growing numbers of living REPLs, and measure their memory."""
    counts = sorted({min(count, effort.size(ALIVE[-1])) for count in ALIVE})
    spawns: list[Side] = []
    trips: list[Side] = []
    pythons: list[Side] = []
    free = psutil.virtual_memory().available
    with Sandbox(warm=0) as sandbox, contextlib.ExitStack() as stack:
        repls: list[SandboxedRepl] = []
        for count in counts:
            repls += [stack.enter_context(sandbox.repl()) for _ in range(count - len(repls))]
            used = free - psutil.virtual_memory().available
            shares = sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True))
            step = max(1, count // 100)
            spawned, answered, bare = by_turns(
                effort.times(20),
                lambda: opening_seconds(sandbox.repl, 2),
                partial(_answer_each, repls[::step]),
                lambda: seconds(bare_python),
            )
            spawns.append(side(OURS, "ms", spawned))
            trips.append(side(OURS, "ms", answered))
            pythons.append(side("python -I", "ms", bare))
    memory_taken = side(OURS, "GB", [used])
    return [
        Row(f"spawn with {counts[-1]:,} alive", last := spawns[-1], [pythons[-1]], (last.p99_at_most(15),), _p99(last)),
        Row(
            f"memory of {counts[-1]:,} alive, the kernel's own for them included",
            memory_taken,
            (),
            (memory_taken.at_most(5),),
            f"by how much the machine's available memory fell; the processes' own share (PSS) {shares / 1e9:.2f} GB",
        ),
        Curve("spawn", "live REPLs", "ms", {OURS: _points(counts, spawns), "python -I": _points(counts, pythons)}),
        Curve("round trip", "live REPLs", "ms", {OURS: _points(counts, trips)}),
    ]


def memory(effort: Effort) -> list[Row]:
    """Measure the unique memory of an idle worker's processes."""
    with Sandbox(warm=0) as sandbox, contextlib.ExitStack() as stack:
        for _ in range(effort.times(20)):
            stack.enter_context(sandbox.repl("context"))
        taken = side(OURS, "MB", _unique_bytes())
    others = []
    for peer in (Peer("Jupyter", "jupyter_repl.py", "jupyter"), Peer("rlms IPython", "rlms_repl.py", "rlms")):
        with peer:
            others.append(peer.side("MB", peer.samples("memory")))
    return [Row("memory of an idle REPL (USS, init included)", taken, others, (taken.at_most(2.5),))]


def _unique_bytes() -> Iterator[int]:
    """Yield the unique bytes of each worker: of a REPL and its init."""
    for repl in psutil.Process().children(recursive=True):
        init = repl.parent()
        if init is not None and not repl.children() and init.name() == repl.name():
            yield repl.memory_full_info().uss + init.memory_full_info().uss


def block_seconds(repl: SandboxedRepl) -> float:
    """Return the seconds of a round trip of a trivial block."""
    started = time.perf_counter()
    repl.execute(BLOCK)
    return time.perf_counter() - started


def _answer_each(repls: Sequence[SandboxedRepl]) -> list[float]:
    """Return the seconds of one block in each, none of which was just used."""
    return [block_seconds(repl) for repl in repls]


def _points(counts: Sequence[int], sides: Sequence[Side]) -> list[tuple[float, float]]:
    return [(count, each.median) for count, each in zip(counts, sides, strict=True) if each.median is not None]


def _p99(taken: Side) -> str:
    return f"p99 {number(taken.quantile(0.99), taken.unit)}"
