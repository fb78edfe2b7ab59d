"""Models on the command line: named, served, recorded, and named wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import command
from tests.support.command import run, sentence
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("some text")
    return file


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file of settings."""
    environment = {**command.ENVIRONMENT, "XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setattr(command, "ENVIRONMENT", environment)
    (tmp_path / "rlm-broker").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "rlm-broker" / "config.toml"


NO_SERVERS = {f"{name}_BASE_URL": "http://127.0.0.1:1/v1" for name in ("OLLAMA", "LLAMACPP", "VLLM", "LMSTUDIO")}


def answer(request: dict[str, Any]) -> Answer:
    messages = request["messages"]
    if messages[0]["role"] != "system":
        return completion("read", 10, 2)
    if "Block 1" in str(messages[-1]["content"]):
        return completion("FINAL(it says: some text)", 50, 5)
    return completion("```repl\nprint(llm_query('read: ' + context))\n```", 100, 20)


def test_a_server_is_asked_by_its_address_and_what_was_spent_is_shown(text: Path) -> None:
    with FakeOpenAI(answer, models=["m", "small"]) as server:
        done = run("ask", "What?", text, "--model", "m", "--sub-model", "small", "--base-url", server.base_url)
    assert (done.returncode, done.stdout) == (0, "it says: some text\n")
    assert [request["model"] for request in server.requests] == ["m", "small", "m"]
    shown = [" ".join(line.split()) for line in done.stderr.splitlines()]
    assert "m 2 calls, 150 tokens in and 25 out, cost unknown" in shown
    assert "small 1 call, 10 tokens in and 2 out, cost unknown" in shown
    assert "depth 0 2 calls, 150 tokens in and 25 out, cost unknown" in shown
    assert any(line.endswith(" s, 2 turns, 3 calls, 160 tokens in and 27 out, cost unknown") for line in shown)


def test_what_was_recorded_is_replayed_without_a_server(text: Path, tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    with FakeOpenAI(answer) as server:
        options = ("--model", "m", "--base-url", server.base_url, "--record", recording)
        assert run("ask", "What?", text, *options).returncode == 0
        again = run("ask", "What?", text, *options)
        said = f"rlm-broker ask: {recording} exists: remove it, or record to another file"
        assert (again.returncode, sentence(again)) == (2, said)
    replayed = run("ask", "What?", text, "--replay", recording)
    assert replayed.stdout == "it says: some text\n"
    assert "3 calls (3 of them stored, not paid)\n" in replayed.stderr
    told = run("ask", "What else?", text, "--replay", recording).stderr
    assert told.count("+Question: What else?") == 1
    assert told.splitlines().index("+Question: What else?") > told.splitlines().index("--- recorded")
    diverged = run("ask", "What else?", text, "-q", "--replay", recording, "--json")
    assert diverged.returncode == 1
    error = json.loads(diverged.stdout)["error"]
    assert error["kind"] == "replay"
    assert "-Question: What?" in error["message"]


def test_models_and_routes_come_from_the_users_file(text: Path, config: Path) -> None:
    with FakeOpenAI(answer) as big, FakeOpenAI(answer) as small:
        config.write_text(
            f"model = 'big'\nsub_model = 'small'\n"
            f"[models.big]\nbase_url = '{big.base_url}'\nname = 'big-1'\noptions = {{temperature = 0.1}}\n"
            f"[models.small]\nbase_url = '{small.base_url}'\napi_key = 'env:SMALL_KEY'\nrequests_per_minute = 100\n"
            "[[routes]]\nmatch = 'tiny-*'\nto = 'small'\n"
        )
        missing = run("ask", "What?", text)
        assert missing.returncode == 2
        assert "model 'small' needs SMALL_KEY for its api_key, which is not set: export it" in sentence(missing)
        command.ENVIRONMENT["SMALL_KEY"] = "sk-of-the-test"
        assert run("ask", "What?", text, "-q").stdout == "it says: some text\n"
        shown = run("models").stdout
        listed = json.loads(run("models", "--json").stdout)
    assert [request["temperature"] for request in big.requests] == [0.1, 0.1]
    assert [request["model"] for request in small.requests] == ["small"]
    assert small.headers[-1]["authorization"] == "Bearer sk-of-the-test"
    assert "route tiny-* at depth 0- to small" in shown
    assert "sk-of-the-test" not in shown
    assert {entry["name"] for entry in listed["models"]} == {"root", "sub", "big", "small"}


def test_who_would_serve_a_call_and_why_is_told(config: Path) -> None:
    config.write_text(
        "[models.small]\nname = 'offline'\n[[routes]]\nmatch = 'tiny-*'\ndepths = '1-2'\nto = 'small'\n"
        "[[routes]]\ndepths = '3-'\nto = 'small'"
    )
    assert run("models", "tiny-1").stdout == "offline: route tiny-* at depth 1-2 to small\n"
    told = {"model": "offline", "why": "it is registered under that name"}
    assert json.loads(run("models", "small", "--json").stdout) == told
    refused = run("models", "tiny-1", "--depth", "3")
    assert refused.returncode == 2
    assert sentence(refused) == "rlm-broker models: code may not call model 'tiny-1'; allowed: offline, small, tiny-*"


def test_a_model_that_the_server_does_not_have_and_a_key_that_it_does_not_take(text: Path) -> None:
    with FakeOpenAI(failure(401, "who are you?"), models=["one"]) as server:
        wrong = run("ask", "What?", text, "-q", "--base-url", server.base_url, "--model", "other")
        unpriced = ("--model", "one", "--base-url", server.base_url, "--limit", "max_budget_usd=1")
        budget = run("ask", "What?", text, "-q", *unpriced)
        denied = run("ask", "What?", text, "-q", "--base-url", server.base_url, "--model", "one")
    assert (wrong.returncode, budget.returncode, denied.returncode) == (2, 2, 5)
    assert "has no model 'other'; it has: one" in sentence(wrong)
    assert "max_budget_usd cannot be kept: the price of model 'one' is not known" in sentence(budget)
    assert sentence(denied).startswith("rlm-broker ask: one: HTTP status 401: who are you? (no key was sent")


@pytest.mark.usefixtures("config")
def test_a_project_that_is_not_trusted_is_looked_at_first(text: Path) -> None:
    with FakeOpenAI(answer) as server:
        Path("rlm-broker.toml").write_text(f"model = 'm'\nbase_url = '{server.base_url}'\n")
        refused = run("ask", "What?", text, "-q")
        assert refused.returncode == 2
        assert "rlm-broker.toml sets base_url, model = m: look at it, and if you trust it run" in sentence(refused)
        assert server.requests == []
        assert run("config", "trust").returncode == 0
        assert run("ask", "What?", text, "-q").stdout == "it says: some text\n"


def test_replies_are_kept_where_the_settings_say(config: Path, text: Path, tmp_path: Path) -> None:
    with FakeOpenAI(answer) as server:
        config.write_text(f"model = 'm'\nbase_url = '{server.base_url}'\ncache = '{tmp_path}/replies'")
        first, second = (run("ask", "What?", text) for _ in range(2))
    assert first.stdout == second.stdout
    assert len(server.requests) == 3
    assert "3 calls (3 of them stored, not paid)" in second.stderr


def test_a_model_that_is_not_asked_for_may_lack_its_key(config: Path, text: Path) -> None:
    config.write_text("[models.spare]\nname = 'openai/gpt-5'\n")
    assert run("ask", "What?", text, "-q").returncode == 0
    assert "needs OPENAI_API_KEY" in run("models").stdout
    refused = run("ask", "What?", text, "-q", "--model", "spare")
    assert (refused.returncode, "needs OPENAI_API_KEY" in sentence(refused)) == (2, True)


def test_models_are_shown_without_their_keys_and_a_mistyped_one_is_suggested(config: Path) -> None:
    config.write_text("model = 'openai/gpt-5'\n[models.fast]\nname = 'openai/gpt-5-mini'\n")
    done = run("models")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()][:4] == ["root", "sub", "fast", "names"]
    assert done.stdout.count("needs OPENAI_API_KEY") == 3
    assert run("models", "fast").stdout == "fast: it is registered under that name\n"
    assert sentence(run("models", "fsat")).endswith("allowed: openai/gpt-5, fast; did you mean fast?")
    assert sentence(run("models", "--model", "fsat")).endswith("; did you mean fast?")


def test_what_a_server_has_and_what_names_lack_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**command.ENVIRONMENT, **NO_SERVERS, "GROQ_API_KEY": "sk-groq", "SERVER_KEY": "sk-server"}
    monkeypatch.setattr(command, "ENVIRONMENT", keys)
    with FakeOpenAI(answer, models=["small", "large"]) as server:
        keys["OLLAMA_BASE_URL"] = server.base_url
        shown = run("models", "--base-url", server.base_url, "--api-key", "env:SERVER_KEY")
        listed = json.loads(run("models", "-m", "small", "--base-url", server.base_url, "--json").stdout)
    told = shown.stdout.splitlines()
    assert told[:4] == [
        "root  offline",
        "sub   offline",
        f"server {server.base_url}: it has: small, large",
        "names of models begin with:",
    ]
    for line in (
        "  groq/        GROQ_API_KEY is set",
        "  xai/         XAI_API_KEY is not set",
        "  ollama/      has small, large",
        "  vllm/        no vLLM answers at http://127.0.0.1:1/v1",
    ):
        assert line in told
    assert server.headers[0]["authorization"] == "Bearer sk-server"
    assert listed["names"]["ollama"] == {"missing": None, "models": ["small", "large"]}
    assert listed["names"]["xai"]["missing"] == "XAI_API_KEY is not set"
    assert listed["server"] == {"base_url": server.base_url, "models": ["small", "large"]}
    assert listed["providers"] == {"groq": "GROQ_API_KEY"}
    gone = run("models", "--base-url", server.base_url)
    assert f"server {server.base_url}: cannot connect to" in gone.stdout
    assert gone.returncode == 0


def test_default_model_is_written_into_the_users_file_and_taken_by_ask(config: Path, text: Path) -> None:
    rest = "cache = 'replies' # kept\n\n[models.big]\nname = 'm'\nbase_url = '{}'\n"
    with FakeOpenAI(answer) as server:
        (elsewhere := config.with_name("dotfiles.toml")).write_text(rest.format(server.base_url))
        config.symlink_to(elsewhere)
        for name in ("xai/grok-4", "big"):  # the second replaces the first
            done = run("models", "default", name)
            assert (done.returncode, done.stdout) == (0, f"{config}: model = {name}\n")
        assert config.is_symlink()
        assert elsewhere.read_text() == 'model = "big"\n' + rest.format(server.base_url)
        assert run("models", "default").stdout == f"big  ({config})\n"
        asked = run("ask", "What?", text)
    assert asked.stdout == "it says: some text\n"
    assert "demonstration" not in asked.stderr
    refused = run("models", "default", "nonsense")
    assert (refused.returncode, "'nonsense' is not the name of a model" in sentence(refused)) == (2, True)
    assert "give one name, or `models default b`" in sentence(run("models", "a", "b"))


@pytest.mark.usefixtures("config")
def test_ask_without_a_model_says_what_was_found_and_pays_nothing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ENVIRONMENT", {**command.ENVIRONMENT, **NO_SERVERS})
    nothing = run("ask", "Where is some text?", text).stderr.splitlines()[0]
    assert nothing == (
        "rlm-broker ask: no model is named, so this is a demonstration by the stand-in offline, which searches and "
        "counts, and does not reason; found no key and no model server: `rlm-broker models` lists what --model takes"
    )
    command.ENVIRONMENT["OPENAI_API_KEY"] = "sk-of-the-test"
    assert (
        run("ask", "Where?", text).stderr.splitlines()[0].endswith("; found OPENAI_API_KEY: --model openai/gpt-5-mini")
    )
    with FakeOpenAI(answer, models=["qwen3:4b"]) as server:
        command.ENVIRONMENT["OLLAMA_BASE_URL"] = server.base_url
        found = run("ask", "Where is some text?", text)
    assert found.stderr.splitlines()[0].endswith("; found Ollama on this machine: --model ollama/qwen3:4b")
    assert found.stdout.startswith("some text\n")
    assert server.requests == []
    assert "found" not in run("ask", "Where?", text, "--model", "offline").stderr
    questions, results = text.with_name("questions.jsonl"), text.with_name("results.jsonl")
    questions.write_text('{"id": "a", "question": "Where?", "context": "here"}\n')
    assert "rlm-broker batch: no model is named, so this is" in run("batch", questions, "--out", results).stderr
