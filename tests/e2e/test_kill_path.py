"""All that model code can do while its REPL is being explained, ended or forgotten: it ends in time, the next one works."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.level import LevelName
from sandbox_worker.wire.messages import Query, Slot
from tests.support.processes import living_below, living_parents_below, until_used
from tests.support.tables import table
from tests.support.waiting import LONGER_AND_LONGER, WAIT_S, until, until_now, within_longer

LIMITS = Limits(interrupt_grace_s=0.2, max_repl_restarts=10_000, max_processes=32)
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:The test .* is marked with"),  # some are not async
]

DRIPS = """
import faulthandler, os, signal
number = signal.SIGRTMAX
faulthandler.unregister(number)
def drip(*_):
    os.write(5, b'x')
    signal.setitimer(signal.ITIMER_REAL, 0.002)
signal.signal(number, drip)
signal.signal(signal.SIGALRM, drip)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('there')
while True: pass
"""
STEALS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGRTMAX, signal.SIG_IGN)
own = os.open('/proc/self/fd/5', os.O_RDONLY | os.O_NONBLOCK)
def loop(do):
    while True:
        try: do()
        except OSError: pass
for _ in range(2):
    if os.fork() == 0: loop(lambda: os.write(5, b'x'))
    if os.fork() == 0: loop(lambda: os.read(own, 65536))
print('there', flush=True)
time.sleep(1000)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["strict", "standard"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with Sandbox(LIMITS, request.param, warm=0) as opened:
        yield opened


def killed(repl: SandboxedRepl, code: str) -> bool:
    """Run code that ignores interrupts and says when it does. A short limit may interrupt it before."""
    block = within_longer(
        lambda limit_s: repl.execute(code, timeout_s=limit_s),
        lambda block: block.status == "killed" or "there" in block.stdout,
    )
    return block.status == "killed"


def works(repl: SandboxedRepl) -> None:
    assert repl.execute("print(context)").stdout == "the context\n"


@table("level", ["strict", "standard"])
def test_slow_stack_delays_no_kill(level: LevelName) -> None:
    """A stack that comes byte by byte delays no kill."""
    with Sandbox(LIMITS, level, warm=0) as sandbox, sandbox.repl("the context") as repl:
        inits = living_parents_below()
        assert killed(repl, DRIPS)
        works(repl)
        assert inits == living_parents_below()  # it answered before the host gave it up


def test_stolen_stack_does_not_hurt_init(open_sandbox: Sandbox) -> None:
    """Init outlives code that takes the stack from its pipe."""
    with open_sandbox.repl("the context", limits=LIMITS) as repl:
        inits = living_parents_below()
        for _ in range(3):
            assert killed(repl, STEALS)
        works(repl)
        assert inits == living_parents_below()  # the very same ones


async def test_cancelled_blocks_leave_nothing_behind(sandbox: Sandbox) -> None:
    """Blocks cancelled at any moment leave no output or state for the next block."""
    async with sandbox.repl("the context") as repl:
        chance = random.Random(sandbox.level)
        for number in range(15):
            await repl.aexecute("import os; os._exit(0)")
            with_output = asyncio.create_task(repl.aexecute(f"import os; os.write(1, b'of {number}'); 1"))
            await asyncio.sleep(chance.random() * 0.01)
            with_output.cancel()
            await asyncio.wait({with_output})
        for _ in range(3):
            assert (await repl.aexecute("print(context)")).stdout == "the context\n"


async def test_kill_without_a_caller_is_finished(sandbox: Sandbox) -> None:
    async def left(repl: SandboxedRepl, wait_s: float) -> None:
        async with repl:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(repl.aexecute("import time\n" + DRIPS, timeout_s=0.3), wait_s)
            assert (await repl.aexecute("print(context)")).stdout == "the context\n"

    await asyncio.gather(*(left(sandbox.repl("the context"), wait_s) for wait_s in (0.35, 0.5, 0.55, 0.7)))


def test_leftover_processes_have_bounded_cpu_time(open_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a block leaves running have a bounded share of the machine."""
    monkeypatch.setattr("rlm_broker.sandbox.blocks.block.LEFT_RUNNING_S", 0.5)
    with open_sandbox.repl("the context", limits=LIMITS) as repl:
        idle = len(living_below())
        burn = "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        while True: pass"
        for timeout_s in (0.3, *LONGER_AND_LONGER):
            if repl.execute(burn, timeout_s=timeout_s).status == "ok":
                break
        until_used(lambda: len(living_below()) < idle)
        block = repl.execute("1")
        assert block.status == "killed"
        assert "what it had left running used" in (block.error or "")
        works(repl)


def test_sleeping_processes_are_watched_closely_again(open_sandbox: Sandbox) -> None:
    code = """
import mmap, os, time
r, w = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        os.close(w); os.read(r, 1)
        taken = mmap.mmap(-1, 90 << 20, flags=0x22)
        for at in range(0, 90 << 20, 4096): taken[at] = 1
        time.sleep(1000); os._exit(0)
os.close(r); time.sleep(2.5); os.close(w); time.sleep(1000)
"""
    limits = LIMITS.replace(memory_bytes=128 << 20)
    with open_sandbox.repl("the context", limits=limits) as repl:
        block = repl.execute(code)
        assert block.status == "killed"
        assert block.post_mortem is not None
        assert block.post_mortem.memory_bytes < 400 << 20
        works(repl)


async def test_watch_goes_on_without_the_orchestrator(loop_sandbox: Sandbox) -> None:
    limits = LIMITS.replace(memory_bytes=128 << 20)
    code = """
import os, time
if os.fork() == 0:
    while True: os.write(1, b'x' * 4096)
for _ in range(6):
    if os.fork() == 0:
        taken = bytearray(b'x') * (80 << 20)
        time.sleep(1000)
time.sleep(1000)
"""
    async with loop_sandbox.repl("the context", limits=limits) as repl:
        idle = len(living_below())
        running = asyncio.create_task(repl.aexecute(code))
        await until(lambda: len(living_below()) > idle)
        until_now(lambda: len(living_below()) < idle)  # the loop stands still until they are gone
        assert (await running).status == "killed"


def test_descriptor_output_is_whole_after_any_block(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=Limits(max_output_bytes=1 << 16)) as repl:
        flood = repl.execute("import os\nfor _ in range(200): os.write(1, b'x' * 4096)")
        assert flood.stdout.startswith("x" * (1 << 15))
        assert flood.stdout.endswith("x" * (1 << 15))
        assert "more cut" in flood.stdout
        for number in range(60):
            assert repl.execute(f"os.write(1, b'hello {number}'); None").stdout == f"hello {number}"


def test_long_listing_is_printed_at_speed(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        block = repl.execute("for i in range(30_000): print('a line of forty characters or so it is', i)")
    assert block.status == "ok"
    assert block.stdout.endswith("29999\n")
    assert block.stdout.startswith("a line of forty characters or so it is 0\n")


TALKS = """
import os
for n in range(10):
    print('{name}', n)
    os.write(1, b'{name} by descriptor\\n')
    llm_query('{name}')
    with open('mine.txt', 'a') as file: file.write('{name}')
    with open(os.path.join(os.environ['HOME'], '{name}.txt'), 'a') as file: file.write('x')
print(open('mine.txt').read(), sorted(name for name in os.listdir(os.environ['HOME']) if name.endswith('.txt')))
"""


async def test_two_repls_keep_output_and_files_apart(sandbox: Sandbox) -> None:
    """Output and files of two REPLs that write at the same time do not mix."""
    both = asyncio.Barrier(2)

    async def answer(query: Query) -> list[Slot]:
        async with asyncio.timeout(WAIT_S):
            await both.wait()  # so each step of one happens beside the same step of the other
        return [Slot(text="go on")] * len(query.prompts)

    async with (
        sandbox.repl("a", answer=answer) as one,
        sandbox.repl("b", answer=answer) as other,
    ):
        blocks = await asyncio.gather(one.aexecute(TALKS.format(name="one")), other.aexecute(TALKS.format(name="two")))
    for name, block in zip(("one", "two"), blocks, strict=True):
        assert block.status == "ok", block
        lines = block.stdout.splitlines()
        assert lines.count(f"{name} by descriptor") == 10
        assert [line for line in lines if "by descriptor" not in line] == [
            *(f"{name} {n}" for n in range(10)),
            f"{name * 10} ['mine.txt', '{name}.txt']",
        ]


async def test_repl_that_a_child_has_stopped_still_says_where_it_was(sandbox: Sandbox) -> None:
    if sandbox.level != "strict":
        pytest.skip("code starts no processes at this level")
    code = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
def stopped():
    if os.fork() == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)
stopped()
"""
    async with sandbox.repl() as repl:
        block = await repl.aexecute(code, timeout_s=0.2)
        assert block.status == "killed"
        assert block.post_mortem is not None
        assert "in stopped" in block.post_mortem.where
        assert block.post_mortem.processes == 2
        assert (await repl.aexecute("1")).stdout == "1\n"
