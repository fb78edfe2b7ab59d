"""Batches: many items with flat memory, and a further call of a batch whose items are finished."""

import asyncio
import contextlib
import json
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.journal import journal_of, key_of
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from scripts.bench.measure import Effort, Model, many, seconds
from scripts.bench.row import OURS, Row, Side, side
from scripts.bench.runs import AT_ONCE, held_bytes, next_turn, run_of_three_turns

ITEMS, MANY = 5_000, 100_000
SAMPLES = 10


def items(effort: Effort) -> list[Row]:
    """Some thousand items through a batch that writes a file and a journal."""
    return _items(effort.size(ITEMS))


def many_items(effort: Effort) -> list[Row]:
    """A hundred thousand of them: a quarter of an hour."""
    return _items(effort.size(MANY))


def _items(count: int) -> list[Row]:
    return asyncio.run(_through(count))


async def _through(count: int) -> list[Row]:
    """Compare a batch with the same runs before and after it, and sample what the process holds."""
    held, bare, rates, step = list[float](), list[float](), list[float](), max(1, count // SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        async with RLM(Model(next_turn)) as rlm:
            await many(min(step, 2 * AT_ONCE), AT_ONCE, lambda: run_of_three_turns(rlm))
            bare.append(await many(step, AT_ONCE, lambda: run_of_three_turns(rlm)))
            out = Path(folder) / "out.jsonl"
            started, done = time.perf_counter(), 0
            async for result in rlm.batch(_made(count), max_concurrent=AT_ONCE, out=out):
                assert result.answer == "24", result
                done += 1
                if done % step == 0:
                    rates.append(step / (time.perf_counter() - started))
                    held.append(held_bytes())
                    started = time.perf_counter()  # the look at all processes is no part of the batch
            bare.append(await many(step, AT_ONCE, lambda: run_of_three_turns(rlm)))
    rate, plain = side(OURS, "/s", rates), side("the same runs without a batch", "/s", bare)
    growth = Side(OURS, "MB", [(held[-1] - held[min(1, len(held) - 2)]) / 1e6])
    return [
        Row(f"{count:,} items through a batch, {AT_ONCE} at a time", rate, [plain], [rate.at_least_times(0.9, plain)]),
        Row(
            f"growth of memory over {count:,} items of a batch",
            growth,
            (),
            [growth.at_most(5)],
            f"from the first {step * 2:,} to the last; " + ", ".join(f"{each / 1e6:.0f}" for each in held) + " MB",
        ),
    ]


def _made(count: int) -> Iterator[BatchItem]:
    for number in range(count):
        yield BatchItem(str(number), "some context", "how long is it twice?")


def resumed(effort: Effort) -> list[Row]:
    """Give the command of a batch again whose items are finished."""
    return asyncio.run(_resumed(effort.size(MANY)))


def _finish(out: Path, count: int) -> None:
    """Write down results of further items, as those of the first."""
    line = out.read_text()
    with out.open("a") as file:
        file.writelines(line.replace('"id":"0"', f'"id":"{number}"', 1) for number in range(1, count))
    with contextlib.closing(sqlite3.connect(journal_of(out))) as database, database:
        ((made_of, status),) = database.execute("SELECT made_of, status FROM items")
        rows = ((key_of(str(number)), made_of, status, None) for number in range(1, count))
        database.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
        database.execute("UPDATE header SET value = ? WHERE name = 'synced'", (str(out.stat().st_size).encode(),))


async def _resumed(count: int) -> list[Row]:
    """Finish a few items, write down as many results as if all were finished, and time the next call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        async with RLM(Model(next_turn), sandbox=Sandbox(seed=7)) as rlm:
            async for _ in rlm.batch(_made(1), out=out):
                pass
            _finish(out, count)
            started = time.perf_counter()
            batch = rlm.batch(_made(count), max_concurrent=AT_ONCE, out=out)
            async for result in batch:
                raise AssertionError(f"{result.id} ran again")
            taken = side(OURS, "s", [time.perf_counter() - started])
            assert batch.progress.skipped == count, batch.progress
            read = side("reading the lines as JSON", "s", seconds(lambda: _read(out)))
    return [Row(f"resuming a batch of {count:,} finished items", taken, [read], [taken.at_most(5)])]


def _read(out: Path) -> None:
    with out.open() as file:
        for line in file:
            json.loads(line)
