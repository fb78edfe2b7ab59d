"""Times of two things, taken by turns: a machine that is busy with others slows both down alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def by_turns(ours: str, things: Mapping[str, Callable[[], object]], rounds: int) -> str:
    """Return one line: the median of each, and how ours compares with each other one.

    Args:
        ours: The one of the things that is ours.
        things: Name → function that is timed. Each is called once before.
        rounds: Calls of each.
    """
    taken: dict[str, list[float]] = {name: [] for name in things}
    for thing in things.values():
        thing()
    for _ in range(rounds):
        for name, thing in things.items():
            started = time.perf_counter()
            thing()
            taken[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    shown = [f"{name} {median * 1e3:.2f} ms" for name, median in medians.items()]
    ratios = [f"{medians[ours] / median:.3f} of {name}" for name, median in medians.items() if name != ours]
    return f"{', '.join(shown)}: {', '.join(ratios)}"
