"""Runs the whole suite several times beside busy loops, and prints the tests that fail in some of the runs.

    python -m scripts.flaky                          five runs as root and five as an ordinary user, two busy loops
    python -m scripts.flaky --runs 2 --busy 4        fewer runs, a busier machine
    python -m scripts.flaky --as user -- -k sandbox  one kind of user only; what follows `--` goes to pytest

Each run is `scripts/test`, so it includes the linters and the type checker. Started as root, the script also runs the
suite as the first ordinary user of the machine, in a copy of the tree below the temporary folder. That user needs a
Python that it can read (`--python`). Started by an ordinary user, the script runs the suite as that user only.

The exit code is 1 if a run failed, printed a fatal error of a Python process, or took longer than `--minutes`.
"""

import argparse
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

PROJECT = Path(__file__).parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
HUNG_AFTER = 3
"""Multiple of `--minutes` after which a run is ended."""
SLOWEST = 15


@dataclass(frozen=True)
class Place:
    """A tree in which the suite runs, and the user who runs it.

    Attributes:
        scratch: Folder of that user, for the report and as home.
        user: None is the user of this process.
    """

    name: str
    folder: Path
    scratch: Path
    user: pwd.struct_passwd | None = None

    def run(self, command: list[str], output: Path, timeout_s: float) -> None:
        """Run `command` in the tree; what it prints goes to `output`."""
        environment = dict(os.environ)
        if self.user is not None:
            ours = ("XDG_", "SUDO_", "PYTHON", "VIRTUAL_ENV", "PYENV")
            environment = {name: value for name, value in environment.items() if not name.startswith(ours)}
            environment |= {"HOME": str(self.scratch), "USER": self.user.pw_name, "LOGNAME": self.user.pw_name}
            environment["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        uid, gid = (self.user.pw_uid, self.user.pw_gid) if self.user else (None, None)
        with (
            output.open("wb") as printed,
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                user=uid,
                group=gid,
                extra_groups=None if uid is None else [],
                start_new_session=True,
            ) as process,
        ):
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


@dataclass
class Tally:
    """Results of the runs in one place."""

    runs: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    durations_s: dict[str, list[float]] = field(default_factory=dict)
    is_good: bool = True

    def add(self, report: Path, printed: str, took_s: float, at_most_s: float) -> str:
        """Count one run, and return the line that tells of it."""
        self.runs += 1
        failed, passed = set(), 0
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                self.durations_s.setdefault(name, []).append(float(case.get("time", 0)))
                if any(child.tag in ("failure", "error") for child in case):
                    failed.add(name)
                elif case.find("skipped") is None:
                    passed += 1
        self.failed.update(failed)
        problems = [
            ("the suite did not end" if not report.exists() else ""),
            ("a child printed a fatal error" if "Fatal Python error" in printed else ""),
            (f"longer than {at_most_s / 60:.0f} minutes" if took_s > at_most_s else ""),
        ]
        said = "; ".join([f"{passed} passed, {len(failed)} failed", *filter(None, problems)])
        self.is_good = self.is_good and not failed and bool(passed) and not any(problems)
        return f"{said}, {took_s / 60:.1f} min"


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Processes that compute as long as this one lives."""
    loops = [subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def ordinary_user(name: str | None) -> pwd.struct_passwd:
    """Return the user of this name, or the first one whose number is that of a person."""
    if name is not None:
        return pwd.getpwnam(name)
    people = sorted((user for user in pwd.getpwall() if 1000 <= user.pw_uid < 60_000), key=lambda user: user.pw_uid)
    if not people:
        sys.exit("flaky: this machine has no ordinary user; make one (useradd), or give --as root")
    return people[0]


def copy_for(user: pwd.struct_passwd, folder: Path, python: str) -> Place:
    """Copy what git knows or would add, and make a virtual environment of the user's there."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (PROJECT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, tree / name)
    for path in (folder.parent, folder):
        path.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    place = Place(user.pw_name, tree, folder, user)
    output = folder / "venv.txt"
    place.run([python, "-m", "venv", ".venv"], output, 600)
    if not (tree / ".venv/bin/pip").exists():
        sys.exit(f"flaky: {user.pw_name} cannot make a virtual environment with {python}:\n{output.read_text()}")
    return place


def main() -> None:
    """Run the suite as often as asked, and print what came of it."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs as each kind of user (5)")
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside the suite (2)")
    parser.add_argument("--minutes", type=float, default=15, help="the longest that a run may take (15)")
    parser.add_argument("--as", dest="kind", choices=["root", "user", "both"], default="both")
    parser.add_argument("--user", help="name of the ordinary user (the first one of the machine)")
    parser.add_argument("--python", default="/usr/bin/python3", help="Python of the ordinary user (/usr/bin/python3)")
    parser.add_argument("--keep", type=Path, help="folder for what each run printed; else it is thrown away")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this
    is_root = os.getuid() == 0
    if not is_root and given.kind == "root":
        sys.exit("flaky: only root can run the suite as root")
    with tempfile.TemporaryDirectory(prefix="flaky-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        kept = given.keep or folder / "output"
        kept.mkdir(parents=True, exist_ok=True)
        places = []
        if not is_root or given.kind != "user":
            places.append(Place("root" if is_root else "you", PROJECT, folder))
        if is_root and given.kind != "root":
            places.append(copy_for(ordinary_user(given.user), folder / "user", given.python))
        are_good = [repeat(place, given, kept) for place in places]
    sys.exit(0 if all(are_good) else 1)


def repeat(place: Place, given: argparse.Namespace, kept: Path) -> bool:
    """Run the suite in one place; return whether all runs were good."""
    tally = Tally()
    for number in range(1, given.runs + 1):
        report, output = place.scratch / "report.xml", kept / f"{place.name}-{number}.txt"
        report.unlink(missing_ok=True)
        started = time.monotonic()
        with busy_loops(given.busy):
            command = ["scripts/test", f"--junitxml={report}", *given.pytest]
            place.run(command, output, given.minutes * 60 * HUNG_AFTER)
        took_s = time.monotonic() - started
        printed = output.read_text(errors="replace")
        print(f"{place.name} {number}: {tally.add(report, printed, took_s, given.minutes * 60)}", flush=True)
        if not report.exists():
            print(printed[-2000:])
        report.unlink(missing_ok=True)
    for name, times in tally.failed.most_common():
        print(f"  {'failed' if times == tally.runs else 'FLAKY'} {times} of {tally.runs}: {name}")
    slowest = sorted(tally.durations_s.items(), key=lambda item: -max(item[1]))[:SLOWEST]
    for name, durations_s in slowest:
        print(f"  {min(durations_s):6.1f} to {max(durations_s):6.1f} s: {name}")
    return tally.is_good


if __name__ == "__main__":
    main()
