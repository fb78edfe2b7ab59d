import asyncio
import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.trace import TraceWriter
from rlm_broker.rlm import RLM
from rlm_broker.watch import board, client, folder, messages, server
from rlm_broker.watch.board import BOARD
from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.messages import (
    MAX_REQUEST_BYTES,
    PROCESS,
    RefusedReply,
    StatusRequest,
    read_frame,
    replies,
)
from rlm_broker.watch.server import ControlSocket
from sandbox_worker.wire.frames import encode_frame
from tests.support.forked_child import in_child
from tests.support.forked_python import near, python
from tests.support.skips import NEEDS_ROOT
from tests.support.stand_ins import Hanging
from tests.support.waiting import WAIT_S, until

ANSWERS = "```repl\nFINAL(len(context))\n```"
STATUS = encode_frame(msgspec.json.encode(StatusRequest()), MAX_REQUEST_BYTES)
HERE = os.getpid()


@pytest.fixture
def control() -> Iterator[ControlSocket]:
    with ControlSocket("serve") as socket_of_this_process:
        yield socket_of_this_process
    BOARD.clear()


@contextlib.asynccontextmanager
async def connection(tmp_path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection with this process's control socket, by a client that says what a test wants."""
    (path,) = (tmp_path / "rlm-broker").glob("*.sock")
    own = socket.socket(socket.AF_UNIX)
    place = os.open(path.parent, os.O_RDONLY)
    try:
        own.connect(folder.address(place, path.name))
    finally:
        os.close(place)
    reader, writer = await asyncio.open_unix_connection(sock=own)
    yield reader, writer
    writer.transport.abort()


async def test_close_ends_a_connection_that_has_asked_nothing(tmp_path: Path) -> None:
    reported: list[dict[str, object]] = []
    control = ControlSocket("serve").start()
    background = EventLoopRef.background()
    background.call_soon(lambda: asyncio.get_running_loop().set_exception_handler(lambda _, of: reported.append(of)))
    async with connection(tmp_path) as (reader, _):
        await until(lambda: control._connections)
        await control.aclose()
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
    background.call_soon(lambda: asyncio.get_running_loop().set_exception_handler(None))
    assert not reported


async def told(reader: asyncio.StreamReader) -> object:
    async with asyncio.timeout(WAIT_S):
        return replies.decode(await read_frame(reader, 1 << 20))


def test_socket_is_only_there_while_it_is_open(tmp_path: Path) -> None:
    assert not BOARD.is_on
    with ControlSocket("ask"):
        assert BOARD.is_on
        (path,) = (tmp_path / "rlm-broker").iterdir()
        assert stat.S_ISSOCK(path.stat().st_mode)
        with ControlSocket("exec"):  # a process has one
            assert list((tmp_path / "rlm-broker").iterdir()) == [path]
        assert BOARD.is_on
    assert list((tmp_path / "rlm-broker").iterdir()) == []
    assert not BOARD.is_on


@pytest.mark.usefixtures("control")
async def test_unknown_requests_are_refused(tmp_path: Path) -> None:
    of_fields = (b'{"type":"fly"}', b'{"type":"follow","run":"a","after":-1}', b'{"type":"stop"}')
    for sent in (b"{}", b"[" * 4000, b"\xff\xfe", *of_fields):
        async with connection(tmp_path) as (reader, writer):
            writer.write(encode_frame(sent, MAX_REQUEST_BYTES))
            assert isinstance(await told(reader), RefusedReply), sent


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection without a reply."""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


@pytest.mark.usefixtures("control")
async def test_frame_that_cannot_be_read_ends_its_connection(tmp_path: Path) -> None:
    for sent in (b"\xff" * 64, (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\x09half"):
        async with connection(tmp_path) as (reader, writer):
            writer.write(sent)
            writer.write_eof()
            await ended(reader)
    (status,) = await MachineRuns().processes(WAIT_S)
    assert (status.pid, status.command) == (HERE, "serve")
    assert status.memory_bytes > 1 << 20


@pytest.mark.usefixtures("control")
async def test_stalled_request_and_too_many_connections_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(server, "MOST_CONNECTIONS", 1)
        async with connection(tmp_path), connection(tmp_path) as (reader, _):
            await ended(reader)
    monkeypatch.setattr(messages, "REQUEST_S", 0.01)
    async with connection(tmp_path) as (reader, writer):
        writer.write(b"\0\0")
        await ended(reader)


@pytest.mark.usefixtures("control")
async def test_stalled_follower_harms_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower never reads: the run ends, and then the connection does."""
    monkeypatch.setattr(messages, "STALLED_S", 0.05)
    prints = "```repl\nfor i in range(40): print('x' * 100_000)\nFINAL(1)\n```"
    async with RLM(ScriptedClient([prints])) as rlm:
        run = rlm.start("abc", "How long?")
        async with connection(tmp_path) as (_, writer):
            writer.write(encode_frame(msgspec.json.encode({"type": "follow", "run": run.id}), MAX_REQUEST_BYTES))
            assert (await run).response == "1"
            await until(lambda: not any("_connected" in str(task.get_coro()) for task in server._own._connections))  # type: ignore[union-attr]


@pytest.mark.usefixtures("control")
async def test_followed_lines_are_those_of_a_trace(tmp_path: Path) -> None:
    """Long events, lone surrogates and early ones included; the pieces of a reply are not."""
    code = "```repl\nprint('y' * 90_000, chr(0xd800))\nFINAL(len(context))\n```"
    trace = tmp_path / "trace.jsonl"
    with TraceWriter(trace) as writer:
        async with RLM(ScriptedClient([code]), on_event=writer) as rlm:
            run = rlm.start("abc", "How long?")
            lines = [line async for line in client.follow(HERE, run.id)]
            await run
            later = [line async for line in client.follow(HERE, run.id, after=3)]
    assert b"\n".join(lines) + b"\n" == trace.read_bytes()
    assert json.loads(lines[-1])["event"] == "run_ended"
    assert later == [line for line in lines if json.loads(line)["n"] > 3]


@pytest.mark.usefixtures("control")
async def test_follower_that_leaves_is_forgotten() -> None:
    hanging = Hanging()
    async with RLM(hanging) as rlm, rlm.start("abc", "How long?") as run:
        lines = client.follow(HERE, run.id)
        await anext(lines)
        log = run._job.log
        assert log is not None
        assert log._waiting
        await lines.aclose()  # type: ignore[attr-defined]
        await until(lambda: not log._waiting)
        assert not run.is_done


@pytest.mark.usefixtures("control")
async def test_quiet_run_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its follower would else take it for hung."""
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(client, "SILENT_S", 1.0)
    hanging = Hanging()
    async with RLM(hanging) as rlm, rlm.start("abc", "How long?") as run:
        lines = client.follow(HERE, run.id)
        async for line in lines:
            if json.loads(line)["event"] == "call_started":
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await anext(lines)
        assert not run.is_done


@pytest.mark.usefixtures("control")
async def test_stopped_run_has_its_best_answer() -> None:
    spins = "I guess 3.\n```repl\nprint(1)\nimport time; time.sleep(1000)\n```"
    async with RLM(ScriptedClient([spins])) as rlm:
        run = rlm.start("abc", "How long?")
        async for line in client.follow(HERE, run.id):
            if json.loads(line)["event"] == "block_started":
                (outcome,) = await MachineRuns().end(HERE, run.id)
        completion = await run
    assert (outcome.kind, outcome.id, outcome.state, outcome.has_ended) == ("run", run.id, "stopped", True)
    assert (completion.is_stopped, completion.response) == (True, "I guess 3.")


@pytest.mark.usefixtures("control")
async def test_all_of_a_process_is_stopped() -> None:
    async with RLM(Hanging()) as rlm, rlm.sandbox.repl() as own:
        runs = [rlm.start("abc", "How long?") for _ in range(2)]
        outcomes = await MachineRuns().end(HERE, PROCESS, now=True)
        assert [(each.kind, each.state) for each in outcomes] == [*[("run", "cancelled")] * 2, ("repl", "closed")]
        assert all(run.is_done for run in runs)
        assert own.is_closed


async def test_server_decides_how_it_stops() -> None:
    asked: list[bool] = []

    async def on_stop(now: bool) -> None:
        asked.append(now)

    with ControlSocket("serve", on_stop):
        (outcome,) = await MachineRuns().end(HERE, PROCESS)
    assert (asked, outcome.kind, outcome.state) == ([False], "process", "stopping")


@pytest.mark.usefixtures("control")
async def test_unknown_run_cannot_be_stopped_or_followed() -> None:
    with pytest.raises(ConfigurationError, match="has no run and no REPL 'other'"):
        await MachineRuns().end(HERE, "other")
    with pytest.raises(ConfigurationError, match="is not, or no longer, a run"):
        await anext(client.follow(HERE, "other"))


@pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)
def test_another_user_gets_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder keeps other users out. Here it is opened to them, so that the check of the peer is seen."""
    with tempfile.TemporaryDirectory() as outer:
        monkeypatch.setenv("XDG_RUNTIME_DIR", outer)
        with ControlSocket("serve"):
            (path,) = Path(outer, "rlm-broker").glob("*.sock")
            for each, mode in ((Path(outer), 0o755), (path.parent, 0o755), (path, 0o777)):
                each.chmod(mode)

            def asked_as(user: int) -> int:
                os.setresuid(user, user, user)
                with socket.socket(socket.AF_UNIX) as own, near(path) as address:
                    own.settimeout(WAIT_S)
                    own.connect(address)
                    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                        own.sendall(STATUS)
                        return len(own.recv(100))
                    return 0

            assert in_child(lambda: asked_as(65534)) == 0
            assert in_child(lambda: asked_as(0)) > 0


@pytest.mark.usefixtures("control")
def test_forked_child_leaves_the_socket_to_its_parent(tmp_path: Path) -> None:
    def starts_its_own() -> list[str]:
        assert not BOARD.is_on
        with ControlSocket("mcp"):
            return sorted(path.name.split("-")[0] for path in (tmp_path / "rlm-broker").iterdir())

    assert in_child(starts_its_own) == ["mcp", "serve"]
    assert len(list((tmp_path / "rlm-broker").iterdir())) == 1


LIBRARY = "import rlm_broker.watch.board as b; print(b.start_if_wanted())"


def test_library_process_has_one_if_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, printed in (("1", "True"), ("0", "False"), ("", "False")):
        done = python("-c", LIBRARY, env={**os.environ, "RLM_BROKER_CONTROL": given}, check=True)
        assert done.stdout.strip() == printed
        assert not list(tmp_path.glob("rlm-broker/*"))
    monkeypatch.setenv("RLM_BROKER_CONTROL", "yes")
    with pytest.raises(ConfigurationError, match="give 1 for a control socket, or 0 for none"):
        board.start_if_wanted()


def test_command_runs_without_a_socket_where_none_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rlm_broker")
    (tmp_path / "rlm-broker").symlink_to(tmp_path)
    with ControlSocket("ask"), RLM(ScriptedClient([ANSWERS])) as rlm:
        assert rlm.completion("abc", "How long?").response == "3"
    assert "this process has no control socket" in caplog.text


def test_call_that_would_wait_for_itself_is_not_listed(control: ControlSocket) -> None:
    """The run never begins, so no event would take it off the board."""
    del control
    with RLM(ScriptedClient([ANSWERS])) as rlm:

        async def asks_itself() -> None:
            with pytest.raises(RuntimeError):
                rlm.completion("abc", "How long?")

        rlm.bind_loop().run(asks_itself())
    assert [entry.ended for entry in BOARD.runs] != [None]
