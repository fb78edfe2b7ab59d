"""Whole runs, and the commands that start them."""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil

from rlm_broker import BlockEnded, Trace
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.rlm import RLM
from scripts import make_log
from scripts.bench.measure import Effort, Model, by_turns, many, seconds
from scripts.bench.row import OURS, Row, Side, side

AT_ONCE = 64
CORES = 2
LOG_BYTES = 50_000_000
LARGE_LOG_BYTES = 1_000_000_000
TURNS = ("x = len(context)\nprint(x)", "y = x * 2\nprint(y)", "FINAL(str(y))")


def next_turn(request: LMRequest) -> str:
    """Write the next of three blocks, by how often the model has spoken in the conversation."""
    spoken = sum(message.role == "assistant" for message in request.messages)
    return f"```repl\n{TURNS[spoken]}\n```"


async def run_of_three_turns(rlm: RLM) -> None:
    """Run a model that takes `next_turn`."""
    completion = await rlm.acompletion("some context", "how long is it twice?")
    assert completion.response == "24", completion.response


def many_runs(effort: Effort) -> list[Row]:
    """Ten times 1,000 runs with REPLs of their own, in one process, and what it holds after each thousand."""
    each = effort.size(1_000)
    rates: list[float] = []
    bare: list[float] = []
    held: list[float] = []

    async def measure() -> None:
        async with RLM(Model(next_turn)) as rlm:
            for _ in range(effort.times(10)):
                rates.append(await many(each, AT_ONCE, lambda: run_of_three_turns(rlm)))
                held.append(held_bytes())
                bare.append(await asyncio.to_thread(_bare_runs, min(each, 100)))

    asyncio.run(measure())
    rate, floor = side(OURS, "/s", rates), side(f"python -I for each, {CORES} at a time", "/s", bare)
    growth = Side(OURS, "MB", [(held[-1] - held[min(1, len(held) - 2)]) / 1e6])
    total = each * len(held)
    return [
        Row(
            f"{each:,} runs of three turns, no-op client, {AT_ONCE} at a time",
            rate,
            [floor],
            [rate.at_least_times(1.5, floor)],
        ),
        Row(
            f"growth of memory up to {total:,} runs (USS of the process and its fork server)",
            growth,
            (),
            [growth.at_most(5)],
            "from the 2nd batch to the last; " + ", ".join(f"{each / 1e6:.0f}" for each in held) + " MB",
        ),
    ]


def answer(effort: Effort) -> list[Row]:
    """The whole command that asks the stand-in model about a log, from its start to its exit."""
    question, fact = make_log.FACTS[0]
    with tempfile.TemporaryDirectory() as folder:
        log, trace = Path(folder) / "server.log", Path(folder) / "trace.jsonl"
        make_log.write(log, effort.size(LOG_BYTES), seed=7)
        ask = ("-m", "rlm_broker", "ask", "-q", question, str(log))
        found = fact in _python(*ask)
        ours, floor = by_turns(
            effort.times(5),
            lambda: seconds(lambda: _python(*ask)),
            lambda: seconds(lambda: _python("-c", f"open({str(log)!r}).read().find({fact!r})")),
        )
        make_log.write(log, effort.size(LARGE_LOG_BYTES), seed=7)
        searches: list[float] = []

        def without_search() -> None:
            trace.unlink(missing_ok=True)
            _python(*ask, "--trace", str(trace))
            blocks = (event.outcome for event in Trace(trace) if isinstance(event, BlockEnded))
            searches.append(sum(block.execution_time for block in blocks))

        whole, once = by_turns(
            effort.times(3),
            lambda: seconds(without_search),
            lambda: seconds(lambda: _python("-c", f"open({str(log)!r}, 'rb').read()")),
        )
    taken = side(OURS, "s", ours)
    others = [side("a python that reads it and finds the fact", "s", floor)]
    what = f"offline answer over {effort.size(LOG_BYTES) // 1_000_000} MB, the whole command"
    way = side(OURS, "s", [total - search for total, search in zip(whole, searches, strict=True)])
    read = side("a python that reads it once", "s", once)
    large = f"first answer over {effort.size(LARGE_LOG_BYTES) // 1_000_000:,} MB, less the time of the model's blocks"
    note = f"the whole command {statistics.median(whole):.2f} s, of it {statistics.median(searches):.2f} s in blocks"
    return [
        Row(what, taken, others, [taken.at_most(5)], "found" if found else "NOT FOUND"),
        Row(large, way, [read], [way.at_most_times(1.5, read)], note),
    ]


def starting(effort: Effort) -> list[Row]:
    """Time the start of programs and commands, before any work."""
    codes = ("import rlm_broker", "from rlm_broker import RLM", "from rlm_broker import Sandbox")
    commands = (("-c", "pass"), *(("-c", code) for code in codes), ("-m", "rlm_broker", "--help"))
    bare, *ours = by_turns(effort.times(15), *(partial(seconds, partial(_python, *each)) for each in commands))
    (litellm,) = by_turns(effort.times(3), lambda: seconds(lambda: _python("-c", "import litellm")))
    others = (side("python -c pass", "ms", bare), side("import litellm", "ms", litellm))
    wanted = zip((*(f"`{code}`" for code in codes), "`rlm-broker --help`"), ours, (100, 120, 80, 250), strict=True)
    sides = [(what, side(OURS, "ms", samples), limit) for what, samples, limit in wanted]
    return [Row(what, taken, others, [taken.at_most(limit)]) for what, taken, limit in sides]


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def _bare_runs(count: int) -> float:
    code = "context = 'some context'\n" + "\n".join(TURNS).replace("FINAL", "print")
    with ThreadPoolExecutor(CORES) as pool:
        started = time.perf_counter()
        list(pool.map(lambda _: _python("-I", "-c", code), range(count)))
        return count / (time.perf_counter() - started)


def held_bytes() -> float:
    """Return the memory that this process and all below it hold alone."""
    held = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # the last runs' REPLs are on their way out
            held += process.memory_full_info().uss
    return float(held)
