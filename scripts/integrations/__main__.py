"""Tries adapters against the real packages that they are for.

    scripts/test-integrations [NAME ...] [--checkouts DIR] [--cache DIR] [--figures] [--write]

Names are those of modules in scripts/integrations; without any, all of them. For each peer it makes a virtual
environment with the wheel of this tree and the peer, and runs there:

1. the peer's own tests, with our adapter in the place of theirs. A test that fails and is not listed in
   scripts/integrations/expected, or passes and is listed, fails the script;
2. whole programs of the peer's, on scripted models;
3. 200 adapters on 64 threads, and some in a process that is killed by SIGKILL: nothing may be left of it.

The exit code is 1 if anything is not as it must be. What cannot be tried here is named, with the reason.
"""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from scripts.integrations.environments import PROJECT, NotHere, environment_of, path_of, sources_of, wheel_of
from scripts.integrations.peer import HERE, Peer, Suite

WAIT_S, GONE_S = 1_200, 20
CROWD, KILLED = "scripts.integrations.inside.crowd", 8
TABLE = PROJECT / "docs" / "integrations" / "index.md"
MODULES = ("peer", "environments")
"""Modules of this folder that are no peer's."""


@dataclass
class Report:
    """Results of one peer.

    Attributes:
        rows: What was tried, and its result, for people.
        faults: What is not as it must be.
        left_out: What could not be tried here.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Trial:
    """One peer in its environment."""

    def __init__(self, peer: Peer, wheel: Path, cache: Path, checkouts: Path | None) -> None:
        self.report = Report()
        self._peer = peer
        self._wheel = wheel
        self._cache = cache
        self._checkouts = checkouts
        self._python = environment_of(peer, wheel, cache)
        self._env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        self._env["PYTHONPATH"] = str(path_of(cache))

    def run(self, with_figures: bool) -> None:
        """Run all that the peer declares."""
        for suite in self._peer.suites:
            try:
                self._run_suite(suite)
            except NotHere as why:
                self.report.left_out.append(f"{suite.name}: {why}")
        for program in self._peer.programs:
            self._note(program.rpartition(":")[2], self._call(program))
        if self._peer.example is not None:
            self._run_example(*self._peer.example)
        if self._peer.opened is not None:
            self._note("200 on 64 threads", self._python_run("-m", CROWD, self._peer.opened))
            self._kill(self._peer.opened)
        for figure in self._peer.figures if with_figures else ():
            done = self._call(figure)
            self.report.rows.append((figure, done.stdout.strip()))
            if done.returncode:
                self.report.faults.append(f"{figure}: {_tail(done)}")

    def _run_suite(self, suite: Suite) -> None:
        folder = sources_of(suite, self._checkouts, self._cache, self._python)
        results = self._cache / "results"
        results.unlink(missing_ok=True)
        env = {**self._env, "RESULTS": str(results)}
        python = self._python
        if suite.packages is not None:
            python = environment_of(replace(self._peer, packages=suite.packages), self._wheel, self._cache)
        command = [str(python), *suite.command]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if not lines:
            self.report.faults.append(f"{suite.name} reported no test: {_tail(done)}")
            return
        counts = Counter(line["outcome"] for line in lines)
        self.report.faults += [f"{suite.name}: {fault}" for fault in faults_of(lines, self._peer.expected(suite))]
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        row = f"{counts['passed']} of {counts['passed'] + counts['failed']}{skipped}"
        self.report.rows.append((suite.name, row))

    def _run_example(self, name: str, printed: str) -> None:
        done = self._python_run("-P", str(PROJECT / "examples" / name))
        self._note("example", done, is_right=re.search(printed, done.stdout) is not None)

    def _note(self, what: str, done: "subprocess.CompletedProcess[str]", is_right: bool = True) -> None:
        is_ok = is_right and not done.returncode
        self.report.rows.append((what, "ok" if is_ok else "FAILED"))
        if not is_ok:
            self.report.faults.append(f"{what}: {_tail(done)}")

    def _kill(self, opened: str) -> None:
        """Kill a process that has adapters open, and look for what is left of those below it."""
        command = [str(self._python), "-m", CROWD, opened, str(KILLED)]
        with subprocess.Popen(command, env=self._env, cwd=self._cache, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            is_open = owner.stdout.readline() == "open\n"
            below = psutil.Process(owner.pid).children(recursive=True) if is_open else []
            owner.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(below, GONE_S)
        row = f"{len(below)} processes, {len(left)} left" if is_open else "FAILED"
        self.report.rows.append(("SIGKILL", row))
        if left or not is_open:
            self.report.faults.append(f"SIGKILL: {row}")

    def _call(self, function: str) -> "subprocess.CompletedProcess[str]":
        module, _, name = function.partition(":")
        return self._python_run("-c", f"from {module} import {name}; {name}()")

    def _python_run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(self._python), *arguments]
        return subprocess.run(
            command, cwd=self._cache, env=self._env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )


def faults_of(lines: list[dict[str, str]], expected: Mapping[str, str]) -> Iterator[str]:
    """Yield what is not as it must be in the outcomes of a suite, whose tests are `expected` to fail with a reason."""
    for line in lines:
        test, outcome = line["test"], line["outcome"]
        if outcome == "failed" and test not in expected:
            yield f"{test} fails: {line['why']}"
        if outcome == "passed" and test in expected:
            yield f"{test} passes, and is listed: {expected[test]}"
    for test in expected.keys() - {line["test"] for line in lines}:
        yield f"{test} is listed, and did not run"


def _tail(done: "subprocess.CompletedProcess[str]") -> str:
    return f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-2_000:]}"


def write_table(name: str, report: Report) -> None:
    """Put the results of a peer into the last table of the page. Rows of other peers stay, and rows are in order."""
    *lines, _ = f"{TABLE.read_text()}\n".split("\n")
    first = max(number for number, line in enumerate(lines) if line.startswith("| ---")) + 1
    kept = [line for line in lines[first:] if line and not line.startswith(f"| `{name}` |")]
    new = [f"| `{name}` | {what} | {result} |" for what, result in report.rows if "\n" not in result]
    rows = sorted([*kept, *new], key=lambda line: line.partition("|")[2].partition("|")[0])  # of one peer, as they come
    TABLE.write_text("\n".join([*lines[:first], *rows, ""]))


def main() -> int:
    """Try the peers that the command line names."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("scripts/test-integrations", description=first, epilog=rest)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem not in MODULES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--checkouts", type=Path, help="folder of clones, for tests that no package has")
    parser.add_argument("--cache", type=Path, default=PROJECT / ".integrations", help="folder of the environments")
    parser.add_argument("--figures", action="store_true", help="measure by turns with the peers as well")
    parser.add_argument("--write", action="store_true", help=f"write results into {TABLE.relative_to(PROJECT)}")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no peer is called {', '.join(unknown)}: there are {', '.join(known)}")
    cache = given.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    wheel = wheel_of(cache)
    faults = 0
    for name in given.names or known:
        started = time.monotonic()
        peer: Peer = importlib.import_module(f"scripts.integrations.{name}").PEER
        try:
            trial = Trial(peer, wheel, cache, given.checkouts and given.checkouts.resolve())
        except NotHere as why:
            print(f"{name}: not tried: {why}")
            continue
        trial.run(given.figures)
        report = trial.report
        print(f"{name}: {time.monotonic() - started:.0f} s")
        for what, result in report.rows:
            print(f"  {what}: {result}")
        for reason in report.left_out:
            print(f"  not tried: {reason}")
        for fault in report.faults:
            print(f"  FAULT: {fault}")
        faults += len(report.faults)
        if given.write:
            write_table(name, report)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
