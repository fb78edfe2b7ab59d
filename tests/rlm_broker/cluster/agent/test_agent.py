"""The ends of an agent: whatever ends it or its link, no process of a run is left, and the agent can begin anew."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.cluster.agent import agent as module
from rlm_broker.cluster.messages import Ended, Happened, Quit
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.rlm import RLM
from tests.support.command import COMMAND, ENVIRONMENT
from tests.support.fds import memfds
from tests.support.links import cut
from tests.support.nodes import agent
from tests.support.orchestrator import Orchestrator, orchestrated
from tests.support.processes import living_below
from tests.support.waiting import until, until_now

SPINS = "```repl\nwhile True: pass\n```"
WAITS = "```repl\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])\n```"

ORCHESTRATOR = """
import asyncio, sys
from rlm_broker import RLM
from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.cluster.nodes import Nodes

async def main():
    async with Nodes() as nodes, RLM(ScriptedClient([sys.argv[1]] * 9), sandbox=nodes) as rlm:
        print(nodes.address[1], nodes.token, flush=True)
        await rlm.acompletion("text", "?")

asyncio.run(main())
"""
"""A process whose only run never ends."""


async def with_code_running(orchestrator: Orchestrator) -> int:
    """Begin a run, and return its number once its code runs."""
    run = await orchestrator.begin("text", "?", tells_events=True)

    def runs() -> bool:
        return any(isinstance(each, Happened) and any(b"block_started" in bytes(event) for event in each.events)
                   for each in orchestrator.got)  # fmt: skip

    await until(runs)
    return run


@pytest.mark.parametrize("code", [SPINS, WAITS], ids=["code", "program"])
async def test_a_lost_link_ends_all(code: str) -> None:
    """Runs, programs of their code, fork servers and contexts are gone when `serve` returns."""
    before, contexts = living_below(), memfds("context")
    async with orchestrated(ScriptedClient([code])) as (orchestrator, _, serving):
        await with_code_running(orchestrator)
        assert living_below() - before
        orchestrator.link.close()
        await serving
        assert not living_below() - before
    await until(lambda: memfds("context") == contexts + 1)  # that of the orchestrator


async def test_silence_ends_all() -> None:
    """A link that is cut sends no end: the agent ends its runs because it hears no heartbeat."""
    before = living_below()
    async with orchestrated(ScriptedClient([SPINS])) as (orchestrator, link, serving):
        await with_code_running(orchestrator)
        assert link._transport is not None
        cut(link._transport)
        await serving
        assert "was silent" in (link.why_lost or "")
        assert not living_below() - before


async def test_an_agent_that_is_told_to_end_says_so_first() -> None:
    """The orchestrator learns it before the runs end, so that none of them counts as cancelled."""
    before = living_below()
    async with orchestrated(ScriptedClient([SPINS])) as (orchestrator, _, serving):
        await with_code_running(orchestrator)
        serving.cancel()
        assert isinstance(await orchestrator.until(Quit), Quit)
        await asyncio.wait({serving})
        assert serving.cancelled()
        assert not living_below() - before
        assert not [each for each in orchestrator.got if isinstance(each, Ended)]


async def test_a_farewell_of_the_orchestrator_ends_all() -> None:
    before = living_below()
    async with orchestrated(ScriptedClient([SPINS])) as (orchestrator, link, serving):
        await with_code_running(orchestrator)
        orchestrator.link.post(Quit("the cluster has ended"))
        await serving
        assert link.farewell == "the cluster has ended"
        assert not living_below() - before


async def test_a_further_link_begins_anew() -> None:
    """An agent that has lost its link serves the next one, with equal numbers of runs."""
    for _ in range(2):
        async with orchestrated(ScriptedClient(["FINAL(4)"])) as (orchestrator, *_):
            assert (await orchestrator.completion("text", "?")).response == "4"
            assert len(orchestrator.got) == 3  # the context, one call and the end: no more is left of the first


async def test_a_run_that_begins_twice_ends_the_link() -> None:
    async with orchestrated(ScriptedClient([SPINS])) as (orchestrator, link, serving):
        await with_code_running(orchestrator)
        orchestrator._last = 0
        await orchestrator.begin("text", "?")
        await serving
        assert link.why_lost == "the orchestrator began run 1 twice"


def without_descriptors() -> int:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_heartbeats_tell_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and free memory are told, and that a node is full while its memory is short."""
    async with orchestrated(ScriptedClient([SPINS])) as (orchestrator, *_):
        await with_code_running(orchestrator)
        await until(lambda: orchestrator.loads and orchestrator.loads[-1].runs == 1)
        assert orchestrator.loads[-1].free_bytes > 0
        monkeypatch.setattr(module, "free_bytes", lambda: 1)
        await until(lambda: orchestrator.loads[-1].is_full)
        monkeypatch.setattr(module, "free_bytes", lambda: 1 << 40)
        await until(lambda: not orchestrator.loads[-1].is_full)
        monkeypatch.setattr(module, "free_bytes", without_descriptors)
        await until(lambda: orchestrator.loads[-1].is_full)
        monkeypatch.undo()
        await until(lambda: not orchestrator.loads[-1].is_full)


# -- agents as processes ---------------------------------------------------------------------------------------------


def below(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def are_gone(processes: set[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
async def test_a_signal_leaves_no_process(number: signal.Signals) -> None:
    """An agent that is ended or killed takes its REPLs with it."""
    async with Nodes() as nodes, RLM(ScriptedClient([WAITS] * 9), sandbox=nodes) as rlm:
        with agent(nodes, "node") as started:
            run = rlm.start("text", "?")
            await until(lambda: len(below(started.process.pid)) > 3)
            processes = below(started.process.pid)
            os.kill(started.process.pid, number)
            await until(lambda: started.process.poll() is not None and are_gone(processes))
            assert started.process.returncode == (143 if number is signal.SIGTERM else -number)
            run.cancel()
            await run.ended()


@contextlib.contextmanager
def orchestrator_process(reply: str) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    """A process with a cluster and one run; its port and its token."""
    words = [sys.executable, "-c", ORCHESTRATOR, reply]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), env=ENVIRONMENT) as process:
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        try:
            yield process, port, token
        finally:
            process.kill()


def test_an_orchestrator_that_dies_leaves_no_process() -> None:
    """The agent ends its runs, and lives on without any."""
    with orchestrator_process(WAITS) as (process, port, token):
        words = [*COMMAND, "node", "--connect", f"127.0.0.1:{port}", "--wait-s", "60"]
        environment = {**ENVIRONMENT, "RLM_BROKER_NODE_TOKEN": token}
        with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL) as node:
            try:
                until_now(lambda: len(below(node.pid)) > 3)
                processes = below(node.pid)
                process.kill()
                until_now(lambda: are_gone(processes))
                assert not below(node.pid)
                assert node.poll() is None
            finally:
                node.kill()
