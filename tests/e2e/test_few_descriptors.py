"""A process with few free descriptors: sandboxes, REPLs and runs fail in one sentence, and leave none open."""

import json

import pytest

from tests.support.forked_python import python
from tests.support.launcher import needs_strict
from tests.support.places import PROJECT

SWEPT = """
import dataclasses, json, sys
from pathlib import Path
from scripts.faults import descriptors
descriptors.FREE = descriptors.FREE[::int(sys.argv[2])]
print(json.dumps(dataclasses.asdict(descriptors.few_descriptors(sys.argv[1])(Path()))))
"""


@pytest.mark.parametrize(("level", "step"), [pytest.param("strict", 1, marks=needs_strict), ("standard", 4)])
def test_few_free_descriptors_are_told_and_none_is_left_open(level: str, step: int) -> None:
    """At `standard` fewer numbers are tried: the orchestrator's code is the same."""
    done = python("-c", SWEPT, level, str(step), cwd=PROJECT)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["left"] == []
    assert report["is_sensible"], report["told"]
