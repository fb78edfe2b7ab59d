"""Tries the broker on all hosts that this machine can be, and prints the matrix.

    python -m scripts.hosts [KIND ...] [--tests] [--root DIR ...] [--json FILE]

Kinds are surrounding, container, unit, python and root; all of them without any. On each host it runs `doctor` and
`exec`, and with --tests those tests that the host may decide, where it can use this checkout. A host that cannot be
tried is named with the reason. The exit code is 1 if `doctor` and `exec` disagree on a host, if either fails with a
traceback, or if a test fails.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.hosts import hosts
from scripts.hosts.hosts import Host, last_line
from scripts.hosts.surroundings import CANNOT_BE_MADE, PROJECT

KINDS = ("surrounding", "container", "unit", "python", "root")
WAIT_S, TESTS_WAIT_S = 120, 1800
NEVER_STARTED = (125, 126, 127)
"""Exit codes of container engines and shells for a command that they could not start."""


@dataclass
class Row:
    """Findings on one host.

    Attributes:
        auto: The level that `auto` takes there, or "none".
        exec_ran: Whether `exec` ran code.
        tests: Passed, failed and skipped tests.
        notes: Why strict is not available, or why the host was not tried.
        defects: What must not happen on any host.
    """

    kind: str
    name: str
    auto: str = "-"
    exec_ran: bool | None = None
    tests: str = ""
    notes: str = ""
    defects: list[str] = field(default_factory=list)


def every_host(kinds: list[str], roots: list[str]) -> Iterator[Host]:
    """The hosts of these kinds."""
    if "surrounding" in kinds:
        yield from hosts.surroundings()
    if "container" in kinds:
        yield from hosts.containers()
    if "unit" in kinds:
        yield from hosts.units()
    if "python" in kinds:
        yield from hosts.pythons()
    if "root" in kinds:
        yield from hosts.roots(roots)


def tried(host: Host, with_tests: bool) -> Row:
    """Run `doctor`, `exec` and perhaps the tests there."""
    row = Row(host.kind, host.name)
    if host.why_not:
        row.notes = f"not tried: {host.why_not}"
        return row
    try:
        done = _run(host, ["-m", "rlm_broker", "doctor", "--json"])
        if done.returncode in (CANNOT_BE_MADE, *NEVER_STARTED):
            row.notes = f"not tried: {last_line(done.stderr)}"
            return row
        _judge(row, done)
        done = _run(host, ["-m", "rlm_broker", "exec", "-"], "print(6 * 7)")
        row.exec_ran = done.stdout == "42\n"
        if row.exec_ran != (row.auto != "none"):
            row.defects.append(f"doctor says {row.auto}, and exec ends with {done.returncode}")
        if "Traceback" in done.stderr:
            row.defects.append(f"exec: {last_line(done.stderr)}")
        if with_tests and host.tests:
            _test(row, host)
    except subprocess.TimeoutExpired as error:
        row.defects.append(f"no end within {error.timeout:g} s")
    return row


def _judge(row: Row, doctor: "subprocess.CompletedProcess[str]") -> None:
    try:
        report = json.loads(doctor.stdout)
    except ValueError:
        row.defects.append(f"doctor: {last_line(doctor.stderr)}")
        return
    row.auto = report["auto"] or "none"
    for level in ("strict", "standard"):
        found = report["levels"][level]
        if not all(found["refused"].values()):
            row.defects.append(f"{level} lets attempts through")
        if found["problem"] and level != row.auto and not row.notes:
            row.notes = f"{level}: {found.get('reason') or found['problem']}"


def _test(row: Row, host: Host) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    done = _run(host, ["-m", "pytest", *host.tests, *options], wait_s=TESTS_WAIT_S)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    row.tests = "/".join(str(counts.get(what, 0)) for what in ("passed", "failed", "skipped"))
    if done.returncode:
        row.defects.append(f"tests: {last_line(done.stdout)}")


def _run(
    host: Host, arguments: list[str], code: str = "", wait_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    # docker and podman pass their standard input on only if they are told to.
    prefix = [*host.prefix[:2], "-i", *host.prefix[2:]] if host.kind == "container" else list(host.prefix)
    return subprocess.run(
        [*prefix, host.python, *arguments],
        cwd=PROJECT,
        input=code,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=wait_s or WAIT_S,
        check=False,
    )


def shown(row: Row) -> str:
    """The row as text."""
    ran = {None: "-", True: "ok", False: "no"}[row.exec_ran]
    line = f"{row.kind:<12}{row.name[:70]:<72}{row.auto:<10}{ran:<6}{row.tests:<10}{row.notes[:110]}"
    return "\n".join([line.rstrip(), *(f"{'':<12}DEFECT: {defect}" for defect in row.defects)])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="scripts.hosts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--tests", action="store_true", help="run tests there, too")
    parser.add_argument("--root", action="append", default=[], metavar="DIR", help="root folder of a distribution")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    given = parser.parse_args()
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    print(f"{'kind':<12}{'host':<72}{'auto':<10}{'exec':<6}{'tests':<10}why not strict")
    rows = []
    for host in every_host(given.kinds or list(KINDS), given.root):
        rows.append(tried(host, given.tests))
        print(shown(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    sys.exit(1 if any(row.defects for row in rows) else 0)


if __name__ == "__main__":
    main()
