"""Packages that an installation lacks: one sentence that says what to install."""

import importlib
import subprocess
import sys

import pytest

from rlm_broker.values.extras import ExtraMissing, require_extra
from tests.support.command import COMMAND, ENVIRONMENT

WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
"""


def test_missing_package_is_a_sentence() -> None:
    words = r"`x` needs packages that are not installed: pip install 'rlm-broker\[y\]'"
    with pytest.raises(ExtraMissing, match=words), require_extra("y", "`x`"):
        importlib.import_module("no_such_package_at_all")


def test_own_missing_module_is_a_defect_and_passes() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rlm_broker\.no_such_module"), require_extra("y", "`x`"):
        importlib.import_module("rlm_broker.no_such_module")


@pytest.mark.parametrize(
    ("name", "missing", "extra"), [("Service", "starlette", "serve"), ("OpenTelemetry", "opentelemetry", "otel")]
)
def test_public_name_of_an_extra_says_what_to_install(name: str, missing: str, extra: str) -> None:
    code = (
        WITHOUT.format(missing=[missing])
        + f"try:\n    from rlm_broker import {name}\nexcept ImportError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == f"{name} needs packages that are not installed: pip install 'rlm-broker[{extra}]'\n"


@pytest.mark.parametrize(
    ("command", "missing", "extra"), [("serve", "uvicorn", "serve"), ("serve", "starlette", "serve")]
)
def test_command_of_an_extra_says_what_to_install(command: str, missing: str, extra: str) -> None:
    code = WITHOUT.format(missing=[missing]) + f"sys.argv = ['rlm-broker', {command!r}]\n"
    code += "from rlm_broker.__main__ import main\nmain()"
    done = subprocess.run(
        [COMMAND[0], "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"rlm-broker {command}: `rlm-broker {command}` needs packages that are not installed: "
        f"pip install 'rlm-broker[{extra}]'\n"
    )
