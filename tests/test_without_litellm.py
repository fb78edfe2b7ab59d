"""The package without litellm: all works but the models of providers."""

import os
import subprocess
import sys

from tests.support.places import PROJECT
from tests.support.tables import table

HIDES_IT = """\
import sys

class NoLitellm:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "litellm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoLitellm())
"""
SENTENCE = "model {0!r} is called through litellm, which is not installed: pip install 'rlm-broker[litellm]'"
WORKS = """
from rlm_broker import RLM, FunctionClient, LMHandler, Model, Sandbox
assert RLM("offline").completion("The pump is on deck 2.", "Where is the pump?").response
assert RLM(lambda messages: "FINAL(1)").completion("text", "?").response == "1"
RLM(Model(name="m", base_url="http://127.0.0.1:9/v1"))
with Sandbox() as sandbox, sandbox.repl() as repl:
    print(repl.execute("1 + 1").stdout)
assert not any(name.startswith("litellm") for name in sys.modules)
"""
REFUSED = """
from rlm_broker import RLM, ConfigurationError, LiteLLMClient, Models
for make in (
    lambda: RLM("openai/gpt-5-mini"),
    lambda: RLM("offline", "openai/gpt-5-mini"),
    lambda: LiteLLMClient("openai/gpt-5-mini"),
):
    try:
        make()
    except ConfigurationError as error:
        print(error)
RLM("offline", models={"fast": "openai/gpt-5-mini"})  # a run need not use it
"""
COMMAND = "from rlm_broker.__main__ import main\nsys.argv[1:] = {0!r}\nmain()"


def run(code: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OPENAI_API_KEY": "sk-x", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", HIDES_IT + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_sandbox_and_other_models_work_without_litellm() -> None:
    done = run(WORKS)
    assert (done.returncode, done.stdout) == (0, "2\n\n"), done.stderr


def test_providers_name_is_answered_by_how_to_install() -> None:
    done = run(REFUSED)
    assert done.stdout.splitlines() == [SENTENCE.format("openai/gpt-5-mini")] * 3, done.stderr


@table(
    "arguments, exit_code, said",
    [
        (["--help"], 0, "Usage"),
        (["doctor"], 0, "strict"),
        (["models"], 0, "offline"),
        (["models", "--model", "openai/gpt-5"], 0, SENTENCE.format("openai/gpt-5")),
        (["ask", "Where?", "README.md", "--model", "openai/gpt-5"], 2, SENTENCE.format("openai/gpt-5")),
    ],
)
def test_command_does_without_litellm(arguments: list[str], exit_code: int, said: str) -> None:
    done = run(COMMAND.format(arguments))
    assert done.returncode == exit_code, done.stderr
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
