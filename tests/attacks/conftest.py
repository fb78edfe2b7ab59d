from collections.abc import Iterator

import pytest

from tests.attacks.arena import PROTECTED, Arena, arena_of


@pytest.fixture(scope="module", params=[*PROTECTED, "process"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with arena_of(request.param) as opened:
        yield opened
