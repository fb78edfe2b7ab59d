"""A kernel of notebooks, as a front end talks to it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import PROJECT

WAIT_S = 120
"""Seconds that a cell or the start of a kernel may take on a busy machine. Past them the test fails."""


@dataclass
class Told:
    """The messages of a kernel for one cell: displays in their last state, and how often each was sent."""

    displays: dict[str, dict[str, str]] = field(default_factory=dict)
    sent: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    result: dict[str, str] | None = None
    streams: str = ""
    error: str | None = None
    traceback: list[str] = field(default_factory=list)


class Kernel:
    """A started kernel."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str) -> Told:
        """Run a cell and return what it sent."""
        request = self._client.execute(code)
        told = Told()
        while True:
            message = self._client.get_iopub_msg(timeout=WAIT_S)
            assert message["parent_header"].get("msg_id") == request, message  # else it would be at another cell
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return told
            if kind in ("display_data", "update_display_data"):
                identity = content["transient"]["display_id"]
                assert (kind == "update_display_data") == (identity in told.displays)
                told.displays[identity] = content["data"]
                told.sent.setdefault(identity, []).append(content["data"])
            elif kind == "execute_result":
                told.result = content["data"]
            elif kind == "stream":
                told.streams += content["text"]
            elif kind == "error":
                told.error = f"{content['ename']}: {content['evalue']}"
                told.traceback = "\n".join(content["traceback"]).splitlines()


@contextlib.contextmanager
def notebook_kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel on this Python, which keeps its files in `folder`, and end it."""
    manager_module = pytest.importorskip("jupyter_client.manager", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    manager = manager_module.KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    manager.start_kernel(env=kernel_environment(folder), cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WAIT_S)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def kernel_environment(folder: Path) -> dict[str, str]:
    """Return variables with which a kernel imports this checkout and writes below `folder` alone."""
    folders = {name: str(folder) for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {**folders, "PYTHONPATH": str(PROJECT), "PATH": path, "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
