"""`rlm-broker batch` as users run it: processes of their own, and a provider that counts what it was asked."""

import contextlib
import json
import re
import signal
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from rlm_broker.batch.status import read_status
from rlm_broker.cli.batch import STOPPING
from rlm_broker.cli.main import cli
from tests.support.command import ENVIRONMENT, WAIT_S, run, sentence
from tests.support.command import started as started_command
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure
from tests.support.forked_python import Python
from tests.support.terminals import lines_shown, on_a_terminal
from tests.support.waiting import until_now

CODE = "```repl\nFINAL(llm_query('Which name is in: ' + context))\n```"
NAMES = ("Ada", "Bob", "Cy", "Di")
MORE = len(NAMES) + 1
"""More requests than a batch makes at the same time."""


class Provider:
    """Answers roots with `CODE`, and what the code asks with the name in its prompt.

    Attributes:
        held: Names whose prompts get no answer for now.
        late: Names whose prompts get an answer after two seconds.
        ends: Names whose prompts get one when `MORE` requests wait.
        asked: Prompts of code that were answered, with their number.
        roots: Calls of roots.
        waiting: Prompts that got no answer.
        refuses: Whether calls of an item that asks for it fail.
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.ends: set[str] = set()
        self.late: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.roots = self.waiting = 0
        self.refuses = True

    def __call__(self, request: dict[str, Any]) -> Answer:
        """Answer one request."""
        last = str(request["messages"][-1]["content"])
        if last == "go":
            return replace(completion("gone"), together=MORE)
        if "Refuse this" in json.dumps(request["messages"]) and self.refuses:
            return Answer(status=400)
        if not last.startswith("Which name is in: "):
            self.roots += 1
            return completion(CODE, 100, 10)
        name = last.split()[-1]
        if name in self.held:
            self.waiting += 1
            return Answer(never=True)
        self.asked[name] += 1
        answer = completion(name, 20, 2, delay_s=2 if name in self.late else 0)
        return replace(answer, together=MORE if name in self.ends else 1)


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def server(provider: Provider) -> Iterator[FakeOpenAI]:
    with FakeOpenAI(provider, models=["m"]) as server:
        yield server


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """A file with an item for each of `NAMES`."""
    file = tmp_path / "in.jsonl"
    lines = [{"id": f"i-{name}", "question": "Which name?", "context": f"It is {name}"} for name in NAMES]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def batch(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process: modules that are imported already are most of the time of a new one."""
    done = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    return subprocess.CompletedProcess([], done.exit_code, done.stdout, done.stderr)


def of(server: FakeOpenAI, items: Path | str, out: Path, *options: str | Path) -> list[str]:
    """Return the arguments of a batch with the model of the server."""
    model = ("--model", "m", "--base-url", server.base_url)
    return list(map(str, ("batch", items, "--out", out, *model, *options)))


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


@contextlib.contextmanager
def started(*arguments: str, stdin: int = subprocess.DEVNULL) -> Iterator[Python]:
    """Run a command for the length of a `with`; at its end, what is left is killed."""
    with started_command(*arguments, stdin=stdin) as process:
        try:
            yield process
        finally:
            process.kill()


def status_of(out: Path) -> dict[str, Any]:
    done = batch("batch", "--status", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


# -- a batch from its start to its end ---------------------------------------------------------------------------------


def test_each_item_gets_one_whole_line(server: FakeOpenAI, items: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run(*of(server, items, out))
    assert (done.returncode, done.stdout) == (0, "")
    lines = lines_of(out)
    assert {id: line["answer"] for id, line in lines.items()} == {f"i-{name}": name for name in NAMES}
    line = lines["i-Ada"]
    assert line["status"] == "answered"
    assert line["usage"]["m"] == {"total_calls": 2, "total_input_tokens": 120, "total_output_tokens": 12}
    assert {depth: usage["total_calls"] for depth, usage in line["usage_by_depth"].items()} == {"0": 1, "1": 1}
    assert "messages" not in line
    last = done.stderr.splitlines()[-1]
    assert last.startswith("4 items: 4 answered; ")
    assert last.endswith(", 8 calls, 480 tokens in and 48 out, cost unknown")


def test_failure_is_a_result_until_it_is_retried(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path
) -> None:
    """The same command does not ask a failed item again; with --retry-failed it does."""
    out = tmp_path / "out.jsonl"
    items.write_text(items.read_text().replace("Which name?", "Refuse this", 1))
    done = batch(*of(server, items, out, "--json"))
    assert done.returncode == 1
    shown = json.loads(done.stdout)
    assert (shown["done"], shown["failed"]) == (4, {"provider": 1})
    assert "i-Ada failed: m: HTTP status 400" in done.stderr
    line = lines_of(out)["i-Ada"]
    assert (line["status"], line["answer"], line["error"]["kind"]) == ("failed", None, "provider")
    asked = len(server.requests)
    assert batch(*of(server, items, out, "-q")).returncode == 1
    assert len(server.requests) == asked
    provider.refuses = False
    assert batch(*of(server, items, out, "-q", "--retry-failed")).returncode == 0
    assert len(server.requests) == asked + 2
    assert lines_of(out)["i-Ada"]["answer"] == "Ada"


def test_fail_fast_ends_the_batch_at_a_failure(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    items.write_text(items.read_text().replace("Which name?", "Refuse this", 1))
    provider.held = set(NAMES)
    done = batch(*of(server, items, out, "-q", "--fail-fast"))
    assert done.returncode == 1
    assert "i-Ada failed: m: HTTP status 400" in sentence(done)
    provider.held.clear()
    provider.refuses = False
    assert batch(*of(server, items, out, "-q", "--fail-fast", "--retry-failed")).returncode == 0
    assert len(lines_of(out)) == len(NAMES)


def test_batch_limit_names_the_way_on(server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path) -> None:
    """The limit is that of all processes together, and raising it goes on."""
    out = tmp_path / "out.jsonl"
    one = ("--max-concurrent", "1")
    done = batch(*of(server, items, out, *one, "--batch-tokens", "150"))
    assert done.returncode == 3
    said = done.stderr.splitlines()[-1]
    assert "max_tokens = 150" in said
    assert "raise --batch-tokens, and the same command goes on" in said
    assert batch(*of(server, items, out, *one, "--batch-tokens", "150")).returncode == 3
    assert batch(*of(server, items, out, *one, "--batch-tokens", "9999")).returncode == 0
    assert provider.asked == Counter(NAMES)
    assert provider.roots == len(NAMES)


def test_trajectories_scores_and_values_of_output_types(server: FakeOpenAI, items: Path, tmp_path: Path) -> None:
    """The lines are what `datasets` and trainers read: messages with a role and a text."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "scores.py").write_text(
        "async def score(item, result):\n    return {'right': result.parsed in item.context}\n"
    )
    (tmp_path / "schema.json").write_text('{"type": "string"}')
    options = (
        "--trajectories",
        "--score",
        f"{tmp_path / 'scores.py'}:score",
        "--output-type",
        tmp_path / "schema.json",
    )
    assert batch(*of(server, items, out, "-q", *options)).returncode == 0
    for id, line in lines_of(out).items():
        assert line["score"] == {"right": True}
        assert f"i-{line['parsed']}" == id
        assert {type(message["content"]) for message in line["messages"]} == {str}
        roles = [message["role"] for message in line["messages"]]
        assert roles[:3] == ["system", "user", "assistant"]
        assert all(message.keys() == {"role", "content"} for message in line["messages"])


def test_scores_that_fail_are_told(server: FakeOpenAI, items: Path, tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def score(item, result):\n    return 1 / 0\n")
    out = tmp_path / "out.jsonl"
    done = batch(*of(server, items, out, "-q", "--score", f"{tmp_path / 'scores.py'}:score"))
    assert done.returncode == 1
    assert "scores failed, the first with ZeroDivisionError: division by zero" in done.stderr
    assert all("ZeroDivisionError" in line["score_error"] for line in lines_of(out).values())


def test_items_of_stdin_are_asked_as_they_come(server: FakeOpenAI, items: Path, tmp_path: Path) -> None:
    """A wrong line of stdin ends the batch when its turn comes. The results before it stay, and a file goes on."""
    out = tmp_path / "out.jsonl"
    first = items.read_text().splitlines(keepends=True)[0]
    with started(*of(server, "-", out, "-q"), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(first)
        process.stdin.flush()
        until_now(lambda: out.exists() and out.read_bytes().endswith(b"\n"))
        _, err = process.communicate("nonsense\n", timeout=WAIT_S)
    assert process.returncode == 2
    assert "rlm-broker batch: line 2 of stdin is not a JSON object" in err
    assert batch(*of(server, items, out, "-q")).returncode == 0
    assert len(lines_of(out)) == len(NAMES)
    assert len(server.requests) == 2 * len(NAMES)


# -- ends from outside -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGINT] * 2, [signal.SIGTERM] * 2])
def test_ended_batch_goes_on_without_paying_twice(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    """Two items end, two wait for their second call. A second signal ends the process at once. The same command goes
    on."""
    out = tmp_path / "out.jsonl"
    provider.held = {"Cy", "Di"}
    with started(*of(server, items, out)) as process:
        until_now(lambda: out.exists() and out.read_bytes().count(b"\n") == 2)
        until_now(lambda: read_status(out).unfinished == 2)
        shown = status_of(out)
        assert shown["process"] == process.pid
        assert (shown["done"], shown["answered"], shown["failed"]) == (2, 2, {})
        refused = batch(*of(server, items, out))
        below = psutil.Process(process.pid).children(recursive=True)
        for position, number in enumerate(numbers, 1):
            process.send_signal(number)
            if position < len(numbers):
                assert process.stderr is not None
                assert process.stderr.readline() == f"{STOPPING}\n"
        _, err = process.communicate(timeout=WAIT_S)
    assert refused.returncode == 2
    assert "another process writes to" in sentence(refused)
    assert psutil.wait_procs(below, timeout=WAIT_S)[1] == []
    if number is signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert "rlm-broker batch: stopped; the same command goes on" in err
        assert STOPPING not in err
        assert "Traceback" not in err
    assert read_status(out).process is None
    provider.held.clear()
    roots = provider.roots
    assert roots == len(NAMES)
    done = batch(*of(server, items, out, "--json"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["replayed"]["total_calls"] == 2
    assert provider.roots == roots
    assert provider.asked == Counter(NAMES)
    assert {id: line["answer"] for id, line in lines_of(out).items()} == {f"i-{name}": name for name in NAMES}
    assert lines_of(out)["i-Cy"]["usage"]["m"]["total_calls"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_lets_a_call_under_way_end(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Its answer is paid, and is not asked for again. With two such calls, the item of the first may be finished
    before the second one ends."""
    out = tmp_path / "out.jsonl"
    provider.ends = {"Di"}
    with started(*of(server, items, out)) as process:
        until_now(lambda: provider.asked["Di"] == 1 and out.read_bytes().count(b"\n") == len(NAMES) - 1)
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.readline() == f"{STOPPING}\n"
        ask = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
        for _ in range(MORE - 1):
            threading.Thread(target=urllib.request.urlopen, args=(f"{server.base_url}/chat/completions", ask)).start()
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number
    assert STOPPING not in err
    assert err.splitlines()[-1] == "rlm-broker batch: stopped; the same command goes on"
    provider.ends.clear()
    assert json.loads(batch(*of(server, items, out, "--json")).stdout)["replayed"]["total_calls"] == 2
    assert provider.asked == Counter(NAMES)
    assert provider.roots == len(NAMES)
    assert lines_of(out).keys() == {f"i-{name}" for name in NAMES}


def test_wrong_key_ends_the_batch_with_one_sentence(tmp_path: Path, items: Path) -> None:
    """No item is failed for it, and the same command goes on once that is put right."""
    out = tmp_path / "out.jsonl"
    with FakeOpenAI(failure(403, "this key may not"), models=["m"]) as server:
        done = batch(*of(server, items, out, "-q"))
    assert done.returncode == 5
    assert sentence(done) == (
        "rlm-broker batch: every call would fail: m: HTTP status 403: this key may not; the same command goes on once "
        "that is put right"
    )
    assert lines_of(out) == {}
    with FakeOpenAI(Provider(), models=["m"]) as server:
        assert batch(*of(server, items, out, "-q")).returncode == 0
    assert len(lines_of(out)) == len(NAMES)


def test_shards_of_tasks_are_looked_at_and_merged(
    server: FakeOpenAI, items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks of three run. Each knows only its items, and ends alone."""
    out, files = tmp_path / "out.jsonl", set()
    for task in ("1", "3"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        assert json.loads(batch(*of(server, items, out, "--shard", "auto/3", "--json")).stdout)["failed"] == {}
        files.add(f"out.{task}-of-3.jsonl")
    assert {path.name for path in tmp_path.glob("out*.jsonl")} == files
    assert status_of(out)["shards"] == {"there": 2, "of": 3}
    done = batch("batch", "--merge", out)
    assert done.returncode == 1
    assert "shards      2 of 3\ndone        3 items\n" in done.stdout
    assert {line["answer"] for line in lines_of(out).values()} == {"Ada", "Cy", "Di"}


def test_input_that_was_moved_with_its_files_goes_on(server: FakeOpenAI, tmp_path: Path) -> None:
    (tmp_path / "before" / "logs").mkdir(parents=True)
    (tmp_path / "before" / "logs" / "a.log").write_text("It is Ada")
    (tmp_path / "before" / "in.jsonl").write_text('{"id": "a", "path": "logs/a.log"}\n{"id": "b", "path": "logs"}\n')
    asked = []
    for folder, moved in (("before", "after"), ("after", "end")):
        batch(*of(server, tmp_path / folder / "in.jsonl", tmp_path / folder / "out.jsonl", "-q"))
        assert len(lines_of(tmp_path / folder / "out.jsonl")) == 2
        asked.append(len(server.requests))
        (tmp_path / folder).rename(tmp_path / moved)
    assert asked[0] == asked[1] > 0


def test_samples_and_other_limits_are_in_the_lines(server: FakeOpenAI, items: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = items.read_text().splitlines(keepends=True)[0]
    whole = items.read_text()
    items.write_text(first)
    assert batch(*of(server, items, out, "-q", "--samples", "2")).returncode == 0
    items.write_text(whole)
    other = of(server, items, out, "-q", "--samples", "2", "--limit", "max_iterations=9")
    refused = batch(*other)
    assert refused.returncode == 2
    assert "limits.max_iterations was 30 and is 9; " in refused.stderr
    assert "or take them for the items that are left: --settings-changed" in refused.stderr
    assert batch(*other, "--settings-changed").returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter((line["id"], line["sample"]) for line in lines) == Counter(
        (f"i-{name}", sample) for name in NAMES for sample in (0, 1)
    )
    changed = [line.get("settings_changed", {}).get("limits.max_iterations") for line in lines]
    assert changed == [None] * 2 + [9] * 6


def test_batch_is_listed_and_stopped(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs of the process are listed. Stopping the process ends the batch, and not only the runs of the moment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "XDG_RUNTIME_DIR", str(tmp_path))
    provider.held = set(NAMES)
    with started(*of(server, items, tmp_path / "out.jsonl", "-q", "--max-concurrent", "2")) as process:
        until_now(lambda: provider.waiting == 2)
        (listed,) = json.loads(batch("runs", "--json").stdout)["processes"]
        assert (listed["pid"], listed["command"], len(listed["runs"])) == (process.pid, "batch", 2)
        assert batch("runs", "stop", str(process.pid), "--now").returncode == 0
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert err == "rlm-broker batch: stopped; the same command goes on\n"
    assert provider.roots == 2


def test_terminal_shows_one_line_with_a_bar(
    server: FakeOpenAI, provider: Provider, items: Path, tmp_path: Path
) -> None:
    """Failures are told above the line, with no character that steers the terminal. Ctrl+C ends the batch."""
    provider.late = {"Di"}
    items.write_text(items.read_text().replace("Which name?", "Refuse this", 1).replace("i-Ada", r"i-\u001b[2JAda"))
    arguments = of(server, items, tmp_path / "out.jsonl", "--max-concurrent", "1")

    def has_waited(seen: bytes) -> bool:
        return b"3 of 4 done" in seen and provider.asked["Di"] == 1

    lines = lines_shown(on_a_terminal(*arguments, keys=b"\x03", after=has_waited, COLUMNS="120"))
    assert any(re.search(r"━+ 3 of 4 done, .* left, 1 running, .* runs/s, 1 failed, 5 calls, ", line) for line in lines)
    assert r"i-\x1b[2JAda failed: m: HTTP status 400" in "\n".join(lines)
    assert lines[-1] == "rlm-broker batch: stopped; the same command goes on"


# -- wrong use ---------------------------------------------------------------------------------------------------------

LONG = "n" * 256
"""A name for which `Path.exists` raises, as it does below a folder that cannot be read, for users other than root."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument 'INPUT'"),
        (["IN"], "Missing option '--out'"),
        (["IN", "--status", "OUT"], "give either INPUT or --status"),
        (["--status", "OUT", "-q"], "--quiet has no effect beside --status"),
        (["--status", "OUT"], "out.jsonl: No such file or directory"),
        (["IN", "--out", "IN"], "in.jsonl is the file that is read"),
        (["IN", "--out", "-"], "--out - names no file"),
        (["IN", "--out", "OUT", "--score", "x"], "score: x names no function"),
        (["IN", "--out", "OUT", "--batch-tokens", "x"], "limit max_tokens = x (--batch-tokens): "),
        (["IN", "--out", "OUT", "--batch-budget-usd", "nan"], "limit max_budget_usd = nan (--batch-budget-usd): "),
        (["IN", "--out", "OUT", "--batch-timeout", "2 h 1"], "limit timeout_s = 2 h 1 (--batch-timeout): give"),
        (["IN", "--out", "OUT", "--model", "nonsense"], "'nonsense' is not the name of a model"),
        (["IN", "--out", "/nowhere/out.jsonl"], "/nowhere/out.jsonl: No such file or directory"),
        (["IN", "--out", LONG], f"cannot write to {LONG}: File name too long"),
        (["--status", LONG], f"cannot read {LONG}: File name too long"),
        (["IN", "--out", "OUT", "--root", LONG], f"{LONG} is not a folder: name one by --root"),
    ],
)
def test_wrong_use_is_one_sentence(items: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    places = {"IN": str(items), "OUT": str(tmp_path / "out.jsonl")}
    done = batch("batch", *(places.get(each, each) for each in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
