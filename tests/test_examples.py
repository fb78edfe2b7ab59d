"""Each example, run as a user runs it."""

import subprocess
import sys

import pytest

from tests.support.places import PROJECT

EXPECTED = {
    "batch_over_chunks.py": "20 of 30 are positive\nroot: 1 calls\nreader: 30 calls\n",
    "children.py": '{"north": "245", "south": "320", "west": "300"}\ndepth 1: Add up these numbers: ',
    "three_levels.py": '{"north": "245", "south": "335"}\ndepth 0: 1 calls\ndepth 1: 2 calls\ndepth 2: 5 calls\n'
    "depth 3: 5 calls\nrun 1: {",
    "tools.py": "[\"lens\"]\nin_stock() raised KeyError: 'telescope'\n",
    "structured_output.py": "Ada Lovelace 1815\nasked 2 times\n",
    "sandbox_only.py": "6\nerror\ninterrupted\n6\nits process ended by itself with exit code 3 (os._exit)\n1\n",
    "record_and_replay.py": "The pump on deck 2: noisy on Monday, seized on Wednesday; solved with a new bearing.\n",
    "code_interpreter.py": "<table><tr><td>north<td>35<tr><td>south<td>12</table>\n",
    "own_loop.py": "task 0: yes, 1 call\ntask 1: no, 1 call\n",
    "follow_a_run.py": "turn 1\n  call 1: ",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_example_prints_its_documented_output(name: str) -> None:
    done = subprocess.run(
        [sys.executable, PROJECT / "examples" / name],
        env={"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(EXPECTED[name])


def test_every_example_is_run() -> None:
    assert {path.name for path in (PROJECT / "examples").glob("*.py")} == EXPECTED.keys()
