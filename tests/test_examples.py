"""Each example, run as a user runs it, and each notebook, run by a kernel."""

import ast
import importlib.util
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import Python, python
from tests.support.markup import read
from tests.support.notebook_kernel import WAIT_S, kernel_environment
from tests.support.places import PROJECT
from tests.support.tables import table

EXAMPLES = PROJECT / "examples"
ENVIRONMENT = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin"}
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
    "follow_a_run.py": "turn 1\n  call 1: ",
    "find_the_cause.py": "2026-03-01T00:31:40 ERROR payments: stopped, because the certificate of the ledger database "
    "expired at midnight\nFound at line 31001",
    "typed_records.py": "1039  2026-02-17  Haddad & Sons    2310.00\n1041  2026-03-03  Lindqvist AB     1204.50\n"
    "1042  2026-03-05  Orto Verde         89.90\ntotal 3604.40 euros after 3 turns\n",
    "jupyter_kernel.py": "[1, 2, 3]\nFileNotFoundError\nURLError\n3\n",
    "own_loop.py": "ticket 0: a refund, 1 call\nticket 1: a new password, 1 call\n",
}
"""Example -> what it prints first, without a key."""
OTHERS = {"rl_rollouts.py", "service.py", "where_is_it_done.py"}
"""Examples that have a test of their own."""
OF_PEERS = {
    "deep_agent.py",
    "dspy_rlm.py",
    "inspect_sandbox.py",
    "openenv_server.py",
    "rlms_depth_two.py",
    "sandbox_agent.py",
    "smolagents_agent.py",
}
"""Examples of adapters, which `scripts/test-integrations` runs beside the packages that they are for."""
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def run(name: str, *arguments: str) -> str:
    return python(EXAMPLES / name, *arguments, env=ENVIRONMENT, check=True).stdout


@table("name", EXPECTED)
def test_example_prints_its_documented_output(name: str) -> None:
    assert run(name).startswith(EXPECTED[name])


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED.keys() | OTHERS | OF_PEERS


def test_code_base_is_searched_for_each_question() -> None:
    told = run("where_is_it_done.py", str(PROJECT / "sandbox_worker"), "Where is a pidfd opened?", "Where is a fork?")
    assert re.match(r"\d+ files, [\d,]+ characters\nWhere is a pidfd opened\?\n  block 1: ok, ", told)
    assert len(re.findall(r"^(?!Also: ).*\nFound at .*\.py, line \d+", told, re.MULTILINE)) == 2


def test_rollouts_are_lines_with_messages_and_rewards(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    told = run("rl_rollouts.py", "--samples", "3", "--at-a-time", "4", "--out", str(out))
    assert told.endswith(f"12 rollouts in {out}\n")
    rollouts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["task"], each["sample"]) for each in rollouts] == [(t, s) for t in range(4) for s in range(3)]
    assert {each["reward"] for each in rollouts} == {0.0, 0.1, 1.0}
    for each in rollouts:
        roles = [message["role"] for message in each["messages"]]
        assert roles[:3] == ["system", "user", "assistant"]
        assert (each["turns"] == 1) == (each["reward"] > 0)


def test_service_answers_over_http(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="needs fastapi and uvicorn")
    command = [str(EXAMPLES / "service.py"), "--port", "0"]
    with (tmp_path / "log").open("w+") as log, Python(command, env=ENVIRONMENT, stdout=log.fileno()) as service:
        assert service.stderr is not None
        try:
            lines = iter(service.stderr.readline, "")
            address = next(found[1] for line in lines if (found := re.search(r"running on (http://[\d.:]+)", line)))
            answered = post(f"{address}/ask", context="The pump is on deck 2.", question="Where is the pump?")
            assert answered[0] == 200
            assert answered[1]["answer"].startswith("The pump is on deck 2.")
            assert post(f"{address}/ask", context="x", question="")[0] == 422
            status, block = post(f"{address}/run", code="print(len(context))\nopen('/etc/shadow')", context="four")
            assert (status, block["status"], block["stdout"]) == (200, "error", "4\n")
            assert post(f"{address}/run", code="x" * 10_000_001)[0] == 422
        finally:
            service.terminate()


def post(address: str, **fields: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(fields).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs_to_its_end_and_shows_pages(path: Path, tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs nbclient and ipykernel")
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = nbclient.NotebookClient(notebook, timeout=WAIT_S, kernel_name="python3")
    client.create_kernel_manager()
    assert client.km is not None
    client.km.transport, client.km.ip = "ipc", str(tmp_path / "kernel")
    client.execute(env=kernel_environment(tmp_path), cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [read(output.data["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    shown = "".join(page.text for page in pages)
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}
    for expected in SHOWN[path.stem]:
        assert expected in shown
    assert sum(len(page.pictures) for page in pages) == (path.stem == "first_steps")
    assert len(json.dumps(outputs)) < 200_000


SHOWN = {
    "first_steps": ["interrupted after", "Error: ", "repaired by Ada"],
    "watch_a_run": ["answered after", "failed after", "3 child runs", '"north": "245"'],
}
"""Notebook -> texts that its pages show."""


def test_notebooks_are_stored_without_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None


def test_table_of_examples_names_each_of_them_once() -> None:
    rows = re.findall(r"^\| \[`([\w/.]+)`\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert all(name == target for name, target in rows)
    every = [*EXAMPLES.glob("*.py"), *NOTEBOOKS]
    assert sorted(name for name, _ in rows) == sorted(str(path.relative_to(EXAMPLES)) for path in every)


def test_examples_that_take_a_model_show_how_to_name_one() -> None:
    texts = {path: path.read_text() for path in EXAMPLES.glob("*.py")}
    if importlib.util.find_spec("fastapi") is None:
        del texts[EXAMPLES / "service.py"]
    for path in (path for path, text in texts.items() if '"--model"' in text):
        said = ast.get_docstring(ast.parse(texts[path])) or ""
        assert f"python examples/{path.name} --model " in said
        assert "Without `--model`" in said
        assert "--model" in run(path.name, "--help")
