"""Check after each test of a context that no descriptor was left open."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    if descriptors() - before:
        gc.collect()  # a generator that was not read to its end holds its file until it is collected
    assert not descriptors() - before
