"""Packages that an installation lacks: one sentence that says what to install."""

import importlib
import subprocess

import pytest

from rlm_broker.values.extras import ExtraMissing, require_extra
from tests.support.command import COMMAND, ENVIRONMENT

WITHOUT = "import sys; sys.modules[{missing!r}] = None\n"


def test_missing_package_is_a_sentence() -> None:
    words = r"`x` needs packages that are not installed: pip install 'rlm-broker\[y\]'"
    with pytest.raises(ExtraMissing, match=words), require_extra("y", "`x`"):
        importlib.import_module("no_such_package_at_all")


def test_own_missing_module_is_a_defect_and_passes() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rlm_broker\.no_such_module"), require_extra("y", "`x`"):
        importlib.import_module("rlm_broker.no_such_module")


def said(code: str, missing: str) -> tuple[int, str]:
    done = subprocess.run(
        [COMMAND[0], "-c", WITHOUT.format(missing=missing) + code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def test_name_or_command_of_an_extra_says_what_to_install() -> None:
    for name, missing, extra in (("Service", "starlette", "serve"), ("OpenTelemetry", "opentelemetry", "otel")):
        code = f"try:\n    from rlm_broker import {name}\nexcept ImportError as e:\n    print(e)"
        sentence = f"{name} needs packages that are not installed: pip install 'rlm-broker[{extra}]'\n"
        assert said(code, missing) == (0, sentence)
    for command, missing in (("serve", "uvicorn"), ("serve", "starlette"), ("runs view", "starlette")):
        code = f"sys.argv = ['rlm-broker', *'{command}'.split()]\nfrom rlm_broker.__main__ import main\nmain()"
        sentence = f"`rlm-broker {command}` needs packages that are not installed: pip install 'rlm-broker[serve]'\n"
        assert said(code, missing) == (2, f"rlm-broker {command}: {sentence}")
