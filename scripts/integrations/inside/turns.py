"""Times of two things, taken by turns: a machine that is busy with others slows both down alike.

What counts is the tenth percentile: on a busy machine, most times are those of waiting for a processor.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

SETTLE_S = 0.05


def by_turns(
    ours: str,
    things: Mapping[str, Callable[[], Any]],
    rounds: int,
    after: Callable[[Any], object] | None = None,
) -> str:
    """Return one line: the time of each, and how ours compares with each other one.

    Args:
        ours: The one of the things that is ours.
        things: Name → function that is timed. Each is called once before.
        rounds: Calls of each.
        after: Called with each result, untimed, to end what was made. Then some time passes for processes that end.
    """
    taken: dict[str, list[float]] = {name: [] for name in things}
    for number in range(rounds + 1):
        for name, thing in things.items():
            started = time.perf_counter()
            result = thing()
            if number:
                taken[name].append(time.perf_counter() - started)
            if after is not None:
                after(result)
                time.sleep(SETTLE_S)
    best = {name: statistics.quantiles(times, n=10)[0] for name, times in taken.items()}
    shown = [f"{name} {time_s * 1e3:.2f} ms" for name, time_s in best.items()]
    ratios = [f"{best[ours] / time_s:.3f} of {name}" for name, time_s in best.items() if name != ours]
    return f"{', '.join(shown)}: {', '.join(ratios)}"
