"""The tasks, solver and scorer in inspect_ai itself, with its stand-in model and with a provider on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure

pytestmark = pytest.mark.inspect
ANSWERED = "```repl\nprint(llm_query('judge this'))\nFINAL('NONE')\n```"


@pytest.fixture(autouse=True)
def _has_inspect() -> None:
    pytest.importorskip("inspect_ai.model", reason="needs the extra eval")


def _logs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def _metrics(log: dict[str, Any]) -> dict[str, float]:
    return {name: metric["value"] for each in log["results"]["scores"] for name, metric in each["metrics"].items()}


def _inspected(server: FakeOpenAI, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`inspect eval` with a model of the server."""
    env = {**os.environ, "FAKE_API_KEY": "key", "FAKE_BASE_URL": server.base_url}
    options = ("--model", "openai-api/fake/m", "--log-dir", str(folder), "--log-format", "json", "--display", "plain")
    command = [str(Path(sys.executable).with_name("inspect")), "eval", *words, *options]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def _reply(request: dict[str, Any]) -> Answer:
    """A turn of a run asks a query; all else is NONE."""
    return completion(ANSWERED if "```repl" in json.dumps(request["messages"]) else "NONE", 100, 10)


def test_registered_task_runs_in_both_arms(tmp_path: Path) -> None:
    """The package's entry point has the names; calls, tokens, turns and depth of each arm are in the log."""
    with FakeOpenAI(_reply) as server:
        done = _inspected(
            server, tmp_path, "rlm_broker/needles", "-T", "arm=rlm,plain", "-T", "length=2k", "-T", "samples=3"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(server.requests) == 3 * (2 + 1)
    (log,) = _logs(tmp_path)
    assert log["status"] == "success"
    metrics = _metrics(log)
    assert metrics["rlm 2k"] == metrics["plain 2k"] == pytest.approx(1 / 3)
    assert (metrics["rlm 2k tokens"], metrics["plain 2k tokens"]) == (220, 110)
    assert (metrics["rlm 2k turns"], metrics["rlm 2k depth"], metrics["plain 2k turns"]) == (1, 1, 0)
    assert (metrics["rlm - plain 2k"], metrics["rlm - plain 2k stderr"]) == (0, 0)
    samples = {sample["id"]: sample for sample in log["samples"]}
    assert samples["needles-missing-2k-0-2 rlm"]["scores"]["answer"]["value"] == 1
    assert samples["needles-one-2k-0-0 rlm"]["metadata"]["run"]["calls"] == 2
    usage = {id: each["model_usage"]["openai-api/fake/m"]["total_tokens"] for id, each in samples.items()}
    assert {(id.split()[1], tokens) for id, tokens in usage.items()} == {("rlm", 220), ("plain", 110)}


def test_failure_of_the_model_is_an_error_of_the_sample(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "context": "Ada.", "answer": "Ada"}\n')
    with FakeOpenAI(failure(401, "the key is wrong")) as server:
        _inspected(server, tmp_path, "rlm_broker/own", "-T", "data=own.jsonl", "-T", "arm=plain", "--no-fail-on-error")
    (log,) = _logs(tmp_path)
    assert "the key is wrong" in log["samples"][0]["error"]["message"]


def _model(name: str, *texts: str) -> Any:
    """Stand-in model of inspect's, each reply of which has ten tokens."""
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    outputs = [ModelOutput.from_content(name, text) for text in texts]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=6, input_tokens_cache_read=2, output_tokens=2, total_tokens=10)
    return get_model(f"mockllm/{name}", custom_outputs=outputs)


def _samples(task: Any, folder: Path, *texts: str, **options: Any) -> Any:
    import inspect_ai

    model = _model("model", *texts)
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(folder), **options)
    assert log.status == "success"
    return log.samples


def test_solver_answers_samples_of_any_task(tmp_path: Path) -> None:
    """Without a context in its metadata, the input of a sample is the context."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match

    from rlm_broker.evaluation.registry import rlm

    samples = [
        Sample(input="How long?", target="5", metadata={"context": "abcde"}),
        Sample(input="Count: abc", target="10"),
    ]
    task = Task(samples, solver=rlm("rlm"), scorer=match())
    done = _samples(task, tmp_path, *["```repl\nFINAL(len(context))\n```"] * 2)
    assert [(each.output.completion, each.scores["match"].value) for each in done] == [("5", "C"), ("10", "C")]


def test_limit_of_inspect_ends_the_sample(tmp_path: Path) -> None:
    from rlm_broker.evaluation.registry import needles

    task = needles(arm="rlm", length="1k", samples=1)
    (sample,) = _samples(task, tmp_path, *["not yet"] * 9, token_limit=25)
    assert sample.limit.type == "token"


def test_sub_role_answers_queries_of_code(tmp_path: Path) -> None:
    from rlm_broker.evaluation.registry import needles

    task = needles(arm="rlm", length="1k", samples=1)
    roles = {"sub": _model("sub", "Ada")}
    (sample,) = _samples(task, tmp_path, "```repl\nFINAL(llm_query('a'))\n```", model_roles=roles)
    assert sample.output.completion == "Ada"
    tokens = {name: usage.total_tokens for name, usage in sample.model_usage.items()}
    assert tokens == {"mockllm/model": 10, "mockllm/sub": 10}
    assert sample.metadata["run"]["tokens"] == 20
