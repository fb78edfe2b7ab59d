"""What the kernel keeps for the mappings of a REPL's processes: 65,530 each, with 60 processes some 800 MB.

No number of a process shows it, and counting the lines of /proc/PID/maps takes 30 ms where there are that many. Making
them takes the process as long in the kernel, so that they are counted again whenever it has spent some time there.
"""

from collections.abc import Sequence

from sandbox_worker.init.procfs import Proc, Seen

WORTH_COUNTING_S = 0.02
"""CPU seconds in the kernel after which the mappings of a process are counted anew: it could have made 20,000."""
FREE_MAPPINGS = 16_384
"""Of all processes together, at no charge. A Python that has loaded pandas has a thousand."""
MAPPING_BYTES = 320
"""Kernel memory for one mapping, its place in the tree of mappings included."""


class Mappings:
    """Of one REPL."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._known: dict[int, tuple[float, int]] = {}

    def held_bytes(self, seen: Sequence[Seen]) -> int:
        """Kernel memory for the mappings of `seen`, which are all that live. A new process has those of its parent."""
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
