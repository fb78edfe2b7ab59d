"""A killed block leaves the variables as they were before it, where the REPL can have a checkpoint."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from rlm_broker import ConfigurationError, ReplBusy, ReplLimits, Sandbox, SandboxFailed
from rlm_broker.sandbox.blocks.checkpoints import LEAST_COST_S, WORTH
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire.messages import Query, Slot
from tests.support.launcher import needs_strict
from tests.support.processes import living_below, living_parents_below
from tests.support.waiting import until, until_now

pytestmark = needs_strict
EACH = ReplLimits(checkpoint="each", max_replay_s=0, block_timeout_s=20, interrupt_grace_s=0.2, memory_bytes=256 << 20)

STATE = """
import array, collections, io, itertools, random, re, sys, threading
def numbers():
    yield from range(10)
opened = numbers(); next(opened)
square = lambda x: x * x
class Point:
    def __init__(self, x): self.x = x
point = Point(3)
lock = threading.Lock(); lock.acquire()
pattern = re.compile(r'(\\d+)')
counter = itertools.count(7); next(counter)
queue = collections.deque(maxlen=2); queue.append(1)
text = io.StringIO(); text.write('half')
cycle = []; cycle.append(cycle)
sys.setrecursionlimit(1234)
random.seed(5); drawn = random.random()
answer['content'] = 'half filled'
answer['more'] = [1]
"""
CHECK = """
print(next(opened), square(4), point.x, lock.locked(), pattern.match('12')[1], next(counter), list(queue),
      text.getvalue(), cycle[0] is cycle, sys.getrecursionlimit(), answer['content'], answer['more'], context)
"""
EXPECTED = "1 16 3 True 12 8 [1] half True 1234 half filled [1] the context\n"
SPOILS = "opened = square = point = lock = None; queue.clear(); text.write('x'); answer['more'].append(2)\n"

KILLS = {
    "exit": "import os; os._exit(3)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "memory": "import os, time\n"
    "for _ in range(5):\n    if os.fork() == 0:\n        taken = bytearray(b'x') * (90 << 20)\n        break\n"
    "time.sleep(60)",
    "time, in 64 processes": "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "while True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    "time, with the GIL held in C": "sum(itertools.repeat(1))",
    "signal": "import os; os.kill(os.getpid(), 9)",
}


@pytest.fixture
def repl(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl("the context", limits=EACH) as opened:
        yield opened


@pytest.mark.parametrize("code", list(KILLS.values()), ids=list(KILLS))
def test_variables_survive_kill(open_sandbox: Sandbox, code: str) -> None:
    with open_sandbox.repl("the context", limits=EACH) as repl:
        assert repl.execute(STATE).status == "ok"
        inits = living_parents_below()
        block = repl.execute(SPOILS + code, timeout_s=0.5 if "while" in code or "repeat" in code else None)
        assert (block.status, block.blocks_undone) == ("killed", 1), block
        assert repl.execute(CHECK).stdout == EXPECTED
        assert inits == living_parents_below()  # the same init
        drawn = "drawn_again = random.random(); random.seed(5); random.random()\nprint(random.random() == drawn_again)"
        assert repl.execute(drawn).stdout == "True\n"


def test_crash_in_c_code_names_its_line(repl: SandboxedRepl) -> None:
    block = repl.execute("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()")
    assert block.post_mortem is not None
    assert block.post_mortem.where == "It was at line 3 of the block, in crash"
    assert repl.execute("import os; os._exit(1)").post_mortem.where == ""  # type: ignore[union-attr]


async def test_checkpoint_that_ends_with_its_repl_is_told() -> None:
    """As in a control group that is full, where the kernel kills all processes."""
    async with Sandbox(warm=0) as sandbox, sandbox.repl("the context", limits=EACH) as repl:
        await repl.aexecute("x = 1")
        begun = asyncio.Event()
        code = "import time\nprint('begun', flush=True)\ntime.sleep(1000)"
        block = asyncio.create_task(repl.aexecute(code, on_output=lambda *_: begun.set()))
        await begun.wait()
        init = psutil.Process(repl.pid)
        init.suspend()
        killed = init.children(recursive=True)
        for process in killed:
            process.kill()
        await until(lambda: all(process.status() == psutil.STATUS_ZOMBIE for process in killed))
        init.resume()
        assert (await block).blocks_undone is None
        assert "There was no checkpoint of its variables: it had ended before" in ((await block).error or "")
        assert (await repl.aexecute("print(context, 'x' in globals())")).stdout == "the context False\n"


def test_kills_in_a_row_leak_nothing(repl: SandboxedRepl) -> None:
    repl.execute("import os\nkept = [0]")
    pid = repl.pid
    seen: list[object] = []
    for number in range(1, 31):
        repl.execute(f"kept.append({number})")
        block = repl.execute("if os.fork(): os._exit(1)\nos.close(4)  # the connection\nwhile True: pass")
        assert block.blocks_undone == 1, (number, block)
        if number in (10, 30):
            listing = "[len(os.listdir('/proc/self/fd')), len([p for p in os.listdir('/proc') if p.isdigit()])]"
            seen.append((repl.execute(listing, value=True).value, len(repl.files.list()), _descriptors(pid)))
    assert repl.get("kept") == [*range(31)]
    assert seen[0] == seen[1]
    assert repl.pid == pid


def _descriptors(pid: int | None) -> int:
    """Return the number of descriptors of this process and of init, which may be unreadable."""
    own = psutil.Process().num_fds()
    try:
        return own + psutil.Process(pid).num_fds()
    except psutil.AccessDenied:
        return own


def test_arrays_survive_kill(repl: SandboxedRepl) -> None:
    pytest.importorskip("numpy")
    made = "import numpy\nvector = numpy.arange(6.0).reshape(2, 3)\nview = vector[1]\nnumpy.random.seed(3)"
    assert repl.execute(made).status == "ok"
    block = repl.execute("vector[:] = 0; numpy.random.random(); numpy.dot(vector.T, vector)\nimport os; os._exit(1)")
    assert block.blocks_undone == 1, block
    assert repl.execute("view[0] = 9.0; print(vector.tolist(), f'{numpy.random.random():.4f}')").stdout == (
        "[[0.0, 1.0, 2.0], [9.0, 4.0, 5.0]] 0.5508\n"
    )


def test_checkpoint_is_no_child_of_code(repl: SandboxedRepl) -> None:
    repl.execute("import os")
    block = repl.execute("try: os.wait()\nexcept ChildProcessError: print('none')", timeout_s=5)
    assert block.stdout == "none\n"


def test_output_queries_and_values_work_after_rollback(repl: SandboxedRepl) -> None:
    repl.provide({"once": [1]}, restore=False)
    repl.provide({"limit": 10})
    repl.execute("once.append(2); limit = 11")
    repl.provide({"new": 5})
    assert repl.execute("import os; os._exit(1)").blocks_undone == 1
    block = repl.execute("import os\nos.write(1, b'raw\\n')\nprint(once, limit, new)\ndisplay(once)\nonce", value=True)
    assert "raw\n" in block.stdout
    assert "[1, 2] 10 5\n" in block.stdout
    assert block.value == [1, 2]
    assert repl.execute("1/0").error == "ZeroDivisionError: division by zero"


async def test_children_from_before_the_checkpoint_have_ended() -> None:
    async def answer(query: Query) -> list[Slot]:
        await asyncio.Event().wait()
        return [Slot("late") for _ in query.prompts]

    async with Sandbox(warm=0) as sandbox, sandbox.repl("the context", answer, limits=EACH) as repl:
        await repl.aexecute("child = rlm_start('?')")
        assert (await repl.aexecute("import os; os._exit(1)")).blocks_undone == 1
        block = await repl.aexecute("print(child.done, child.result())")
        assert block.stdout.startswith("True Error: cancelled: the REPL was killed")


def test_later_contexts_are_there_after_rollback(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("first", limits=EACH.replace(later_context_bytes=1 << 20)) as repl:
        repl.add_context("second")
        repl.execute("a = context_1")
        repl.add_context("third")
        assert repl.execute("b = context_2\nimport os; os._exit(1)").blocks_undone == 1
        assert repl.execute("print(a, context_1, context_2)").stdout == "second second third\n"


def test_rollback_goes_back_by_blocks(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("the context", limits=EACH.replace(keep_checkpoints=3)) as repl:
        for number in range(6):
            repl.execute(f"n = {number}; seen = [*globals().get('seen', []), n]")
        init = psutil.Process(repl.pid)
        until_now(lambda: len(init.children(recursive=True)) == 4)  # the REPL and three checkpoints
        repl.provide({"given": 7})
        assert repl.rollback(2) == 2
        assert repl.execute("n, seen, given", value=True).value == (3, [0, 1, 2, 3], 7)
        assert repl.execute("n = 9\nimport os; os._exit(1)").blocks_undone == 1
        assert repl.rollback() == 1  # before the block that has read them
        assert repl.rollback() == 1  # an older checkpoint has stayed
        assert repl.get("seen") == [0, 1, 2]
        with pytest.raises(ConfigurationError, match="to go back to: no block has made one that is left"):
            repl.rollback()
        assert repl.get("seen") == [0, 1, 2]
        until_now(lambda: len(init.children(recursive=True)) == 1)


def test_rollback_that_cannot_be_is_refused(repl: SandboxedRepl, open_sandbox: Sandbox) -> None:
    repl.execute("x = 1")
    for k, why in {2: "has made 1 checkpoints: raise keep", 0: "from 1 on", True: "from 1 on"}.items():
        with pytest.raises(ConfigurationError, match=why):
            repl.rollback(k)
    assert repl.get("x") == 1
    with open_sandbox.repl() as seldom, pytest.raises(ConfigurationError, match="none was worth its cost yet"):
        seldom.rollback()
    never = open_sandbox.repl(limits=EACH.replace(checkpoint="never"))
    with never, pytest.raises(ConfigurationError, match="permits none"):
        never.rollback()


def test_rollback_to_an_ended_checkpoint_leaves_the_last_one(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=EACH.replace(keep_checkpoints=3)) as repl:
        for number in range(4):  # each checkpoint has pages of its own: the oldest ones make room
            repl.execute(f"taken = bytearray([{number + 1}]) * (50 << 20)")
        with pytest.raises(SandboxFailed, match="it had ended before, or its memory was needed"):
            repl.rollback(3)
        assert repl.execute("taken[0]", value=True).value == 3


async def test_rollback_waits_for_no_block() -> None:
    async with Sandbox(warm=0) as sandbox, sandbox.repl(limits=EACH) as repl:
        await repl.aexecute("x = 1")
        begun = asyncio.Event()
        code = "x = 2\nprint('begun', flush=True)\nwhile True: pass"
        block = asyncio.create_task(repl.aexecute(code, on_output=lambda *_: begun.set()))
        await begun.wait()
        with pytest.raises(ReplBusy):
            await repl.arollback()
        await repl.ainterrupt()
        assert (await block).status == "interrupted"
        assert await repl.arollback() == 1
        assert await repl.aget("x") == 1


def test_refused_checkpoint_says_why(repl: SandboxedRepl) -> None:
    repl.execute(
        "import threading, time\nthread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)\nthread.start()"
    )
    block = repl.execute("import os; os._exit(1)")
    assert block.blocks_undone == 2  # the state before the first block
    large = "taken = bytearray(b'x') * (140 << 20)\nimport os"
    repl.execute(large)
    block = repl.execute("os._exit(1)")
    assert block.blocks_undone == 2


def test_first_checkpoint_is_refused_with_a_reason(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=EACH.replace(checkpoint="auto")) as repl:
        repl.execute("import time; taken = bytearray(b'x') * (140 << 20); time.sleep(1)")
        block = repl.execute("import os; os._exit(1)")
        assert block.blocks_undone is None
        assert "more than half of memory_bytes" in (block.error or "")


def test_checkpoint_makes_room_for_honest_block(repl: SandboxedRepl) -> None:
    """A block that writes to all of its variables needs them twice, until its checkpoint is given up."""
    repl.execute("taken = bytearray(b'x') * (110 << 20)")
    writes = "for at in range(0, len(taken), 4096): taken[at] = 1\n"
    block = repl.execute(f"{writes}more = bytearray(b'z') * (60 << 20)\nimport time; time.sleep(0.5)")
    assert block.status == "ok", block


def test_short_blocks_make_no_checkpoint(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("the context", limits=EACH.replace(checkpoint="auto")) as repl:
        for _ in range(3):
            repl.execute("1")
        assert repl.execute("import os; os._exit(1)").blocks_undone is None
        repl.execute(f"import time; time.sleep({2 * WORTH * LEAST_COST_S}); x = 1")
        repl.execute("y = 1")
        assert repl.execute("import os; os._exit(1)").blocks_undone in (1, 2)  # 1 on a machine that is very busy
        assert repl.execute("print(x)").stdout == "1\n"


def test_cancelled_blocks_repl_goes_on_from_checkpoint(repl: SandboxedRepl) -> None:
    repl.execute("x = 1")
    repl.execute("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", timeout_s=0.3)
    assert repl.get("x") == 1


def test_older_checkpoint_goes_at_the_next_and_the_last_with_the_repl(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl("the context", limits=EACH) as repl:
        init = psutil.Process(repl.pid)
        repl.execute("1")
        first = set(init.children(recursive=True))
        assert len(first) == 2  # the REPL and its checkpoint
        repl.execute("2")
        until_now(lambda: len(init.children(recursive=True)) == 2)
        last = set(init.children(recursive=True))
        assert len(first & last) == 1  # the REPL is the process that it was
    until_now(lambda: not (first | last) & living_below())
