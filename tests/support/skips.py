"""Why tests are skipped: one wording for one reason, so that the summary of a run folds them into one line each."""

import ctypes
import zoneinfo
from pathlib import Path

import pytest

NEEDS_ROOT = "needs root"
NEEDS_ORDINARY_USER = "needs an ordinary user"
NEEDS_SOCKET_FILTERS = "needs a kernel that lets this user attach a filter to a socket"
NEEDS_CRUN = "needs crun"
ONE_PROCESS = "at the level standard a REPL is one process"


def require_time_zones() -> None:
    """Skip the test if the machine has no time zones: then code in a sandbox has none either."""
    if not any(Path(folder, "UTC").exists() for folder in zoneinfo.TZPATH):
        pytest.skip("needs time zones (Debian: tzdata)")


def require_cpp_library() -> None:
    """Skip the test if the machine has no C++ library, which wheels of numpy and pandas load."""
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        pytest.skip("needs libstdc++ (Debian: libstdc++6)")
