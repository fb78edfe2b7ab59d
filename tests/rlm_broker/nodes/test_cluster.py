"""REPLs on nodes: real agents on this machine. A run, a template, a server do not know where their REPLs are."""

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from rlm_broker import (
    RLM,
    ConfigurationError,
    FileRefused,
    Limits,
    LMHandler,
    Models,
    ProgramNotStarted,
    ReplLimits,
    RlmBrokerError,
    SandboxFailed,
    ScriptedClient,
    store,
)
from rlm_broker.nodes import agent as agents
from rlm_broker.nodes import node as node_module
from rlm_broker.sandbox.workers import zygote_process
from sandbox_worker.wire.control import OpenToWrite
from tests.support.launcher import needs_strict
from tests.support.nodes import LocalNodes
from tests.support.waiting import until, until_now

SLEEP = "import time\ntime.sleep(600)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with LocalNodes({"one": 4, "two": 4}) as nodes:
        until_now(lambda: len(nodes.nodes()) == 2)
        yield nodes


def name_of_busy(nodes: LocalNodes) -> str:
    """Return the name of the node that has the only REPL."""
    [name] = [node.name for node in nodes.nodes() if node.repls]
    return name


async def has_both(nodes: LocalNodes) -> None:
    """Start the agents again that a test has ended."""
    for name in ("one", "two"):
        if nodes.agents[name].poll() is not None or name not in {node.name for node in nodes.nodes()}:
            nodes.signal(name)
            nodes.agents[name].wait()
            nodes.start(name)
    await until(lambda: len(nodes.nodes()) == 2)


@contextlib.asynccontextmanager
async def agent_here() -> AsyncIterator[LocalNodes]:
    """A cluster whose one agent is in this process."""
    nodes = LocalNodes({})
    opening = asyncio.create_task(nodes.__aenter__())
    await until(lambda: nodes._port is not None and nodes._address != ("", 0))
    serving = asyncio.create_task(agents.Agent(nodes._order("here", 4)).serve())
    await opening
    async with nodes:
        yield nodes
    await asyncio.wait({serving})


# -- as a sandbox ------------------------------------------------------------------------------------------------------


async def test_run_has_its_repls_on_nodes(nodes: LocalNodes) -> None:
    """Queries, children and functions of this process work; the level is that of the nodes, and so are the packages."""
    assert nodes.importable(["numpy", "msgspec_of_nobody"]) == nodes.importable(["numpy"])
    code = "x = llm_query('ask')\ny = rlm_query('child')\nFINAL(f'{shout(x)} {y} {len(context)}')"
    client = ScriptedClient([f"```repl\n{code}\n```", "asked", "```repl\nFINAL('of child')\n```"])
    async with RLM(
        client, sandbox=nodes, tools={"shout": lambda text: text.upper()}, limits=Limits(max_depth=2)
    ) as rlm:
        completion = await rlm.acompletion("four", "?")
    assert completion.response == "ASKED of child 4"
    assert completion.isolation is not None
    assert completion.isolation.level == nodes.level
    assert all(not node.repls for node in nodes.nodes())


async def test_persistent_repl_keeps_variables_and_contexts(nodes: LocalNodes) -> None:
    client = ScriptedClient(["```repl\nkept = 3\nFINAL(1)\n```", "```repl\nFINAL(f'{kept} {context_1}')\n```"])
    async with RLM(client, sandbox=nodes, persistent=True) as rlm:
        await rlm.acompletion("first", "?")
        assert (await rlm.acompletion("second", "?")).response == "3 second"


async def test_recording_and_replay_have_the_seed(tmp_path: Path) -> None:
    """Code draws the same numbers when a recording is replayed on nodes."""
    code = "```repl\nimport random\nFINAL(random.random())\n```"
    record = tmp_path / "run.jsonl"
    async with RLM(ScriptedClient([code]), models=Models(record=record), sandbox=LocalNodes()) as rlm:
        first = await rlm.acompletion("x", "?")
    async with RLM(models=Models(replay=record), sandbox=LocalNodes()) as rlm:
        assert (await rlm.acompletion("x", "?")).response == first.response


async def test_own_loop_has_a_handler(nodes: LocalNodes) -> None:
    async with LMHandler(ScriptedClient(["pong"])) as handler, nodes.repl("x", handler.answers()) as repl:
        assert (await repl.aexecute("print(llm_query('ping'))")).stdout == "pong\n"


async def test_template_prepares_each_node_once(nodes: LocalNodes) -> None:
    """The second REPL goes to the other node, which has its own fork server by then."""
    template = nodes.template({"a": [1, 2]}, setup="import os\nmark = [len(context)]", imports=["json"])
    async with template, template.repl() as one, template.repl() as two:
        assert [node.repls for node in nodes.nodes()] == [1, 1]
        for repl in (one, two):
            assert (await repl.aexecute("print(mark, context['a'])")).stdout == "[1] [1, 2]\n"
    with pytest.raises(ConfigurationError, match=r"its setup failed.*ZeroDivisionError.*on the node"):
        async with nodes.template(setup="1 / 0"):
            pass


async def test_template_cancelled_while_it_is_prepared_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_process, "END_TIMEOUT_S", 0.05)

    def below() -> set[psutil.Process]:
        return {*psutil.Process().children(recursive=True)}

    async with agent_here() as nodes:
        before = below()
        opening = asyncio.create_task(nodes.template(setup=SLEEP).__aenter__())
        await until(lambda: bool(below() - before))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until(lambda: not below() - before)
        assert [node.link.why_lost for node in nodes._placement.nodes] == [None]


async def test_files_cross(nodes: LocalNodes, tmp_path: Path) -> None:
    """Files go there and back whole, also through code; refusals are those of one machine."""
    data = os.urandom(3 << 20)
    async with nodes.repl(limits=ReplLimits(scratch_bytes=8 << 20)) as repl:
        await repl.files.awrite("in/data.bin", data)
        await repl.aexecute("open('out.bin', 'wb').write(open('in/data.bin', 'rb').read()[::-1])")
        assert await repl.files.aread("out.bin") == data[::-1]
        await repl.files.asave("out.bin", tmp_path / "saved.bin")
        assert (tmp_path / "saved.bin").read_bytes() == data[::-1]
        assert [entry.name for entry in await repl.files.alist()] == ["in", "out.bin"]
        await repl.files.aremove("out.bin")
        with pytest.raises(FileRefused, match=r"'out.bin' cannot be opened: No such file"):
            await repl.files.aread("out.bin")
        with pytest.raises(FileRefused, match="'in' is a folder"):
            await repl.files.awrite("in", b"x")
        with pytest.raises(FileRefused, match=r"'large.bin' "):
            await repl.files.awrite("large.bin", bytes(9 << 20))
        assert (await repl.aexecute("print(1)")).stdout == "1\n"


async def test_file_opened_and_never_written_is_closed_with_its_repl(nodes: LocalNodes) -> None:
    def opened() -> list[Path]:
        fds = [fd for agent in nodes.agents.values() for fd in Path(f"/proc/{agent.pid}/fd").iterdir()]
        return [fd for fd in fds if "abandoned" in str(fd.readlink())]

    async with nodes.repl() as repl:
        os.close(await repl.bind_loop().arun(repl._worker.worker.open_file(OpenToWrite([b"abandoned"], 1))))
    await until(lambda: not opened())


async def test_programs_cross(nodes: LocalNodes) -> None:
    """Input, both outputs, the exit code and a kill at the time limit; no byte of a flood is lost at its end."""
    async with nodes.repl() as repl:
        given = b"abc" * 100_000
        result = await repl.arun(["sh", "-c", "wc -c; echo problem >&2; exit 3"], input=given)
        assert (result.exit_code, result.stdout.strip(), result.stderr) == (3, "300000", "problem\n")
        flood = await repl.arun(["sh", "-c", "yes | head -c 2000000"], max_output_bytes=4 << 20)
        assert len(flood.stdout) == 2_000_000
        late = await repl.arun(["sleep", "600"], timeout_s=0.2)
        assert late.status == "timeout"


async def test_contexts_are_brought_once_and_mapped(nodes: LocalNodes) -> None:
    """Large texts, dicts of texts and objects arrive as they are; a second REPL of a node finds them there."""
    text = "é" * 3_000_000
    with store({"a": text, "b": "x" * 5_000_000}) as stored:
        room = ReplLimits(later_context_bytes=1 << 20)
        async with nodes.repl(stored, limits=room) as one, nodes.repl(stored) as two, nodes.repl(stored) as three:
            for repl in (one, two, three):
                block = await repl.aexecute("print(len(context['a']), context['a'][-1], len(context['b']))")
                assert block.stdout == "3000000 é 5000000\n"
            assert (await one.aadd_context([1] * 1000)) == "context_1"
            assert (await one.aexecute("print(sum(context_1))")).stdout == "1000\n"
        assert [len(node.held) for node in nodes._placement.nodes].count(0) == 0


async def test_contexts_that_are_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor on the node. The least recently used one goes, and is brought again."""
    monkeypatch.setattr(node_module, "MOST_HELD", 3)
    async with LocalNodes() as nodes:
        agent = psutil.Process(nodes.agents["one"].pid)
        before = agent.num_fds()
        with store("first" * 20_000) as first:
            for context in (first, *(str(number) * 100_000 for number in range(6)), first):
                async with nodes.repl(context) as repl:
                    assert (await repl.aexecute("print(len(context))")).stdout == "100000\n"
        assert len(nodes._placement.nodes[0].held) == 3
        await until(lambda: agent.num_fds() <= before + 3)


@needs_strict
async def test_killed_block_leaves_the_variables_as_they_were(nodes: LocalNodes) -> None:
    async with nodes.repl("text", limits=ReplLimits(checkpoint="each")) as repl:
        await repl.aexecute("rows = (n for n in range(3)); next(rows)")
        assert (await repl.aexecute("import os; os._exit(1)")).blocks_undone == 1
        assert (await repl.aexecute("print(next(rows), context)")).stdout == "1 text\n"


async def test_limits_and_interrupts_hold(nodes: LocalNodes) -> None:
    """Time, memory, processes and output are bounded on the node, and said as on one machine."""
    async with nodes.repl(limits=ReplLimits(memory_bytes=256 << 20)) as repl:
        late = await repl.aexecute("x = 1\nwhile True: pass", timeout_s=0.3)
        assert (late.status, late.limit) == ("interrupted", "block_timeout_s")
        assert (await repl.aexecute("print(x)")).stdout == "1\n"
        printed = await repl.aexecute("import os\nos.write(1, b'x' * 100_000)\nos.system('echo of a child')")
        assert "of a child" in printed.stdout
        fat = await repl.aexecute("import os, time\nos.fork()\nb = bytearray(200 << 20)\ntime.sleep(600)")
        assert fat.status == "killed"
        assert fat.limit == "memory_bytes"
        assert (await repl.aexecute("print(2)")).stdout == "2\n"


# -- places ------------------------------------------------------------------------------------------------------------


async def test_repl_goes_to_the_node_with_most_free_places(nodes: LocalNodes) -> None:
    async with nodes.repl() as _, nodes.repl() as _, nodes.repl() as _, nodes.repl() as _:
        assert [node.repls for node in nodes.nodes()] == [2, 2]


async def test_repl_waits_for_a_place_and_gets_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """Eight runs on one place are answered one after the other. A wait for a place of ours is not news."""
    client = ScriptedClient(["```repl\nFINAL(len(context))\n```"] * 8)
    async with LocalNodes({"one": 1}) as nodes, RLM(client, sandbox=nodes) as rlm:
        runs = [rlm.start("four", "?") for _ in range(8)]
        assert {(await run).response for run in runs} == {"4"}
    assert "wait" not in caplog.text


async def test_cancelled_wait_takes_no_place() -> None:
    async with LocalNodes({"one": 1}) as nodes:
        async with nodes.repl():
            waiting = asyncio.create_task(nodes.repl().__aenter__())
            await until(lambda: nodes._placement.waiting == 1)
            waiting.cancel()
            await asyncio.wait({waiting})
        async with nodes.repl() as repl:
            assert (await repl.aexecute("print(1)")).stdout == "1\n"


async def test_node_without_places_is_said_and_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalNodes({"full": 0, "one": 1}) as nodes:
        await until(lambda: "the node full gives no REPL" in caplog.text)
        async with nodes.repl() as repl:
            assert (await repl.aexecute("print(1)")).stdout == "1\n"
            assert name_of_busy(nodes) == "one"


async def test_runs_wait_for_a_node_and_it_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no node is there, the opening waits, and later a run does; no run fails for it."""
    monkeypatch.setattr("rlm_broker.nodes.placement.FIRST_S", 0.05)
    nodes = LocalNodes({})
    opening = asyncio.create_task(nodes.__aenter__())
    await until(lambda: "REPLs wait: no node of the cluster has a place" in caplog.text)
    nodes.start("one")
    await opening
    try:
        async with RLM(ScriptedClient(["```repl\nFINAL(1)\n```"]), sandbox=nodes) as rlm:
            nodes.signal("one")
            await until(lambda: not nodes.nodes())
            caplog.clear()
            run = rlm.start("x", "?")
            await until(lambda: "REPLs wait" in caplog.text)
            nodes.start("two")
            assert (await run).response == "1"
    finally:
        await nodes.aclose()


async def test_closing_ends_what_waits() -> None:
    nodes = LocalNodes({"one": 1})
    async with nodes, nodes.repl():
        waiting = asyncio.create_task(nodes.repl().__aenter__())
        await until(lambda: nodes._placement.waiting == 1)
        await nodes.aclose()
        with pytest.raises(SandboxFailed, match="closed"):
            await waiting


async def test_argument_that_no_node_can_use_fails_the_opening() -> None:
    """An argument that no node could use fails the opening, with the node's reason."""
    with pytest.raises(ConfigurationError, match=r"no such folder|does not exist|not a virtual environment"):
        async with LocalNodes(python="/tmp"):
            pass


# -- losses ------------------------------------------------------------------------------------------------------------


async def test_lost_node_is_a_killed_repl(nodes: LocalNodes) -> None:
    """The block is lost and says why; the next one runs elsewhere, with the context in place. No call is paid twice."""
    await has_both(nodes)
    reached = threading.Event()

    def mark() -> str:
        reached.set()
        return "marked"

    loses = f"x = llm_query('paid')\nmark()\n{SLEEP}"
    client = ScriptedClient([f"```repl\n{loses}\n```", "answer", "```repl\nFINAL(f'{len(context)} {mark()}')\n```"])
    async with RLM(client, sandbox=nodes, tools={"mark": mark}) as rlm:
        run = rlm.start("four", "?")
        await until(reached.is_set)
        lost = name_of_busy(nodes)
        async with asyncio.timeout(60):
            nodes.signal(lost)
            completion = await run
    assert completion.response == "4 marked"
    assert f"its node {lost} was lost" in str(client.requests[-1].messages[-1].content)
    assert len(client.requests) == 3
    await has_both(nodes)


async def test_agent_without_its_orchestrator_ends_with_all_below_it(nodes: LocalNodes) -> None:
    """Also one that was stopped, and finds its link lost when it goes on."""
    await has_both(nodes)
    async with nodes.repl() as repl:
        running = asyncio.create_task(repl.aexecute(SLEEP))
        await until(lambda: bool([node for node in nodes.nodes() if node.repls]))
        name = name_of_busy(nodes)
        below = psutil.Process(nodes.agents[name].pid).children(recursive=True)
        assert below
        nodes.signal(name, signal.SIGSTOP)
        assert (await running).status == "killed"
        nodes.signal(name, signal.SIGCONT)
        await until(lambda: nodes.agents[name].poll() is not None)
        await until(lambda: not any(each.is_running() for each in below))
    await has_both(nodes)


async def test_killed_fork_server_of_a_node_is_replaced(nodes: LocalNodes) -> None:
    """The REPL is killed with it, its node stays, and the next block has another worker."""
    await has_both(nodes)
    async with nodes.repl("four") as repl:
        running = asyncio.create_task(repl.aexecute(SLEEP))
        await until(lambda: bool([node for node in nodes.nodes() if node.repls]))
        await asyncio.sleep(0)
        for process in psutil.Process(nodes.agents[name_of_busy(nodes)].pid).children():
            process.kill()
        assert (await running).status == "killed"
        assert (await repl.aexecute("print(len(context))")).stdout == "4\n"
    assert len(nodes.nodes()) == 2


async def test_agent_without_descriptors_keeps_its_other_repls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on its way, one in a message, or a program fails alone when it cannot be passed on."""

    def refused(_name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with agent_here() as nodes, nodes.repl() as repl:
        monkeypatch.setattr(agents, "new_memfd", refused)
        for context in ("x" * 100_000, "small"):
            with pytest.raises(RlmBrokerError, match="Too many open files"):
                await nodes.repl(context).__aenter__()
        with pytest.raises(ProgramNotStarted, match="Too many open files"):
            await repl.arun(["true"])
        assert (await repl.aexecute("print(1)")).stdout == "1\n"


async def test_abandoned_openings_leave_no_worker(nodes: LocalNodes) -> None:
    """Openings that are cancelled at any moment give their places back, and their workers end."""
    await has_both(nodes)
    for turns in range(0, 400, 25):
        opening = asyncio.create_task(nodes.repl("x").__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()
    await until(lambda: not any(node.repls for node in nodes.nodes()))
    there = [psutil.Process(agent.pid) for agent in nodes.agents.values()]
    servers = 2 if nodes.level == "strict" else 1  # the process outside of the namespaces, and the fork server in them
    await until(lambda: all(len(agent.children(recursive=True)) <= servers for agent in there))
