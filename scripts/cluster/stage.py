"""Namespaces of the script's own, in which it may make links and end processes without touching the machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "CLUSTER_STAGE_OF_SCRIPTS"
"""Set in the environment of the process that is inside."""
_OWN = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Namespaces of the stage. When its first process ends, the kernel ends all others and removes all links."""


def is_inside() -> bool:
    """Return whether this process is on the stage."""
    return INSIDE in os.environ


def what_is_missing() -> str | None:
    """Return a sentence on why no stage can be made here; None if one can."""
    for program, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            return f"the program {program} is missing: install {package}"
    done = subprocess.run([*_unshare(), "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return (
            f"namespaces with a bridge cannot be made here: {lines[-1] if lines else 'unshare failed'}; run it as root"
        )
    return None


def enter(module: str, arguments: Sequence[str]) -> int:
    """Run a module on a new stage, and return its exit code. Whatever ends this process ends the stage."""
    command = [*_unshare(), sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, env={**os.environ, INSIDE: "1"})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the first process of the stage has got the same signal
            continue


def prepare() -> None:
    """Give the stage a folder of its own for the names of network namespaces, and its loopback device.

    Raises:
        CalledProcessError: A program failed.
    """
    os.makedirs("/run/netns", exist_ok=True)  # noqa: PTH103 - the path is fixed
    for command in (["mount", "-t", "tmpfs", "none", "/run/netns"], ["ip", "link", "set", "lo", "up"]):
        subprocess.run(command, check=True)


def _unshare() -> list[str]:
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own, *_OWN, "--propagation", "private"]
