"""Times of two things, taken by turns: a machine that is busy with others slows both down alike.

What counts is the tenth percentile: on a busy machine, most times are those of waiting for a processor.
"""

import statistics
import time
from collections.abc import Callable, Mapping


def by_turns(ours: str, things: Mapping[str, Callable[[], object]], rounds: int, settle_s: float = 0.0) -> str:
    """Return one line: the time of each, and how ours compares with each other one.

    Args:
        ours: The one of the things that is ours.
        things: Name → function that is timed. Each is called once before.
        rounds: Calls of each.
        settle_s: Seconds before each call, for what the one before has left behind: processes that end, say.
    """
    taken: dict[str, list[float]] = {name: [] for name in things}
    for thing in things.values():
        thing()
    for _ in range(rounds):
        for name, thing in things.items():
            time.sleep(settle_s)
            started = time.perf_counter()
            thing()
            taken[name].append(time.perf_counter() - started)
    best = {name: statistics.quantiles(times, n=10)[0] for name, times in taken.items()}
    shown = [f"{name} {time_s * 1e3:.2f} ms" for name, time_s in best.items()]
    ratios = [f"{best[ours] / time_s:.3f} of {name}" for name, time_s in best.items() if name != ours]
    return f"{', '.join(shown)}: {', '.join(ratios)}"
