"""Bounds of a REPL, and how init watches them."""

from sandbox_worker.init.usage_watch import NOTHING
from sandbox_worker.wire.bounds import WATCHED, ReplBounds


def test_watched_limits_are_bounds_that_init_sees() -> None:
    """Each watched limit is a bound, and init sees its usage."""
    assert set(ReplBounds.__struct_fields__) >= WATCHED.keys()
    for watched in WATCHED.values():
        assert getattr(NOTHING, watched.usage) == 0
