"""Puts small faults into modules, and prints those that no test notices.

    python -m scripts.mutation [MODULE ...] [--sample N] [--seed S] [-j N] [--json FILE]

MODULE is a part of a path, such as `ledger` or `parsing/`; all of `scripts/mutation/table.py` without any. What is
known to survive, and why, is in `scripts/mutation/survivors.toml`. The exit code is 1 if another fault survives, or if
one of that file does not any more.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.mutation import table
from scripts.mutation.table import Survivor
from scripts.mutation.trials import PROJECT, FailsAnyway, Tried, try_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    given = _parsed(arguments)
    wanted = [path for path in table.MODULES if not given.modules or any(part in path for part in given.modules)]
    if not wanted:
        print(f"no module of the table is named like that; it has: {', '.join(table.MODULES)}", file=sys.stderr)
        return 2
    tried: list[Tried] = []
    failing: list[str] = []
    survivors = table.accepted()
    for module in wanted:
        try:
            of_module = try_all(
                PROJECT,
                {module: table.MODULES[module]},
                jobs=given.jobs,
                sample=given.sample,
                seed=given.seed,
                on_tried=lambda each: _tell(each, survivors),
            )
        except FailsAnyway as error:
            failing.append(str(error))
            continue
        print(_row(module, of_module, survivors), flush=True)
        tried += of_module
    old = table.outdated(tried, survivors, all_were_tried=given.sample is None)
    for known in old:
        print(f"no longer a survivor: {known.module} {known.where}: {known.was} -> {known.becomes}")
    for each_failing in failing:
        print(each_failing)
    if given.json:
        given.json.write_text(json.dumps([_plain(each, survivors) for each in tried], indent=1))
    return 1 if failing or old or table.unexplained(tried, survivors) else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m scripts.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="parts of paths of modules; all without any")
    parser.add_argument("--sample", type=int, help="at most so many faults of each module")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn with")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="tests that run at once")
    parser.add_argument("--json", type=Path, help="file to write all faults to, with what came of each")
    return parser.parse_args(arguments)


def _row(module: str, tried: Sequence[Tried], survivors: Sequence[Survivor]) -> str:
    killed = sum(not each.survived for each in tried)
    known = len(tried) - killed - len(table.unexplained(tried, survivors))
    share = f"{killed / max(1, len(tried)):7.1%}"
    return f"{module:45} {killed:4} of {len(tried):4} killed {share}, {known} known survivors"


def _shown(tried: Tried) -> str:
    before = (PROJECT / tried.module).read_text().splitlines()
    changes = difflib.unified_diff(before, tried.mutant.source.splitlines(), n=0, lineterm="")
    lines = [f"    {line}" for line in list(changes)[3:]]
    return "\n".join([f"{tried.module}:{tried.mutant.line} survived, in {tried.mutant.where or 'the module'}", *lines])


def _plain(tried: Tried, survivors: Sequence[Survivor]) -> dict[str, object]:
    mutant = tried.mutant
    return {
        "module": tried.module,
        "where": mutant.where,
        "line": mutant.line,
        "was": mutant.was,
        "becomes": mutant.becomes,
        "number": mutant.number,
        "outcome": tried.verdict.outcome,
        "seconds": round(tried.verdict.took_s, 2),
        "is_known": any(known.is_of(tried) for known in survivors),
    }


def _tell(tried: Tried, survivors: Sequence[Survivor]) -> None:
    if table.unexplained([tried], survivors):
        print(_shown(tried), flush=True)


if __name__ == "__main__":
    sys.exit(main())
