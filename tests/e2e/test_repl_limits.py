"""Bounds of each REPL: REPLs with different ones share a sandbox, and each keeps to its own."""

import pytest

from rlm_broker.limits import Limits, ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from tests.support.processes import living_below
from tests.support.sources import pool_of
from tests.support.tables import table
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TAKES_100_MB = "x = bytearray(100 << 20); print(len(x) >> 20)"


@table("level", ["strict", "standard"])
async def test_repls_of_a_sandbox_have_own_bounds(level: LevelName) -> None:
    small = ReplLimits(memory_bytes=64 << 20, max_output_bytes=100, max_open_files=20, scratch_bytes=1 << 20)
    async with (
        Sandbox(isolation=level, warm=0) as sandbox,
        sandbox.repl(limits=small) as narrow,
        sandbox.repl(limits=Limits()) as wide,
    ):
        assert "MemoryError" in ((await narrow.aexecute(TAKES_100_MB)).error or "")
        assert (await wide.aexecute(TAKES_100_MB)).stdout == "100\n"
        prints = "print('x' * 5000)"
        assert "more cut" in (await narrow.aexecute(prints)).stdout
        assert len((await wide.aexecute(prints)).stdout) == 5001
        opens = "files = [open('/dev/null') for _ in range(50)]"
        assert "Too many open files" in ((await narrow.aexecute(opens)).error or "")
        assert (await wide.aexecute(opens)).status == "ok"
        writes = "f = open('f', 'wb', 0); f.write(bytes(1 << 20)); f.write(bytes(1 << 20)) or 1/0"
        assert (await narrow.aexecute(writes)).status != "ok"
        assert (await wide.aexecute(writes)).status == "ok"


async def test_template_bounds_hold_for_its_repls(loop_sandbox: Sandbox) -> None:
    small = ReplLimits(memory_bytes=64 << 20)
    async with (
        loop_sandbox.template(setup="y = 1") as template,
        template.repl(limits=small) as narrow,
        template.repl() as wide,
    ):
        assert "MemoryError" in ((await narrow.aexecute(TAKES_100_MB)).error or "")
        assert (await wide.aexecute(f"y; {TAKES_100_MB}")).stdout == "100\n"
        assert (await narrow.aexecute("import os; os._exit(1)")).status == "killed"
        assert "MemoryError" in ((await narrow.aexecute(TAKES_100_MB)).error or "")


async def test_time_and_restart_limits_are_per_repl(loop_sandbox: Sandbox) -> None:
    own = ReplLimits(block_timeout_s=0.2, interrupt_grace_s=0.2, max_repl_restarts=0)
    async with loop_sandbox.repl(limits=own) as repl:
        block = await repl.aexecute("while True: pass")
        assert (block.status, block.limit) == ("interrupted", "block_timeout_s")
        assert "0.2 s" in (block.error or "")
        assert (await repl.aexecute("import os; os._exit(1)")).status == "killed"
        with pytest.raises(Exception, match="max_repl_restarts = 0"):
            await repl.aexecute("1")


async def test_ready_worker_needs_equal_bounds() -> None:
    before = living_below()
    async with Sandbox(warm=1) as sandbox:
        pool = pool_of(sandbox)
        await until(lambda: pool.ready)
        (ready,) = pool.ready
        others = [
            ReplLimits(memory_bytes=64 << 20),
            ReplLimits(max_output_bytes=100),
            ReplLimits(max_queries_in_flight=1),
            ReplLimits(cpu_s=9.0),
        ]
        for other in others:
            async with sandbox.repl(limits=other) as repl:
                assert (await repl.aexecute("1")).stdout == "1\n"
            assert (list(pool.ready), pool._making) == ([ready], set())
        async with sandbox.repl(limits=ReplLimits(block_timeout_s=0.2, interrupt_grace_s=5)) as repl:
            assert ready not in pool.ready
            assert (await repl.aexecute("while True: pass")).limit == "block_timeout_s"
    assert living_below() == before


async def test_shared_context_keeps_bounds_of_each_repl() -> None:
    records = [{"number": number, "text": "x" * 200} for number in range(30_000)]
    async with Sandbox(isolation="strict") as sandbox:
        for _ in range(3):
            async with sandbox.repl(records, limits=ReplLimits(memory_bytes=80 << 20)) as repl:
                assert "MemoryError" in ((await repl.aexecute(TAKES_100_MB)).error or "")
                assert (await repl.aexecute("len(context)")).stdout == "30000\n"


async def test_block_soon_after_another_is_watched_and_text_survives_its_kill(loop_sandbox: Sandbox) -> None:
    """Init hears late of a block that follows another one at once, and not at all if it is short. A block's first text
    waits in the kernel for a moment."""
    async with loop_sandbox.repl(limits=ReplLimits(memory_bytes=64 << 20, max_repl_restarts=9)) as repl:
        worker = repl._worker.worker
        for _ in range(3):
            await repl.aexecute("1")
        begun = worker._begun_at
        hogs = "import os\nfor _ in range(3):\n    if not os.fork():\n        x = b'x' * (40 << 20)\n        break\n"
        block = await repl.aexecute(f"print('first')\n{hogs}while True: pass")
        assert (block.status, block.limit, block.stdout) == ("killed", "memory_bytes", "first\n")
        assert worker._begun_at > begun
        begins = set()
        for _ in range(100):  # each may be a slow one on a busy machine
            await repl.aexecute("1")
            begins.add(worker._begun_at)
        assert len(begins) < 100
        block = await repl.aexecute("print('last')\nimport os\nos.kill(os.getpid(), 9)")
        assert (block.status, block.stdout) == ("killed", "last\n")
