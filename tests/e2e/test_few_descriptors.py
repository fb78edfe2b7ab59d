"""A process with few free descriptors: sandboxes, REPLs and runs fail in one sentence, and leave none open."""

import json

import pytest

from tests.support.forked_python import python
from tests.support.launcher import needs_strict
from tests.support.places import PROJECT

SWEPT = """
import dataclasses, json, sys
from pathlib import Path
from scripts.faults.descriptors import few_descriptors
print(json.dumps(dataclasses.asdict(few_descriptors(sys.argv[1])(Path()))))
"""


@pytest.mark.parametrize("level", [pytest.param("strict", marks=needs_strict), "standard"])
def test_few_free_descriptors_are_told_and_none_is_left_open(level: str) -> None:
    done = python("-c", SWEPT, level, cwd=PROJECT)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["left"] == []
    assert report["is_sensible"], report["told"]
