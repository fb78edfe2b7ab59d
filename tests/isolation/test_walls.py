import pytest

from sandbox_worker.isolation.walls import WorkerBounds
from tests.isolation.launcher import BOUNDS


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_of_0_which_a_tmpfs_takes_for_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, and must be at least 1"):
        WorkerBounds(**(BOUNDS | {name: 0}))
