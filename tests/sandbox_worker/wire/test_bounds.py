"""Bounds of a REPL, and how init watches them."""

from sandbox_worker.init.usage_watch import NOTHING
from sandbox_worker.wire.bounds import WATCHED, ReplBounds


def test_what_is_watched_is_a_bound_and_its_usage_is_seen_by_init() -> None:
    assert set(ReplBounds.__struct_fields__) >= WATCHED.keys()
    for watched in WATCHED.values():
        assert getattr(NOTHING, watched.usage) == 0
