"""`rlm-broker serve` as a process: what it prints, what it refuses, and how signals end it."""

import contextlib
import json
import resource
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.command import ENVIRONMENT, WAIT_S, run, sentence, started
from tests.support.forked_python import Python

KEY = "test-key-of-the-server"
LOW = 150
"""Descriptors that a process may have: few more than a server holds anyway."""


@contextmanager
def server(
    *arguments: str, cwd: Path | None = None, ignores: Sequence[signal.Signals] = (), **variables: str
) -> Iterator[Python]:
    environment = {**ENVIRONMENT, "SERVER_KEY": KEY, **variables}
    with started("serve", "--port", "0", *arguments, env=environment, cwd=cwd, ignores=ignores) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: Python) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def get(url: str, key: str | None = KEY) -> tuple[int, Any]:
    request = urllib.request.Request(url, headers={} if key is None else {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_server_is_ready_lists_models_and_ends_by_signal(tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text("one\ntwo\n")
    with server("--key", "env:SERVER_KEY", "--context", f"logs={tmp_path}") as process:
        base = address(process)
        assert get(base.removesuffix("/v1") + "/ready", None) == (200, {"status": "ready"})
        assert [model["id"] for model in get(f"{base}/models")[1]["data"]] == [
            "offline",
            "offline@logs",
            "offline@plain",
        ]
        assert get(f"{base}/models", "another-key-entirely")[0] == 401
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert err.startswith("rlm-broker serve: no model is named, so this is a demonstration by the stand-in")
        assert err.count("\n") == 1
        assert KEY not in out
        assert not any(each.is_running() for each in below)


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_signal_that_is_ignored_from_the_start_stays_ignored(ignored: signal.Signals) -> None:
    """Under `nohup`, and in the background of a script, only another signal ends the server."""
    other = signal.SIGINT if ignored is signal.SIGHUP else signal.SIGHUP
    with server("--key", "env:SERVER_KEY", "-m", "offline", ignores=[ignored]) as process:
        base = address(process)
        for _ in range(2):  # a second signal ends a server that the first has told to end
            process.send_signal(ignored)
            assert get(base.removesuffix("/v1") + "/ready", None) == (200, {"status": "ready"})
        process.send_signal(other)
        _, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (0, "")


def test_flood_of_half_open_connections_is_survived_quietly() -> None:
    """More connections come than the process may have descriptors; a client of another connection is answered."""
    with server("--key", "env:SERVER_KEY") as process, contextlib.ExitStack() as many:
        base = address(process)
        port = urlsplit(base).port
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LOW, LOW))
        for _ in range(2 * LOW):
            half_open = many.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            with contextlib.suppress(OSError):
                half_open.sendall(b"G")
        assert get(f"{base}/models")[0] == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 2


def test_key_is_made_and_printed_where_none_is_given() -> None:
    with server() as process:
        base = address(process)
        assert process.stdout is not None
        key = process.stdout.readline().strip().removeprefix("key: ")
        assert get(f"{base}/models", key)[0] == 200


def test_settings_file_names_keys_contexts_and_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some notes")
    config = tmp_path / "server.toml"
    config.write_text(
        f"""
        [serve]
        contexts = {{ notes = "{tmp_path}/notes.txt" }}
        [serve.keys.ann]
        key = "env:SERVER_KEY"
        models = ["small"]
        [models.small]
        name = "offline"
        """
    )
    with server("--config", str(config)) as process:
        assert [model["id"] for model in get(f"{address(process)}/models")[1]["data"]] == [
            "small",
            "small@notes",
            "small@plain",
        ]


def test_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 2
    assert f"the port {port} is in use" in sentence(done)


def test_projects_file_with_a_server_needs_trust(tmp_path: Path) -> None:
    (tmp_path / "rlm-broker.toml").write_text('[serve]\nhost = "0.0.0.0"\nbehind_proxy = true\n')
    with server(cwd=tmp_path) as process:
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
        assert "rlm-broker.toml sets serve: look at it" in err
