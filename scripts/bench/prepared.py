"""REPLs that were prepared ahead: from a pool, and from a template that has loaded what they need."""

import time

from rlm_broker.context.store import store
from rlm_broker.sandbox.sandbox import Sandbox
from scripts.bench.contexts import plain_dict
from scripts.bench.measure import Effort, bare_python, by_turns, opening_seconds, seconds
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Check, Row, side

POOL = 4
REFILL_S = 0.1
LIBRARIES = ("numpy", "pandas")


def warm(effort: Effort) -> list[Row]:
    """One REPL at a time, the pool full again before each."""

    def one() -> list[float]:
        time.sleep(REFILL_S)
        return opening_seconds(sandbox.repl)

    with Sandbox(warm=POOL) as sandbox, Peer("sandlock, a clone", "sandlock_run.py", "sandlock") as sandlock:
        ours, python, clones = by_turns(
            effort.times(40), one, lambda: seconds(bare_python), lambda: sandlock.samples("clone")
        )
    taken = side(OURS, "ms", ours)
    others = (floor := side("python -I", "ms", python), sandlock.side("ms", clones))
    return [Row("spawn from a warm pool, ready to execute", taken, others, [taken.at_most_times(0.05, floor)])]


def preloaded(effort: Effort) -> list[Row]:
    """A REPL in which libraries are imported already."""
    code = f"import {', '.join(LIBRARIES)}"
    with Sandbox(warm=0) as sandbox, sandbox.template(imports=LIBRARIES) as template:
        ours, python = by_turns(
            effort.times(20), lambda: opening_seconds(template.repl), lambda: seconds(lambda: bare_python(code))
        )
    taken, floor = side(OURS, "ms", ours), side("python -I that imports them", "ms", python)
    what = f"spawn with {' and '.join(LIBRARIES)} preloaded, ready to execute"
    return [Row(what, taken, [floor], [taken.at_most(7)])]


def loaded_context(effort: Effort) -> list[Row]:
    """Further REPLs on a context that had to be decoded once, beside ones on an empty context."""
    size = effort.size(200)
    context = plain_dict(size * 1_000_000)
    times = effort.times(40)
    with Sandbox(warm=0) as sandbox, sandbox.template(context) as full, sandbox.template(None) as empty:
        ours, floor = by_turns(times, lambda: opening_seconds(full.repl), lambda: opening_seconds(empty.repl))
    with Sandbox(warm=0) as sandbox, store(context) as stored:
        for _ in range(2):
            opening_seconds(lambda: sandbox.repl(stored))
        again, bare = by_turns(
            times, lambda: opening_seconds(lambda: sandbox.repl(stored)), lambda: opening_seconds(sandbox.repl)
        )
    rows = []
    for which, taken_s, other_s, beside in (
        ("from its template", ours, floor, "template of an empty context"),
        ("when it has been used twice", again, bare, "no context"),
    ):
        taken, other = side(OURS, "ms", taken_s), side(beside, "ms", other_s)
        more = (taken.median or 0) - (other.median or 0)
        check = Check("≤ 1 ms more than on an empty one", more <= 1)
        rows.append(Row(f"a further REPL on a dict of {size} MB, {which}", taken, [other], [check], f"{more:+.2g} ms"))
    return rows
