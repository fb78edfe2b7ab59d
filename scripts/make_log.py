"""Writes a log of any size with a few facts hidden in it: the haystack of the quickstart.

    python scripts/make_log.py /tmp/server.log --megabytes 50 --seed 7

The same size and seed give the same bytes.
"""

import argparse
import bisect
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

FACTS: tuple[tuple[str, str], ...] = (
    ("Who is the custodian of the backup passphrase?", "Ingrid Sollberg"),
    ("Which badge does Ingrid Sollberg carry?", "48213"),
    ("Where is the spare key of the cold storage vault kept?", "behind the third panel of rack F-17"),
    ("On which day does the Marseille relay move to its new building?", "the second Tuesday of November"),
    ("What did the auditors of Brightwater ask for?", "the paper ledger of 1987"),
)
"""(question, text that the answer must contain); every one is answered by one line of the file."""

SENTENCES = (
    "The backup passphrase custodian is Ingrid Sollberg, badge 48213.",
    "The spare key of the cold storage vault is kept behind the third panel of rack F-17.",
    "The Marseille relay moves to its new building on the second Tuesday of November.",
    "The auditors of Brightwater asked for the paper ledger of 1987 and nothing else.",
)
"""The hidden lines."""

_LINES_OF_POOL = 5_000
_LINES_PER_BATCH = 50_000
_BODIES = (
    ("INFO", "gateway", "GET /api/v2/orders/{n} status=200 duration_ms={d} client=10.{a}.{b}.{c}"),
    ("INFO", "gateway", "POST /api/v2/sessions status=201 duration_ms={d} client=10.{a}.{b}.{c}"),
    ("INFO", "scheduler", "job {n} finished in {d} ms, next run of this worker in {a} s"),
    ("INFO", "storage", "backup of volume vol-{a} is complete, {n} blocks written to the vault"),
    ("DEBUG", "cache", "evicted {n} keys from shard {a}, hit rate {b}.{c} percent"),
    ("DEBUG", "auth", "the badge reader at door {a} answered in {d} ms"),
    ("WARN", "storage", "disk usage of node-{a} is at {b} percent, moving cold blocks"),
    ("ERROR", "gateway", "upstream timed out after 30 s"),
    ("ERROR", "gateway", "upstream timed out after 30 s"),
    ("ERROR", "storage", "checksum mismatch in volume vol-{a}"),
    ("ERROR", "auth", "token signature is not valid"),
)


def lines(size_bytes: int, seed: int) -> Iterator[list[str]]:
    """Batches of lines, ASCII only, each with its newline; `size_bytes` in all to within a line and the facts."""
    rng = random.Random(seed)
    pool = [_body(rng) for _ in range(_LINES_OF_POOL)]
    seconds = [f"{h:02}:{m:02}:{s:02}" for h in range(24) for m in range(60) for s in range(60)]
    # The last one first: the list is used up from its end.
    to_hide = [(size_bytes * (i + rng.random()) / len(SENTENCES), text) for i, text in enumerate(SENTENCES)][::-1]
    written = number = 0
    while written < size_bytes:
        # Ten lines a second of log time; the date goes on for as many days as it takes.
        day, second = divmod(number // 10, len(seconds))
        date = f"{2024 + day // 336}-{day // 28 % 12 + 1:02}-{day % 28 + 1:02}T"
        count = min(_LINES_PER_BATCH, (len(seconds) - second) * 10)
        stamps = (seconds[second + i // 10] for i in range(count))
        batch = [f"{date}{stamp}Z {body}\n" for stamp, body in zip(stamps, rng.choices(pool, k=count), strict=True)]
        number += count
        total = sum(map(len, batch))
        if written + total > size_bytes:
            ends = list(itertools.accumulate(map(len, batch)))
            batch = batch[: bisect.bisect_left(ends, size_bytes - written) + 1]
            total = ends[len(batch) - 1]
        inserted = 0
        while to_hide and to_hide[-1][0] < written + total:
            at, text = to_hide.pop()
            batch.insert(max(0, int((at - written) / total * (len(batch) - inserted))) + inserted, text + "\n")
            inserted += 1
        written += sum(map(len, batch))
        yield batch


def _body(rng: random.Random) -> str:
    level, service, text = rng.choice(_BODIES)
    a, b, c = (rng.randrange(100) for _ in range(3))
    return f"{level} {service}: " + text.format(n=rng.randrange(100_000), d=rng.randrange(3_000), a=a, b=b, c=c)


def write(path: Path, size_bytes: int, seed: int) -> int:
    """Write the log and return the number of its lines."""
    count = 0
    with path.open("w", encoding="ascii") as file:
        for batch in lines(size_bytes, seed):
            file.write("".join(batch))
            count += len(batch)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Write the file that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="Write a log with a few facts hidden in it.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--megabytes", type=float, default=50.0, help="size in millions of bytes (default: 50)")
    parser.add_argument("--seed", type=int, default=7, help="the same size and seed give the same file (default: 7)")
    options = parser.parse_args(arguments)
    if not 0.01 <= options.megabytes <= 100_000:
        parser.error(f"--megabytes {options.megabytes:g}: must be between 0.01 and 100000")
    try:
        count = write(options.path, int(options.megabytes * 1_000_000), options.seed)
    except OSError as error:
        parser.error(f"cannot write {options.path}: {error.strerror}")
    print(
        f"wrote {options.path}: {options.path.stat().st_size:,} bytes, {count:,} lines, {len(SENTENCES)} facts hidden."
    )
    print(f'ask for one of them: rlm-broker ask "{FACTS[0][0]}" {options.path}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
