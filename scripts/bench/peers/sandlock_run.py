"""sandlock: a bare python behind Landlock and seccomp, from the call to its end, which its API does not separate."""

import json
import sys
import time

from sandlock import Sandbox  # type: ignore[import-not-found, unused-ignore]

READABLE = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix]


def spawn() -> list[float]:
    """Time a run of an empty program."""
    started = time.perf_counter()
    result = Sandbox(fs_readable=READABLE).run([sys.executable, "-I", "-c", "print()"])
    taken = time.perf_counter() - started
    if not result.success:
        sys.exit(f"the sandboxed python failed: {result.stderr.decode(errors='replace')}")
    return [taken]


def clone() -> list[float]:
    """Time a copy of a process in the same isolation. The copies are not isolated from each other."""
    started = time.perf_counter()
    parent.fork(1)
    return [time.perf_counter() - started]


WORK = {"spawn": spawn, "clone": clone}
parent = Sandbox(fs_readable=READABLE, init_fn=lambda: None, work_fn=lambda _number: None)
for line in sys.stdin:
    print(json.dumps(WORK[line.strip()]()), flush=True)
