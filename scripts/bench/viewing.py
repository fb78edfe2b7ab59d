"""The viewer with a large trace: how long the page takes to write, to open and to search, and what it holds."""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlm_broker.watch.viewer.page import write_page
from scripts.bench.measure import Effort
from scripts.bench.row import OURS, Row, Side, side
from scripts.chromium import path_of_chromium, started

EVENTS, EVENT_BYTES = 60_000, 1_680
"""A trace of 100 MB."""
NEEDLE = "quetzalcoatlus"
"""Word that one text in the middle of the trace has."""
FRAMES = """new Promise((done) => {
  const box = document.getElementById("%s");
  const times = [];
  let last = performance.now();
  let step = 0;
  function next() {
    const now = performance.now();
    times.push(now - last);
    last = now;
    if (step === 90) return done(Math.max(...times.slice(5)));
    step += 1;
    box.scrollTop = box.scrollHeight * ((step * 7919) %% 1000) / 1000;
    requestAnimationFrame(next);
  }
  requestAnimationFrame(next);
})"""
"""Longest time between two frames, in milliseconds, while a list goes to 90 places far from each other."""
SEARCH = f"""(() => {{
  const query = document.getElementById("query");
  query.value = {NEEDLE!r};
  query.dispatchEvent(new Event("input"));
}})()"""


def viewing(effort: Effort) -> Sequence[Row]:
    """Write the page of a trace, open it, search it, scroll it."""
    with tempfile.TemporaryDirectory() as folder:
        trace, page = Path(folder, "run.jsonl"), Path(folder, "run.html")
        events = 3_000 if effort.quick else EVENTS
        write_trace(trace, events)
        began = time.perf_counter()
        write_page(trace, page)
        wrote = time.perf_counter() - began
        size = f"{trace.stat().st_size / 1e6:.0f} MB, {events:,} events"
        ours = side(OURS, "s", [wrote])
        note = f"the page has {page.stat().st_size / 1e6:.0f} MB"
        rows = [Row(f"trace of {size}: written as a page", ours, [], [ours.at_most(5)], note)]
        if path_of_chromium() is None:
            return [*rows, Row("the page in Chromium", Side(OURS, "s", [], "there is no Chromium here"))]
        seen = asyncio.run(_seen(page))
    sides: list[tuple[str, str, str, float]] = [
        ("usable", "s", "usable", 1),
        ("heap, all read", "MB", "heap", 50),
        ("search", "s", "search", 3),
        ("worst frame, tree", "ms", "tree", 50),
        ("worst frame, transcript", "ms", "transcript", 50),
    ]
    for what, unit, name, limit in sides:
        measured = side(OURS, unit, [seen[name]])
        rows.append(Row(f"that page in Chromium: {what}", measured, [], [measured.at_most(limit)]))
    return rows


async def _seen(page: Path) -> dict[str, float]:
    """Return seconds, bytes and seconds between frames."""
    async with started() as browser:
        tab = await browser.tab()
        await tab.open(page.as_uri(), 1400, 900)
        await tab.until("document.documentElement?.dataset.ready")
        usable = await tab.run("performance.getEntriesByName('usable')[0].startTime / 1000")
        heap = await tab.heap_bytes()
        frames: Callable[[str], Any] = lambda name: tab.run(FRAMES % name)  # noqa: E731
        tree, transcript = await frames("tree") / 1000, await frames("transcript") / 1000
        began = time.perf_counter()
        await tab.run(SEARCH)
        await tab.until(f"document.documentElement.dataset.searched === {NEEDLE!r}")
        searched = time.perf_counter() - began
        assert "1 text" in await tab.run("document.getElementById('found-facts').textContent")
        return {"usable": usable, "heap": heap, "search": searched, "tree": tree, "transcript": transcript}


def write_trace(path: Path, events: int) -> None:
    """Write a trace of runs with blocks of 200 calls each. Texts are of words, which compress as prose does."""
    chance = random.Random(18)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(2, 9))) for _ in range(6_000)]
    weights = [1 / (place + 8) for place in range(6_000)]
    much = " ".join(chance.choices(words, weights, k=1_000_000))
    with path.open("w") as file:
        number, call, block = 0, 0, 0

        def write(event: str, **fields: Any) -> None:
            nonlocal number
            number += 1
            line = {"n": number, "time": 1.7e9 + number / 100, "event": event, "run": "1", "depth": 0, "tree": "t"}
            file.write(json.dumps({**line, **fields}) + "\n")

        def prose(size: int) -> str:
            start = chance.randrange(len(much) - size)
            return much[start : start + size]

        write("run_started", question="Which of these?", model="large", metadata={})
        while number < events - 2:
            block += 1
            write("iteration_started", number=block)
            write("block_started", iteration=block, block=block, code="answers = llm_query_batched(prompts)\n" * 4)
            for each in range(200):
                call += 1
                prompt = prose(2 * EVENT_BYTES - 1_260) + (f" {NEEDLE}" if call == events // 5 else "")
                of = {"call": call, "block": block, "batch": block, "of": 200}
                write("call_started", requested_model=None, prompt=prompt, system=None, **of)
                if number >= events - 3:
                    break
                usage = {"total_calls": 1, "total_input_tokens": 900, "total_output_tokens": 90, "total_cost": 0.001}
                write(
                    "call_ended", model="small", usage=usage, duration_s=1.5, response=prose(800), done=each + 1, **of
                )
            write("block_ended", block=block, outcome={"code": "", "status": "ok", "stdout": prose(400)})
        write("run_ended", response="These.", error=None, iterations=block, duration_s=600, usage={})
