"""The fork server (zygote): prepares a process once, then forks workers from it. It runs no model code.

Before it imports anything, it has CPython's allocator map its arenas, side by side. An arena has 1 MiB (`ARENA_BITS` in
Objects/obmalloc.c), and imports would map libraries in between. Side by side, most of them can become huge pages
(`syscalls.collapse_own_memory`). Else each page costs a fork 170 ns, the end of the process included, and a worker is
forked twice.
"""

_OBJECT_BYTES, _BLOCK_BYTES = 479, 512
_KEPT_EACH = 1 << 19
"""Bytes for each object that is kept meanwhile. CPython unmaps an arena when its last object is gone."""

_kept: list[bytes] = []


def reserve_arenas(megabytes: int) -> None:
    """Have CPython map this much, and fill it by later imports."""
    objects = [bytes(_OBJECT_BYTES) for _ in range((megabytes << 20) // _BLOCK_BYTES)]
    _kept.extend(objects[:: _KEPT_EACH // _BLOCK_BYTES])


def release_arenas() -> None:
    """Have CPython unmap the arenas that were not needed."""
    _kept.clear()
