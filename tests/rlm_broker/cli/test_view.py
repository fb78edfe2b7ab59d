"""`rlm-broker runs view`, with a run of another process."""

import asyncio
import signal
import socket

import aiohttp
import pytest

from rlm_broker.watch.messages import RunStatus
from tests.support.command import run as command
from tests.support.command import sentence, started
from tests.support.controlled import SPINS, environment, library, seen
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("own_sockets")


async def _stop_by_http(link: str, status: RunStatus) -> list[str]:
    """Return the states and events that the viewer tells of a run that it stops."""
    base, _, key = link.partition("#key=")
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(WAIT_S)) as session:
        async with session.get(f"{base}api/runs") as answer:
            runs = await answer.json()
        assert [(run["id"], run["pid"], run["state"]) for run in runs] == [(status.id, status.pid, "running")]
        async with session.get(f"{base}api/rows?run={status.id}") as answer:
            first = await answer.content.readline()
            stopping = asyncio.create_task(session.post(f"{base}api/stop", json={"run": status.id, "now": True}))
            rest = await answer.text()
        assert (await stopping).status == 200
        return [first.decode(), *rest.splitlines()]


def test_run_of_another_process_is_followed_and_stopped() -> None:
    """view prints a link, lists and follows the run of another process, stops it, and ends by Ctrl+C."""
    with library("How long?", SPINS) as other:
        status = asyncio.run(seen(other.pid, lambda process: process.runs and process.runs[0].turn)).runs[0]
        with started("runs", "view", "--no-open", env=environment()) as view:
            assert view.stdout
            lines = asyncio.run(_stop_by_http(view.stdout.readline().strip(), status))
            view.send_signal(signal.SIGINT)
            _, errors = view.communicate(timeout=WAIT_S)
        assert view.returncode == 130
        assert errors == "rlm-broker runs view: stopped\n"
    assert "How long?" in lines[0]
    assert '"run_ended"' in "".join(lines)
    assert lines[-1].startswith('{"end":true')


def test_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command("runs", "view", "--no-open", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Address already in use: give another --port, or none" in sentence(done)
