"""Capabilities are gone from every set, and cannot come back."""

import os
from pathlib import Path

import pytest

from sandbox_worker.isolation import capabilities, namespaces, syscalls
from tests.support.forked_child import in_child

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def status() -> dict[str, str]:
    """The fields of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def with_all_capabilities() -> None:
    """Enter a user namespace, which gives them: the same for root and for an ordinary user."""
    folder = namespaces.open_proc_self()
    namespaces.enter_user_namespace(syscalls.CLONE_NEWUSER, folder)
    os.close(folder)


def test_last_capability_is_the_kernels() -> None:
    assert capabilities.last() == int(Path("/proc/sys/kernel/cap_last_cap").read_text())


def test_capabilities_are_dropped_from_every_set() -> None:
    def drop() -> list[list[str]]:
        with_all_capabilities()
        before = status()
        capabilities.drop_all(capabilities.last())
        after = status()
        return [[fields[name].strip("0") for name in SETS] for fields in (before, after)]

    before, after = in_child(drop)
    assert before[2]
    assert after == [""] * 5


def test_dropped_capabilities_stay_away() -> None:
    def drop_and_try() -> list[object]:
        with_all_capabilities()
        capabilities.drop_all(capabilities.last())
        refusals = []
        attempts = (
            lambda: syscalls.prctl(syscalls.PR_SET_SECUREBITS, 0),
            lambda: syscalls.sethostname("x"),
            lambda: capabilities.drop_all(0),
        )
        for attempt in attempts:
            with pytest.raises(PermissionError) as caught:
                attempt()
            refusals.append(type(caught.value).__name__)
        return [*refusals, syscalls.prctl(27)]  # PR_GET_SECUREBITS

    assert in_child(drop_and_try) == [*["PermissionError"] * 3, 0b1110_1111]
