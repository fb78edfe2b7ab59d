"""`rlm-broker node` as a process: what it refuses, that it serves a cluster, and how it ends."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rlm_broker import RLM, ScriptedClient
from rlm_broker.cli.node import TOKEN_VARIABLE, target_of, token_of
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.errors import ConfigurationError
from tests.support.command import COMMAND, ENVIRONMENT, run, sentence
from tests.support.waiting import WAIT_S, until

HANGS = "```repl\nimport time\nprint('begun')\ntime.sleep(1000)\n```"
DIGITS = "ab" * 32


@contextlib.asynccontextmanager
async def node(nodes: Nodes, *more: str, token: str | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """Join a cluster by the command that it shows."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *nodes.join_command().split()[1:],
        *more,
        env={**ENVIRONMENT, TOKEN_VARIABLE: token or nodes.token},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, bytes, list[str]]:
    """Exit code, stdout, and lines of stderr."""
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out, err.decode().splitlines()


async def test_node_answers_and_ends_with_its_cluster() -> None:
    """By TLS, with a certificate made at the start, whose fingerprint the join command has."""
    async with Nodes("0.0.0.0:0", advertise="127.0.0.1") as nodes, node(nodes, "--name", "first") as process:
        async with RLM(ScriptedClient(["```repl\nFINAL(context.upper())\n```"]), sandbox=nodes) as rlm:
            completion = await rlm.acompletion("text", "Shout.")
        assert completion.response == "TEXT"
        assert [each.name for each in nodes.stats().nodes] == ["first"]
        host, port = nodes.address
        await nodes.aclose()
        assert await ended(process) == (
            0,
            b"",
            [
                f"rlm-broker node: joined {host}:{port} as first",
                "rlm-broker node: the cluster has ended: the cluster was closed",
            ],
        )


async def test_signal_ends_a_node_and_all_below_it() -> None:
    """Its run, whose block would go on for long, waits for another node."""
    async with (
        Nodes() as nodes,
        RLM(ScriptedClient([HANGS]), sandbox=nodes) as rlm,
        node(nodes) as process,
    ):
        running = asyncio.create_task(rlm.acompletion("text", "Hang."))
        await until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 3)  # fork server, init, REPL
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code, _, lines = await ended(process)
        assert code == 128 + signal.SIGTERM
        assert lines[1:] == ["rlm-broker node: stopped by SIGTERM: all runs of this node are ended"]
        await until(lambda: not any(each.is_running() for each in processes))
        assert not running.done()
        await until(lambda: not nodes.stats().nodes)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_refused_node_says_why() -> None:
    async with Nodes() as nodes, node(nodes, token="x" * 43) as process:
        code, _, (line,) = await ended(process)
    assert code == 2
    assert line.endswith(
        "the token is not valid, or not any more: take the join command that the orchestrator shows now"
    )


def test_broker_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 43 + "\n")
    done = run("node", "--connect", "127.0.0.1:1", "--token-file", token, "--wait-s", "0")
    assert done.returncode == 1
    assert sentence(done) == "rlm-broker node: the broker at 127.0.0.1:1 was not reached: Connection refused"


def test_no_option_takes_the_token_itself() -> None:
    """All users of a machine see the command lines of its processes."""
    shown = run("node", "--help").stdout
    assert "--token-file FILE" in shown
    assert "--token " not in shown
    done = run("node", "--connect", "127.0.0.1:1")
    assert done.returncode == 2
    assert sentence(done) == "rlm-broker node: no join token: give --token-file FILE, or set RLM_BROKER_NODE_TOKEN"


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:x", "host:0", "host:65536", "host:²", "host:-1"])
def test_address_must_have_host_and_port(address: str) -> None:
    with pytest.raises(ConfigurationError, match="give HOST:PORT"):
        target_of(address, DIGITS, plain=False)


def test_way_to_connect_must_be_said_beyond_loopback() -> None:
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1 is beyond loopback: give the broker's --fingerprint"):
        target_of("10.0.0.1:80", None, plain=False)
    with pytest.raises(ConfigurationError, match="and not both"):
        target_of("10.0.0.1:80", DIGITS, plain=True)
    assert target_of("10.0.0.1:80", None, plain=True).fingerprint is None
    assert target_of("[::1]:80", None, plain=False).host == "::1"
    assert target_of("10.0.0.1:80", DIGITS.upper(), plain=False).fingerprint == f"sha256:{DIGITS}"


def test_token_of_the_variable_is_not_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by the processes of a sandbox either, also if a file has the token."""
    monkeypatch.setenv(TOKEN_VARIABLE, " secret ")
    assert token_of(None) == "secret"
    assert TOKEN_VARIABLE not in os.environ
    monkeypatch.setenv(TOKEN_VARIABLE, "other")
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert token_of(str(file)) == "from-file"
    assert TOKEN_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "must have the join token"),
        (b"a b", "no other text"),
        (b"x" * 9_000, "no other text"),
        (b"\xff", "no text"),
    ],
    ids=["empty", "two words", "long", "no text"],
)
def test_token_file_must_have_one_token(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=why):
        token_of(str(file))
    with pytest.raises(ConfigurationError, match="missing cannot be read: No such file"):
        token_of(str(tmp_path / "missing"))
