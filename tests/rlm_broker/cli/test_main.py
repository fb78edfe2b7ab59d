import inspect
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from rlm_broker.cli import ask
from rlm_broker.cli.commands import ASK
from rlm_broker.cli.settings.settings import _VALUES, DEFAULTS
from rlm_broker.sandbox.workers.levels import CHOICES
from tests.support.command import COMMAND, ENVIRONMENT, WAIT_S, run
from tests.support.forked_python import python
from tests.support.places import PROJECT

HEAVY = ("pydantic", "litellm", "rich", "psutil", "msgspec")


def printed(code: str, **variables: str) -> str:
    """Return what an interpreter of its own prints."""
    environment = {**ENVIRONMENT, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


@pytest.mark.parametrize("command", ["", "ask", "exec", "doctor", "runs list", "runs stop"])
def test_help_names_the_exit_codes_and_imports_nothing_heavy(command: str) -> None:
    shown = printed(
        f"import sys; sys.argv[1:] = {[*command.split(), '--help']!r}\n"
        "from rlm_broker.cli.main import main\n"
        f"try: main()\nexcept SystemExit: pass\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert "exit codes:" in shown
    assert shown.splitlines()[-1] == "[]"


def test_the_package_imports_nothing_heavy_and_has_every_public_name() -> None:
    heavy = f"print([name for name in {HEAVY!r} if name in sys.modules])"
    have = "all(getattr(public, name) is not None for name in public.__all__)"
    assert printed(f"import sys, rlm_broker as public\n{heavy}\nprint({have})") == "[]\nTrue\n"


UNUSED = (
    *("aiohttp", "attrs", "click", "email", "jsonschema", "litellm", "psutil", "pydantic", "referencing", "rich"),
    *("sqlite3", "tarfile", "zipfile", "rlm_broker.batch", "rlm_broker.broker.cache", "rlm_broker.cli"),
    *("rlm_broker.broker.clients.litellm", "rlm_broker.broker.clients.recording", "rlm_broker.context.file_content"),
    *("rlm_broker.nodes", "rlm_broker.sandbox.packages", "rlm_broker.serve", "rlm_broker.values.json_schemas"),
    *("rlm_broker.watch.server", "rlm_broker.watch.viewer"),
)
"""Modules that a run of one block does not need. Each takes milliseconds of every program's start."""
MOST_MODULES = {"RLM": 365, "Sandbox": 320}
"""Modules of a program with a run or a block. CPython 3.11 has 344 and 301; other versions have some more or fewer."""


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("RLM", "print(RLM(lambda messages: '```repl\\nFINAL(1)\\n```').completion('text', '?').response)"),
        ("Sandbox", "with Sandbox() as sandbox, sandbox.repl() as repl: print(repl.execute('1').stdout.strip())"),
    ],
)
def test_a_run_or_a_block_imports_no_module_that_it_does_not_need(name: str, use: str) -> None:
    count = f"print([each for each in {UNUSED!r} if each in sys.modules], len(sys.modules))"
    answer, imported = printed(f"import sys\nfrom rlm_broker import {name}\n{use}\n{count}").splitlines()
    unused, _, modules = imported.rpartition(" ")
    assert (answer, unused) == ("1", "[]")
    assert int(modules) <= MOST_MODULES[name]


def test_a_list_of_models_imports_no_litellm_and_a_client_that_will_be_called_does() -> None:
    for lists, importing in ((True, "set()"), (False, "{'litellm'}")):
        code = (
            "from rlm_broker.broker.clients.base import IMPORTING\n"
            "from rlm_broker.broker.models.models import Models\n"
            "from rlm_broker.broker.models.registry import Registry\n"
            "from rlm_broker.run.lm_handler import LMHandler\n"
            f"Registry('anthropic/claude-sonnet-4-5', None, Models(), LMHandler, lists={lists})\nprint(IMPORTING)"
        )
        assert printed(code, ANTHROPIC_API_KEY="sk-x") == f"{importing}\n"


def test_help_and_the_version_can_be_asked_for_as_elsewhere() -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "ask").stdout == run("ask", "--help").stdout
    assert run("-V").stdout == run("--version").stdout
    assert run("--help").stdout.count("_RLM_BROKER_COMPLETE=") == 3


def test_a_shell_completes_commands_and_values() -> None:
    for words, place, completed in (
        ("rlm-broker a", "1", "plain,ask"),
        ("rlm-broker ask --isolation st", "3", "plain,strict\nplain,standard"),
        ("rlm-broker ask --limit max_b", "3", "plain,max_batch_prompts=\nplain,max_blocks=\nplain,max_budget_usd="),
        ("rlm-broker ask --set prompt", "3", "plain,prompt_profile="),
        ("rlm-broker ask --model ol", "3", "plain,ollama/"),
    ):
        shell = {"_RLM_BROKER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
        done = subprocess.run(COMMAND, env={**ENVIRONMENT, **shell}, capture_output=True, text=True, check=False)
        assert completed in done.stdout


ONLY_SETTINGS = {
    *("cache", "cluster", "max_nodes", "resources", "encoding", "strict_text"),
    *("model_policy", "recursion", "prompt_profile"),
}
"""Settings without an option of their own: `--set NAME=VALUE` gives them."""


def test_values_that_are_offered_are_those_of_the_settings() -> None:
    offered: dict[str | None, Any] = {option.name: option.type for option in ASK.params}
    assert [*offered["isolation"].choices] == [*_VALUES["isolation"]] == [*CHOICES]


def test_help_begins_with_examples_and_has_no_more_options_than_a_screen() -> None:
    shown = run("ask", "--help").stdout
    titles = [line for line in shown.splitlines() if re.fullmatch(r"[A-Z]\w+:", line)]
    assert titles == ["Often:", "Answer:", "Keep:", "Sandbox:"]
    assert shown.index('rlm-broker ask "Which service') < shown.index("Often:")
    assert shown.count("\n  -") < 26
    assert {option.name for option in ASK.params if isinstance(option, click.Option)} == {
        *inspect.signature(ask.run).parameters,
        *inspect.signature(ask._completion).parameters,
        *DEFAULTS,
        *("max_depth", "debug"),
    } - {"question", "paths", "options", "progress", "flags", *ONLY_SETTINGS}


def test_old_words_for_runs_work_and_say_the_new_ones() -> None:
    for old, new, exit_code in (
        ("ps --nonsense", "runs list --nonsense", 2),
        ("stop nothing", "runs stop nothing", 2),
        ("trace show /nowhere", "runs show /nowhere", 2),
        ("trace view /nowhere", "runs view /nowhere", 2),
        ("view --host nowhere", "runs view --host nowhere", 2),
    ):
        was, now = run(*old.split()), run(*new.split())
        line, *rest = was.stderr.splitlines(keepends=True)
        assert line.startswith(f"rlm-broker: `{old.split()[0]}` is `{' '.join(new.split()[:1])}")
        assert (was.returncode, was.stdout, "".join(rest)) == (exit_code, now.stdout, now.stderr)
    assert run("runs", "--watch", "--json").stderr == run("runs", "list", "--watch", "--json").stderr


def test_missing_path_is_refused_before_the_imports() -> None:
    shown = printed(
        "import sys; sys.argv[1:] = ['ask', 'q', 'nope.log', '--json']\nfrom rlm_broker.cli.main import main\n"
        f"try: main()\nexcept SystemExit as end: print(end.code, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    error, end = shown.splitlines()
    assert json.loads(error) == {"error": {"kind": "context", "message": "nope.log does not exist"}}
    assert end == "2 []"


def test_a_wrong_command_line_under_json_is_an_object() -> None:
    for line, said in (("ask --json", "Missing argument"), ("runs --watch --json", "--watch shows a table")):
        done = run(*line.split())
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, done.stderr, error["kind"]) == (2, "", "usage")
        assert said in error["message"]


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "talks.py"
    file.write_text("print('x' * 1_000_000)")
    command = " ".join([*COMMAND, "exec", str(file)])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} | true"], capture_output=True, env=ENVIRONMENT, timeout=WAIT_S, check=False
    )
    assert b"Traceback" not in done.stderr


WRITES = """
import os, sys
from rlm_broker.cli import main
from rlm_broker.results import Block
from rlm_broker.sandbox.repl import SandboxedRepl
reader, writer = os.pipe()
os.close(reader)
def run(*_, **__):
    for _ in range(200):
        try:
            os.write(writer, b"x")
        except OSError:
            pass
    return Block("", "ok", stdout="written")
SandboxedRepl.execute_script = run
sys.argv = ["rlm-broker", "exec", "--json", "-"]
main.main()
"""


def test_a_broken_pipe_raises_once_in_the_thread_that_writes() -> None:
    done = python("-c", WRITES, env=ENVIRONMENT)
    assert done.stderr == ""
    assert json.loads(done.stdout)["stdout"] == "written"


WAKES_A_LOOP = """
import sys
from rlm_broker.cli import exec as exec_command
from rlm_broker.cli import main
from rlm_broker.results import Block
from rlm_broker.sandbox.repl import SandboxedRepl
def closed(*_, **__):
    raise BrokenPipeError(32, "Broken pipe")
def run(*_, on_output, **__):
    exec_command.say = closed
    try:  # as asyncio does around the write that wakes a loop
        on_output("stdout", "x")
    except OSError:
        pass
    return Block("", "ok")
SandboxedRepl.execute_script = run
sys.argv = ["rlm-broker", "exec", "-"]
main.main()
"""


def test_lost_output_ends_the_command_also_while_the_main_thread_wakes_the_loop() -> None:
    done = python("-c", WAKES_A_LOOP, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (1, "")


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from rlm_broker.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, cwd=PROJECT, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, b"")


def test_the_module_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("json", "click", "signal", "pydantic"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')")
    done = subprocess.run(
        [sys.executable, "-m", "rlm_broker", "config", "show"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "max_depth" in done.stdout
