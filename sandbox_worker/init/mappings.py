"""Estimates the kernel memory that a REPL's memory mappings take.

A process may have 65,530 mappings (vm.max_map_count); 60 processes make the kernel hold some 800 MB, which no figure in
/proc shows. Counting the lines of /proc/PID/maps takes 30 ms for that many mappings. Making them costs the process at
least as much time in the kernel, so a process's mappings are counted again only after it has spent such time there.
"""

from collections.abc import Sequence

from sandbox_worker.init.procfs import Proc, Seen

WORTH_COUNTING_S = 0.02
"""CPU seconds in the kernel after which a process's mappings are counted again: enough to make 20,000 of them."""
FREE_MAPPINGS = 16_384
"""Mappings of all processes together that are not charged. A Python that has loaded pandas has 1,000."""
MAPPING_BYTES = 320
"""Bytes of kernel memory for one mapping, with its node in the tree of mappings."""


class Mappings:
    """Mappings of one REPL's processes."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._known: dict[int, tuple[float, int]] = {}

    def held_bytes(self, seen: Sequence[Seen]) -> int:
        """Return the bytes that are charged for the mappings of all living processes.

        A new process counts with its parent's mappings until it is counted itself.
        """
        known: dict[int, tuple[float, int]] = {}
        for each in seen:
            counted_at_s, count = self._known.get(each.pid, (0.0, 0))
            if each.times.system_s >= counted_at_s + WORTH_COUNTING_S:
                counted_at_s, count = each.times.system_s, self._proc.mappings(each.status.speaker)
            elif counted_at_s == 0 and (parent := known.get(each.status.parent)) is not None:
                count = max(count, parent[1])
            known[each.pid] = counted_at_s, count
        self._known = known
        return max(0, sum(count for _, count in known.values()) - FREE_MAPPINGS) * MAPPING_BYTES
