"""The options with which a command runs on nodes."""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.cli.clusters import opened_cluster
from rlm_broker.errors import ConfigurationError
from tests.support.command import WAIT_S
from tests.support.command import started as started_command

NONE = {"nodes": None, "advertise": None, "token_file": None, "plain": False, "cluster": None, "join_timeout_s": None}
JOIN = "rlm-broker ask: run on each node, with a copy of the token file: rlm-broker "


@contextlib.contextmanager
def started(*words: str | Path) -> Any:
    """A command, which is killed if it has not ended at the end of the test."""
    with started_command(*words) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ask_runs_on_a_node_that_joins_by_its_command(tmp_path: Path) -> None:
    """The command prints how a node joins. The token is in a file that only the user can read, and nowhere else."""
    context = tmp_path / "context.txt"
    context.write_text("a\nb\nc\n")
    with started("ask", "How many lines are there?", context, "--nodes", "127.0.0.1:0") as asking:
        line = asking.stderr.readline()
        assert line.startswith(JOIN)
        words = shlex.split(line.removeprefix(JOIN))
        file = Path(words[words.index("--token-file") + 1])
        assert file.stat().st_mode & 0o777 == 0o600
        secret = file.read_text().strip()
        with started(*words) as node:
            out, err = asking.communicate(timeout=WAIT_S)
            assert node.wait(WAIT_S) == 0
    assert asking.returncode == 0, err
    assert out.startswith("3 lines\n")
    assert secret not in line + out + err
    assert not file.exists()


def test_batch_runs_on_a_node(tmp_path: Path) -> None:
    """No run takes place here: the batch waits for its node."""
    (tmp_path / "in.jsonl").write_text('{"id": "a", "question": "How many lines are there?", "context": "1\\n2\\n"}\n')
    given = tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--token-file", tmp_path / "token"
    with started("batch", *given, "--nodes", "127.0.0.1:0") as batch:
        words = shlex.split(batch.stderr.readline().rpartition(": rlm-broker ")[2])
        assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()
        with started(*words) as node:
            _, err = batch.communicate(timeout=WAIT_S)
            assert node.wait(WAIT_S) == 0
    assert batch.returncode == 0, err
    assert "rlm-broker batch: the node " in err
    assert " has joined the cluster\n" in err
    assert json.loads((tmp_path / "out.jsonl").read_text())["answer"].startswith("2 lines")


def test_a_token_file_of_the_user_is_made_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with opened_cluster("ask", {**NONE, "nodes": "127.0.0.1:0", "token_file": str(file)}) as nodes:
        assert nodes is not None
        assert file.read_text() == f"{nodes.token}\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_token_that_is_there_is_taken(tmp_path: Path) -> None:
    """A file that exists has the token, as a secret of Kubernetes does; it is not written to."""
    file = tmp_path / "token"
    file.write_text("x" * 40 + "\n")
    with opened_cluster("ask", {**NONE, "nodes": "127.0.0.1:0", "token_file": str(file)}) as nodes:
        assert nodes is not None
        assert nodes.token == "x" * 40
    assert file.read_text() == "x" * 40 + "\n"


def test_without_options_there_is_no_cluster() -> None:
    with opened_cluster("ask", NONE) as cluster:
        assert cluster is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nodes": "127.0.0.1:0", "cluster": "auto"}, "give either --nodes or --cluster"),
        ({"plain": True}, "--plain needs --nodes"),
        ({"token_file": "x", "cluster": "auto"}, "--token-file needs --nodes"),
        ({"advertise": "host"}, "--advertise needs --nodes"),
        ({"join_timeout_s": 5.0}, "--join-timeout-s needs --nodes or --cluster"),
        ({"nodes": "127.0.0.1"}, "bind must be an address and a port"),
        ({"nodes": "127.0.0.1:0", "token_file": "/nonexistent/token"}, "/nonexistent/token cannot be written"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says), opened_cluster("ask", {**NONE, **given}):
        pass
