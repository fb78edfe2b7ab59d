"""A whole task of Harbor's by its command line, with the agent that plays the solution, in our environment."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
schema_version = "1.1"

[task]
name = "rlm-broker/sort-numbers"

[environment]
network_mode = "no-network"
memory_mb = 1024
"""
FILES = {
    "task.toml": CONFIG,
    "instruction.md": "Sort the numbers of numbers.txt into sorted.txt.\n",
    "environment/numbers.txt": "3\n1\n2\n",
    "solution/solve.sh": "#!/bin/bash\nsort -n numbers.txt > sorted.txt\n",
    "tests/test.sh": "#!/bin/bash\ngrep -qx 1 sorted.txt && echo 1 > $HARBOR_ROOT/logs/verifier/reward.txt\n",
}


def task() -> None:
    """The solution gets the reward 1."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in FILES.items():
            (root / "task" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "task" / name).write_text(text)
            (root / "task" / name).chmod(0o755)
        command = [str(Path(sys.executable).with_name("harbor")), "run", "--yes", "-q", "-p", "task", "-a", "oracle"]
        command += ["-e", "rlm_broker.integrations.harbor:HarborEnvironment", "-o", "jobs"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
        results = [json.loads(path.read_text()) for path in root.glob("jobs/*/*/result.json")]
        assert [each["verifier_result"]["rewards"] for each in results] == [{"reward": 1.0}], (done.stdout, done.stderr)
