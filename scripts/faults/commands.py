"""Faults of whole programs: signals at random moments, a fork, an exit with everything open, a closed stdout."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlm_broker import RLM
from rlm_broker.errors import ConfigurationError
from scripts.faults import processes, providers
from scripts.faults.cell import Phase, Report, Scene
from scripts.faults.stage import Stage

PROJECT = Path(__file__).parents[2]
LONGEST_S = 1.2
"""Latest random moment in seconds after the start of a command; by then the shortest run has ended."""
OWN_FILES, PACKAGE_FILE = "/rlm_broker/", "/rlm_broker/__init__.py"
WAIT_S = 60.0
NAMED = {-signal.SIGTERM: "SIGTERM", -signal.SIGHUP: "SIGHUP", -signal.SIGINT: "SIGINT"}
LEFT_OPEN = """
import os, sys, threading
from pathlib import Path
from scripts.faults.stage import Stage
stage = Stage({phase!r}, Path({folder!r}))
threading.Thread(target=stage.play, args=(lambda stage: threading.Event().wait(),), daemon=True).start()
if not stage.arrived.wait(60):
    sys.exit("the phase was never reached")
"""


def stormy(number: int, times: int, seed: int) -> Scene:
    """Send a signal to `rlm-broker ask` at random moments, each time to another one."""

    def scene(folder: Path) -> Report:
        chance, codes, wrong = random.Random(seed), Counter[str](), list[str]()
        with providers.serve_slowly() as port:
            for turn in range(times):
                process = _started(_ask(port, folder / f"trace-{turn}"), folder)
                time.sleep(chance.uniform(0.05, LONGEST_S))
                process.send_signal(number)
                try:
                    _, said = process.communicate(timeout=WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    wrong.append(f"turn {turn}: no end within {WAIT_S:g} s")
                    continue
                codes[NAMED.get(process.returncode, f"exit code {process.returncode}")] += 1
                if b"Traceback" in said and (own := _own_lines(said.decode(errors="replace"))):
                    wrong.append(f"turn {turn}: a traceback: {own[-1]}")
        told = ", ".join(f"{count} times {code}" for code, count in codes.items())
        return Report(told, not wrong, [*wrong[:3], *([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else [])])

    return scene


def _own_lines(said: str) -> list[str]:
    """Return the lines of tracebacks that are of the project.

    `python -m` imports the package itself before its `__main__` can meet signals, as a part of its own start.
    """
    own = [line.strip() for line in said.splitlines() if OWN_FILES in line]
    return own if any(PACKAGE_FILE not in line for line in own) else []


def closed_stdout(folder: Path) -> Report:
    """Have the reader of `ask` leave before the answer comes."""
    with providers.serve_slowly() as port:
        process = _started(_ask(port, folder / "trace"), folder)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace")
        process.wait(WAIT_S)
    last = said.strip().splitlines()[-1] if said.strip() else "nothing"
    return Report(f"exit code {process.returncode}: {last}", "Traceback" not in said and "Exception" not in said)


def left_open(phase: Phase) -> Scene:
    """Have the interpreter exit at the phase, with everything open."""

    def scene(folder: Path) -> Report:
        program = LEFT_OPEN.format(phase=phase, folder=str(folder))
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=_environment(folder), cwd=PROJECT
        )
        said = done.stderr.strip()
        last = said.splitlines()[-1] if said else "nothing"
        return Report(f"exit code {done.returncode}, stderr: {last}", done.returncode == 0 and not said)

    return scene


def forked(stage: Stage) -> None:
    """Fork, and use in the child what was opened before, and something of its own."""
    if said := processes.said_by_fork(lambda: _in_the_child(stage))():
        stage.notes.append(f"in the forked process: {said}")


def _in_the_child(stage: Stage) -> str:
    """Return what is wrong in a forked process; empty if all is well."""
    assert stage.rlm is not None
    stage.is_armed = False
    wrong = []
    try:
        stage.rlm.completion("the context", "the question")
        wrong.append("the RLM of the parent was used")
    except ConfigurationError as error:
        if "forked" not in str(error):
            wrong.append(str(error))
    except BaseException as error:  # noqa: BLE001 - it is the report
        wrong.append(f"{type(error).__name__}: {error}")
    try:
        stage.rlm.close()
        with RLM("offline") as own:
            own.completion("The key is under the mat.", "Where is the key?")
    except BaseException as error:  # noqa: BLE001
        wrong.append(f"{type(error).__name__}: {error}")
    return "; ".join(wrong)


def forked_and_alive(stage: Stage) -> Callable[[], None]:
    """Fork a process that lives on with all that it inherited, until the run has ended."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)

    def end() -> None:
        os.close(write_end)
        os.waitpid(pid, 0)

    stage.at_end.append(end)
    return lambda: None


def _ask(port: int, trace: Path) -> list[str]:
    base_url = f"http://127.0.0.1:{port}/v1"
    options = ["--model", "script", "--base-url", base_url, "--trace", str(trace)]
    return [sys.executable, "-m", "rlm_broker", "ask", "What is there?", str(PROJECT / "README.md"), *options]


def _started(command: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLM_BROKER")}
    return {**kept, "PYTHONPATH": str(PROJECT), "XDG_CONFIG_HOME": str(folder), "PYTHONUNBUFFERED": "1"}
