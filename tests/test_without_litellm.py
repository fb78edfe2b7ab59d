"""The package without litellm: all works but models that only litellm can call."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.places import PROJECT

SENTENCE = "model {0!r} is called through litellm, which is not installed: pip install 'rlm-broker[litellm]'"
COMMANDS: list[tuple[list[str], int, str]] = [
    (["--help"], 0, "Usage"),
    (["doctor"], 0, "strict"),
    (["models"], 0, "offline"),
    (["models", "--model", "azure/gpt-5"], 0, SENTENCE.format("azure/gpt-5")),
    (["ask", "Where?", "README.md", "--model", "azure/gpt-5"], 2, SENTENCE.format("azure/gpt-5")),
]
PROGRAM = f"""\
import contextlib, io, json, sys

class NoLitellm:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "litellm":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NoLitellm())
from rlm_broker import RLM, ConfigurationError, FunctionClient, LiteLLMClient, LMHandler, Model, Models, Sandbox
from rlm_broker.__main__ import main

assert RLM("offline").completion("The pump is on deck 2.", "Where is the pump?").response
assert RLM(lambda messages: "FINAL(1)").completion("text", "?").response == "1"
RLM(Model(name="m", base_url="http://127.0.0.1:9/v1"))
with Sandbox() as sandbox, sandbox.repl() as repl:
    told = dict(printed=repl.execute("1 + 1").stdout, refused=[], commands=[])
RLM("offline", models={{"fast": "azure/gpt-5"}})  # a run need not use it
RLM("openai/gpt-5-mini", "ollama/qwen3")
for make in (
    lambda: RLM("azure/gpt-5"),
    lambda: RLM("offline", "azure/gpt-5"),
    lambda: LiteLLMClient("azure/gpt-5"),
):
    try:
        make()
    except ConfigurationError as error:
        told["refused"].append(str(error))
for arguments, _, _ in {COMMANDS!r}:
    said, sys.argv[1:] = io.StringIO(), arguments
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    told["commands"].append([code or 0, said.getvalue()])
assert not any(name.startswith("litellm") for name in sys.modules)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> Any:
    """Return what one process without litellm said: to start one takes most of the time."""
    environment = {**os.environ, "OPENAI_API_KEY": "sk-x", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sandbox_and_other_models_work_without_litellm(told: Any) -> None:
    assert told["printed"] == "2\n"


def test_providers_name_is_answered_by_how_to_install(told: Any) -> None:
    assert told["refused"] == [SENTENCE.format("azure/gpt-5")] * 3


def test_command_does_without_litellm(told: Any) -> None:
    for (arguments, exit_code, expected), (code, said) in zip(COMMANDS, told["commands"], strict=True):
        assert code == exit_code, (arguments, said)
        assert expected in " ".join(said.split()), arguments
        assert "Traceback" not in said
