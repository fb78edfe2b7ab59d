"""Entering a zygote, and failing closed."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sandbox_worker.isolation import zygote_layers
from sandbox_worker.isolation.layer import LayerFailed, ZygoteLayers
from sandbox_worker.wire.level import STRICT
from tests.support.forked_child import in_child
from tests.support.launcher import needs_strict


def failure(**changes: Any) -> list[str]:
    """Layer, reason and sentence of entering a zygote that cannot be had."""
    arguments: dict[str, Any] = {
        "level": STRICT,
        "new_root": "/",
        "readable": [],
        "hidden": [],
    } | changes

    def enter() -> list[str]:
        with pytest.raises(LayerFailed) as caught:
            zygote_layers.enter_zygote(**arguments, orchestrator=os.pidfd_open(os.getppid()))
        return [caught.value.layer, caught.value.reason, str(caught.value)]

    result = in_child(enter)
    assert isinstance(result, list)
    return result


@needs_strict
def test_failed_root_names_layer_and_path() -> None:
    assert failure(new_root="/no/such/folder")[:2] == [
        "private root",
        "mount tmpfs on /no/such/folder: No such file or directory",
    ]
    assert failure(new_root="/mnt", readable=["/no/such/python"])[0] == "private root"


def test_process_with_threads_is_refused_unchanged() -> None:
    """A process with threads is refused before anything is changed."""

    def enter() -> list[str]:
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        with pytest.raises(LayerFailed, match="2 threads") as caught:
            zygote_layers.enter_zygote(STRICT, "/", [], [], -1)
        release.set()
        thread.join()
        return [caught.value.layer, str(Path("/proc/self/ns/mnt").readlink())]

    assert in_child(enter) == ["one thread", str(Path("/proc/self/ns/mnt").readlink())]


def _leave_if_child(pid: int) -> None:
    if pid == 0:
        os._exit(0)


def test_worker_names_its_failed_layer() -> None:
    shared = ZygoteLayers(STRICT)

    def fork() -> list[str]:
        with pytest.raises(LayerFailed) as caught:
            _leave_if_child(zygote_layers.fork_worker(shared))  # -1 is no way back
        return [caught.value.layer, caught.value.reason]

    layer, reason = in_child(fork)
    assert layer == "fork"
    assert reason.startswith(("setns: ", "unshare: "))
