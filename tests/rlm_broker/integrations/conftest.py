"""Stand-ins of the packages that the adapters are for: the smallest thing with the same contract, in our own words."""

from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "support" / "peers"


@pytest.fixture(scope="session", autouse=True)
def stand_ins() -> None:
    """Find the stand-ins where the packages themselves would be."""
    pytest.MonkeyPatch().syspath_prepend(PEERS)
