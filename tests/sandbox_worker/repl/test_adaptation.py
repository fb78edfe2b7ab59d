"""Modules that are adapted when they are imported, each in a process of its own."""

import json
import subprocess
import sys
from typing import Any

from tests.support.places import PROJECT
from tests.support.tables import table


def after(adapt: str, code: str) -> Any:
    """Return the output of `code`, decoded from JSON, after a call of `adapt`."""
    imports = "from sandbox_worker.repl.adaptation import adapt\nfrom sandbox_worker.wire.level import STANDARD, STRICT"
    program = f"import json, os, sys\n{imports}\nadapt({adapt})\n{code}"
    command = [sys.executable, "-W", "error", "-c", program]
    return json.loads(subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout)


def test_multiprocessing_forks_and_may_be_told_otherwise() -> None:
    code = (
        "import multiprocessing as m\nfirst = m.get_start_method()\n"
        "m.set_start_method('spawn', force=True)\nprint(json.dumps([first, m.get_start_method()]))"
    )
    assert after("STRICT, None", code) == ["fork", "spawn"]


def test_popen_keeps_signature_source_and_group() -> None:
    code = (
        "import inspect, subprocess\n"
        "p = subprocess.Popen(['sleep', '60'], start_new_session=True, process_group=os.getpgrp())\n"
        "same = os.getpgid(p.pid) == os.getpgrp()\np.kill(); p.wait()\n"
        "print(json.dumps([same, 'args' in inspect.signature(subprocess.Popen).parameters, "
        "'class Popen' in inspect.getsource(subprocess)]))"
    )
    assert after("STRICT, None", code) == [True, True, True]


@table("module", ["random", "numpy.random"])
def test_later_imported_generator_begins_with_the_seed(module: str) -> None:
    code = f"import importlib\nprint(json.dumps(importlib.import_module('{module}').random()))"
    assert after("STANDARD, 5", code) == after("STANDARD, 5", code) != after("STANDARD, 6", code)


@table("module", ["random", "numpy.random"])
def test_repl_seed_replaces_the_sandbox_seed(module: str) -> None:
    begin = "from sandbox_worker.repl.adaptation import begin_with\nimport importlib\n"
    draw = f"print(json.dumps(importlib.import_module('{module}').random()))"
    early = f"{begin}importlib.import_module('{module}')\nbegin_with(5)\n{draw}"
    late = f"{begin}begin_with(5)\n{draw}"
    assert (
        after("STANDARD, 6", early) == after("STANDARD, 6", late) == after("STANDARD, 5", f"import importlib\n{draw}")
    )
