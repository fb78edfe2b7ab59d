"""Nodes as network namespaces: each has one link to a bridge, which can be cut and healed."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import psutil

BRIDGE = "br0"
HEAD_ADDRESS = "10.77.0.1"
"""Address of the bridge, where Ray's head and the orchestrator are."""
OURS = ("rlm_broker.nodes.agent", "sandbox_worker.zygote")
"""Marks in the command lines of an agent, and of a fork server with its workers."""


class Node:
    """One node: a network namespace, and all processes that were started in it.

    Attributes:
        name: Name of the namespace.
        address: Address of the node.
    """

    def __init__(self, number: int) -> None:
        self.name = f"node-{number}"
        self.address = f"10.77.0.{10 + number}"
        self._link = f"veth{number}"
        self._first: subprocess.Popen[bytes] | None = None
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self._link, "master", BRIDGE, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        _ip("-n", self.name, "route", "add", "default", "via", HEAD_ADDRESS)

    def start(self, command: Sequence[str], log: IO[bytes]) -> None:
        """Start a command on the node. One runs at a time."""
        first = [sys.executable, "-m", "scripts.cluster.first_process", *command]
        self._first = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *first], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    @property
    def processes(self) -> list[psutil.Process]:
        """All living processes of the node but its first one, which stands for the node's pid 1."""
        if self._first is None:
            return []
        try:
            below = psutil.Process(self._first.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if _lives(process)]

    def ours(self) -> list[psutil.Process]:
        """Return its living processes of this package: the agent, the fork server and all workers."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                if any(mark in " ".join(process.cmdline()) for mark in OURS):
                    found.append(process)
        return found

    def named(self, mark: str) -> psutil.Process:
        """Return its oldest process with this in its command line.

        Raises:
            RuntimeError: There is none.
        """
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                if mark in " ".join(process.cmdline()):
                    return process
        raise RuntimeError(f"no process of {self.name} is called {mark}")

    def kill(self) -> None:
        """Send SIGKILL to all processes of the node at once."""
        for process in self.processes:
            _kill(process)

    def cut(self) -> None:
        """Cut the link: packets are lost in both directions, and neither side is told."""
        _ip("link", "set", self._link, "nomaster")

    def heal(self) -> None:
        """Connect the link again."""
        _ip("link", "set", self._link, "master", BRIDGE)

    def end(self) -> None:
        """End all processes of the node, and its first one."""
        if self._first is not None:
            self.kill()
            self._first.kill()
            self._first.wait()
            self._first = None


def build(count: int) -> list[Node]:
    """Return so many nodes around a new bridge.

    Raises:
        CalledProcessError: A program failed.
    """
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{HEAD_ADDRESS}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    return [Node(number) for number in range(1, count + 1)]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
