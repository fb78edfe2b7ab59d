"""Skips tests that need what slim images and small root folders lack."""

import ctypes
import zoneinfo
from pathlib import Path

import pytest


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
