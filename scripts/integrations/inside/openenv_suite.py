"""A plugin for pytest that puts our executors in the place of OpenEnv's own, for the tests of OpenEnv.

The suite runs in a checkout, whose `src` and `envs` are found before what is installed.
"""

import os
import sys
from pathlib import Path

os.environ["PATH"] = "/usr/bin:/bin"  # one test starts uv, which needs a network: let it fail on each machine
sys.path[:0] = [str(Path(folder).resolve()) for folder in ("src", "envs", ".")]

import envs.coding_env.server.python_codeact_env as coding_env  # noqa: E402
import openenv.core.tools.local_python_executor as tools  # noqa: E402
import repl_env.server.python_executor as repl_executor  # noqa: E402
import repl_env.server.repl_environment as repl_env  # noqa: E402

from rlm_broker.integrations.openenv import PyExecutor, PythonExecutor  # noqa: E402

for place, replaced in (
    (coding_env, PyExecutor),
    (tools, PyExecutor),
    (repl_executor, PythonExecutor),
    (repl_env, PythonExecutor),
):
    setattr(place, replaced.__name__, replaced)
