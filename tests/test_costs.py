"""Cost of operations, by counts that a busy machine does not change. No clock is read.

A change that makes an operation dearer raises `MOST` on purpose, in a commit of its own. `python -m scripts.bench costs`
says which process costs what, and `--against COMMIT` what another commit costs.
"""

import sys

import pytest

from scripts.bench.costs import ROLES, counted
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


@needs_strict
@pytest.mark.parametrize("name", MOST)
async def test_operation_costs_no_more_than_table_says(name: str) -> None:
    most = MOST[name] | {"page faults": MOST_FAULTS[f"3.{sys.version_info.minor}"][name]}
    found = await counted(name, 20)
    took = {"page faults": sum(found[role]["page faults"] for role in ROLES), **found["connection"]}
    assert {what: took[what] for what in most if took[what] > most[what]} == {}
