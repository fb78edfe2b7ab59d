"""Cost of operations, by counts that a busy machine does not change. No clock is read.

A change that makes an operation dearer raises `MOST` on purpose, in a commit of its own. `python -m scripts.bench costs`
says which process costs what, and `--against COMMIT` what another commit costs.
"""

import sys

import pytest

from scripts.bench.costs import ROLES, counted, function_calls
from tests.support.launcher import needs_strict

MOST = {
    "spawn": {"frames": 3.2, "bytes": 141},
    "block": {"frames": 3.2, "bytes": 175},
    "query": {"frames": 4.2, "bytes": 235},
    "run": {"frames": 9.5, "bytes": 650},
}
"""Operation → what is counted → most of it at "strict": 5 % above what it takes. The frames of a run's last block may be
missed."""
MOST_FAULTS = {
    "3.11": {"spawn": 1305, "block": 8, "query": 8, "run": 2080},
    "3.12": {"spawn": 515, "block": 8, "query": 8, "run": 810},
    "3.13": {"spawn": 515, "block": 8, "query": 8, "run": 815},
}
"""Version of CPython → operation → most page faults of all processes. From 3.12 on, inherited objects are immortal. A
block faults only when memory grows."""

MOST_CALLS = {"chat": 3_450, "streamed chat": 3_690, "batch of 16 items": 43_000}
"""Operation → most calls of Python functions in the thread of the event loop, the client's included: 5 % above what it
takes. A request over HTTP took 2,100 more than the run that it asks for; it takes 1,000 more."""


@needs_strict
@pytest.mark.parametrize("name", MOST)
async def test_operation_costs_no_more_than_table_says(name: str) -> None:
    most = MOST[name] | {"page faults": MOST_FAULTS[f"3.{sys.version_info.minor}"][name]}
    found = await counted(name, 20)
    took = {"page faults": sum(found[role]["page faults"] for role in ROLES), **found["connection"]}
    assert {what: took[what] for what in most if took[what] > most[what]} == {}


@needs_strict
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="calls of functions are counted for CPython 3.11")
@pytest.mark.parametrize("name", MOST_CALLS)
async def test_orchestrator_calls_no_more_functions_than_table_says(name: str) -> None:
    assert (await function_calls(name, 2 if "items" in name else 10))[1] <= MOST_CALLS[name]


@needs_strict
@pytest.mark.parametrize("name", ["chat", "batch of one item"])
async def test_operation_costs_the_same_after_many(name: str) -> None:
    """A server or an engine that looked at what has ended would call more with each request."""
    first, later = await function_calls(name, 10, between=100)
    assert later <= first * 1.03
