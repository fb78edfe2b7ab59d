"""Services run on uvloop, whose transports and loops are no subclasses of asyncio's."""

import uvloop

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.processes import living_below


def test_run_works_on_uvloop() -> None:
    async def ask() -> object:
        client = ScriptedClient(["```repl\nprint(FINAL(llm_query('what?')))\n```", "this"])
        async with RLM(client) as rlm:
            return (await rlm.acompletion("some context", "what?")).response

    assert uvloop.run(ask()) == "this"


def test_interrupt_and_kill_work_on_uvloop() -> None:
    """A block is interrupted and a killed REPL is replaced on uvloop."""

    async def run() -> list[object]:
        async with Sandbox(Limits(interrupt_grace_s=0.2)) as sandbox, sandbox.repl("x" * 200_000) as repl:
            blocks = [
                await repl.aexecute("import os; print(len(context)); _ = os.write(2, b'raw')"),
                await repl.aexecute("while True: pass", timeout_s=0.1),
                await repl.aexecute("import os; os._exit(3)"),
                await repl.aexecute("print(len(context))"),
            ]
            return [(block.status, block.stdout, block.stderr[:3]) for block in blocks]

    assert uvloop.run(run()) == [
        ("ok", "200000\n", "raw"),
        ("interrupted", "", "Tra"),
        ("killed", "", ""),
        ("ok", "200000\n", ""),
    ]
    assert not living_below()
