"""Limits that cannot be raised again."""

import resource
import subprocess
import sys

from sandbox_worker.init.procfs import Proc
from sandbox_worker.isolation import rlimits
from tests.support.forked_child import in_child


def test_core_dumps_are_bound_to_one_byte() -> None:
    def limit() -> list[object]:
        return [rlimits.forbid_core_dumps(), resource.getrlimit(resource.RLIMIT_CORE), rlimits.forbid_core_dumps()]

    if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        assert in_child(limit) == [True, [1, 1], True]


def test_hard_core_limit_of_0_is_reported() -> None:
    """A hard core limit of 0 is reported, since it does not stop a piped handler."""
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "print(rlimits.forbid_core_dumps())"
    )
    script = f"import sys; sys.path[:] = {sys.path!r}\nfrom sandbox_worker.isolation import rlimits\n{code}"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"False\n"


def test_limit_is_never_above_the_hard_one() -> None:
    def limits() -> list[object]:
        rlimits.set_hard(resource.RLIMIT_NOFILE, 100)
        lowered = resource.getrlimit(resource.RLIMIT_NOFILE)
        rlimits.set_hard(resource.RLIMIT_NOFILE, 200)
        return [lowered, resource.getrlimit(resource.RLIMIT_NOFILE)]

    assert in_child(limits) == [[100, 100], [100, 100]]


def test_address_space_limit_bounds_mappings() -> None:
    def allocate() -> str:
        rlimits.set_hard(resource.RLIMIT_AS, Proc().mapped_bytes()[0] + (32 << 20))
        try:
            bytearray(8 << 30)  # more than an earlier test can have left free in this process
        except MemoryError:
            return "MemoryError"
        return "allocated"

    assert in_child(allocate) == "MemoryError"
