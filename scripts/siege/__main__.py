"""One hostile REPL, or strangers on the port, beside an honest REPL of the same handler: what does the honest one feel?

    .venv/bin/python -m scripts.siege                 # all attacks, about a minute
    .venv/bin/python -m scripts.siege batches wide    # some of them
    .venv/bin/python -m scripts.siege --json FILE

For each attack an orchestrator is started in a process of its own, and an attacker in another. The honest REPL asks one
`llm_query` after the other. The table shows its round trip (median, 99th percentile, longest) before and during the
attack, the CPU time for which the longest step of the orchestrator's event loop held it, and by how much the
orchestrator's memory grew at most. The exit code is 1 if the promise of SECURITY.md was not kept.

Hostile bodies over HTTP have their own measurement of the loop and of memory: tests/attacks/test_bodies.py.

Times of a busy machine say little: the attacker and the orchestrator need a core each.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.siege.attacks import ATTACKS

ROUND_TRIPS = 300
"""Round trips of the honest REPL before the attack. During it and at its end there are at least as many."""
MOST_MS = 100.0
MOST_TIMES = 3.0
MOST_GROWTH_MB = 256.0


def besiege(attack: str, round_trips: int = ROUND_TRIPS) -> dict[str, Any]:
    """Return what one attack did, see `orchestrator.besiege`.

    Raises:
        CalledProcessError: The orchestrator failed.
    """
    command = [sys.executable, "-m", "scripts.siege.orchestrator", attack, str(round_trips)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    felt: dict[str, Any] = json.loads(done.stdout)
    return felt


def is_kept(felt: dict[str, Any]) -> bool:
    """Whether the promise was kept: the 99th percentile, and the memory."""
    most_ms = max(MOST_MS, MOST_TIMES * felt["before_ms"][1])
    return bool(felt["during_ms"][1] <= most_ms and felt["growth_mb"] <= MOST_GROWTH_MB)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.siege", description="Attacks on the broker, measured.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}; all if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    given = parser.parse_args()
    if unknown := set(given.attacks) - {*ATTACKS}:
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; choose from {', '.join(ATTACKS)}")
    table = Table("attack", "before, ms", "during, ms", "longest step, ms", "growth, MB", "kept")
    felt = []
    for attack in given.attacks or ATTACKS:
        felt.append(each := besiege(attack))
        before, during = ("  ".join(f"{value:.1f}" for value in each[when]) for when in ("before_ms", "during_ms"))
        kept = "yes" if is_kept(each) else "NO"
        table.add_row(attack, before, during, f"{each['stretch_ms']:.0f}", f"{each['growth_mb']:.0f}", kept)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(felt, indent=1) + "\n")
    return 0 if all(map(is_kept, felt)) else 1


if __name__ == "__main__":
    sys.exit(main())
