"""Cost of operations, by counts that a busy machine does not change. No clock is read.

A change that makes an operation dearer raises `MOST` on purpose, in a commit of its own. `python -m scripts.bench costs`
says which process costs what, and `--against COMMIT` what another commit costs.
"""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from scripts.bench import costs
from scripts.bench.costs import OPERATIONS, ROLES, counted
from tests.support.launcher import needs_strict

MOST = {
    "spawn": {"frames": 3.2, "bytes": 141},
    "block": {"frames": 2.4, "bytes": 175},
    "query": {"frames": 4.2, "bytes": 235},
    "run": {"frames": 9.5, "bytes": 650},
}
"""Operation → what is counted → most of it at "strict": 5 % above what it takes. The frames of a run's last block may be
missed. A block that is interrupted by another process within its first millisecond sends its output apart."""
MOST_FAULTS = {
    "3.11": {"spawn": 1280, "block": 8, "query": 8, "run": 1710},
    "3.12": {"spawn": 515, "block": 8, "query": 8, "run": 695},
    "3.13": {"spawn": 515, "block": 8, "query": 8, "run": 690},
}
"""Version of CPython → operation → most page faults of all processes. From 3.12 on, inherited objects are immortal. A
block faults only when memory grows."""
MOST_CALLS = {"block": 164, "query": 210, "batch of 100 queries": 210}
"""Operation → most calls of Python functions in the orchestrator, its event loop included, of the cheapest of some: a
block that lasts 5 ms has init told of it."""
MOST_SYSTEM_CALLS = {"block": 24, "query": 32}
"""Operation → most system calls of the REPL. Beneath strace a block is slow, which costs three more."""


@needs_strict
@pytest.mark.parametrize("name", MOST)
async def test_operation_costs_no_more_than_table_says(name: str) -> None:
    most = MOST[name] | {"page faults": MOST_FAULTS[f"3.{sys.version_info.minor}"][name]}
    found = await counted(name, 20)
    took = {"page faults": sum(found[role]["page faults"] for role in ROLES), **found["connection"]}
    assert {what: took[what] for what in most if took[what] > most[what]} == {}


@needs_strict
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="calls are counted for asyncio of CPython 3.11")
@pytest.mark.parametrize("name", MOST_CALLS)
async def test_orchestrator_calls_no_more_functions_than_table_says(name: str) -> None:
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    async with OPERATIONS[name](lambda: None) as once:
        took = []
        for _ in range(20):
            calls = 0
            sys.setprofile(count)
            try:
                await once()
            finally:
                sys.setprofile(None)
            took.append(calls)
    assert min(took) <= MOST_CALLS[name]


@needs_strict
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts system calls")
@pytest.mark.parametrize("name", MOST_SYSTEM_CALLS)
async def test_repl_makes_no_more_system_calls_than_table_says(name: str) -> None:
    command, tree = [sys.executable, "-P", costs.__file__, name], str(Path(costs.__file__).parents[2])
    assert (await asyncio.to_thread(costs._system_calls, command, tree))["REPL"] <= MOST_SYSTEM_CALLS[name]
