"""`rlm-broker ps`, the whole command, with ten processes that have runs or REPLs."""

import contextlib
import os
import subprocess
import sys
import tempfile

from scripts.bench.measure import Effort, bare_python, by_turns, seconds
from scripts.bench.row import OURS, Row, side

PROCESSES = 10
CODE = """
from rlm_broker import Sandbox
with Sandbox(isolation="auto") as sandbox, sandbox.repl() as repl:
    print("ready", flush=True)
    input()
"""


def ps(effort: Effort) -> list[Row]:
    """Time the command."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {**os.environ, "RLM_BROKER_CONTROL": "1", "XDG_RUNTIME_DIR": folder}
        for _ in range(PROCESSES):
            command = [sys.executable, "-c", CODE]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
            stack.callback(process.kill)
            process.stdout.readline()

        def listed() -> None:
            command = [sys.executable, "-m", "rlm_broker", "runs"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            assert done.stdout.count("python") >= PROCESSES, done.stdout

        listed()
        ours, bare = by_turns(effort.times(20), lambda: seconds(listed), lambda: seconds(bare_python))
    taken, floor = side(OURS, "s", ours), side("python -I", "s", bare)
    return [Row(f"`rlm-broker ps` of {PROCESSES} processes", taken, [floor], [taken.at_most(0.4)])]
