"""Contexts that a REPL is given while it lives: mapped as the first one, there after a kill, bounded."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker import ConfigurationError, ContextRefused, ReplClosed, ReplLimits, Sandbox, SandboxFailed, store
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.repl_process import MAX_LATER
from tests.support.skips import ONE_PROCESS
from tests.support.tables import table
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
MIB = 1 << 20
LIMITS = ReplLimits(memory_bytes=256 * MIB, later_context_bytes=1 << 40, max_repl_restarts=50, interrupt_grace_s=WAIT_S)


@pytest.fixture(scope="module", params=["strict", "standard"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param, warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl("first") as opened:
        yield opened


@pytest.mark.parametrize("sandbox", ["strict", "standard", "process"], indirect=True)
def test_later_contexts_come_back_after_a_kill(repl: SandboxedRepl, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file")
    with store({"n": [1, 2]}) as shared:
        names = [repl.add_context("second"), repl.add_context(shared), repl.add_context({"file": shared, "more": "x"})]
        names.append(repl.add_context(tmp_path / "a.txt"))
    assert names == ["context_1", "context_2", "context_3", "context_4"]
    code = "FINAL([context, context_0, context_1, context_2, context_3, context_4])"
    expected = ["first", "first", "second", {"n": [1, 2]}, {"file": {"n": [1, 2]}, "more": "x"}, "from a file"]
    assert json.loads(repl.execute(code).final_answer or "") == expected
    repl.execute("context_1 = None; import os; os.kill(os.getpid(), 9)")
    assert repl.add_context("after") == "context_5"
    assert json.loads(repl.execute(code).final_answer or "") == expected
    assert repl.execute("context_5").stdout == "'after'\n"


def test_later_texts_past_the_memory_are_mapped(repl: SandboxedRepl) -> None:
    repl.add_context("x" * (400 * MIB))
    repl.add_context([f"{number} " * 1000 for number in range(1000)])
    block = repl.execute("len(context_1), context_1.count('x'), len(context_2), context_2[999][:4]")
    assert block.stdout == "(419430400, 419430400, 1000, '999 ')\n"


def test_later_contexts_keep_memory_bounded(repl: SandboxedRepl) -> None:
    repl.add_context("x" * (100 * MIB))
    assert repl.execute("len(context_1)").stdout == "104857600\n"
    block = repl.execute("held = bytearray(300 << 20)")
    assert (block.status, (block.error or "")[:11]) == ("error", "MemoryError")
    assert repl.execute("'alive'").stdout == "'alive'\n"


RAISED = (
    "import ctypes, mmap, resource, threading, time\n"
    "_, hard = resource.getrlimit(resource.RLIMIT_DATA)\n"
    "resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))\n"
)
GROWS = {
    "objects": "held = []\nwhile True: held.append(b'x' * (1 << 20))",
    "threads": (
        "def grow(held):\n    while True: held.append(b'x' * (1 << 20))\n"
        "for _ in range(4): threading.Thread(target=grow, args=([],)).start()\nwhile True: mmap.mmap(-1, 4096, flags=0x22)"
    ),
    "processes": "import os\nfor _ in range(3): os.fork()\nheld = []\nwhile True: held.append(b'x' * (1 << 20))",
}


@table("grows", GROWS)
def test_memory_of_contexts_cannot_be_taken(sandbox: Sandbox, grows: str) -> None:
    """Code that takes the memory of contexts is ended at its memory limit."""
    if sandbox.level == "standard" and grows == "processes":
        pytest.skip(ONE_PROCESS)
    with sandbox.repl() as repl:
        block = repl.execute(RAISED + GROWS[grows])
        assert (block.status, block.limit) == ("killed", "memory_bytes")
        assert block.post_mortem is not None
        assert block.post_mortem.memory_bytes < 4 * LIMITS.memory_bytes
        assert repl.execute("'alive'").stdout == "'alive'\n"


def test_memory_is_not_filled_in_one_call(sandbox: Sandbox) -> None:
    fill = (
        "m = ctypes.CDLL(None, use_errno=True).mmap\nm.restype = ctypes.c_ssize_t\n"
        "m.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "refused = [(m(None, 1 << 30, 3, 0x22 | flag, -1, 0), ctypes.get_errno()) for flag in (0x8000, 0x2000)]\n"
        "held = mmap.mmap(-1, 1 << 20, flags=0x22)\n"
        "for advice in (22, 23):\n    try:\n        held.madvise(advice)\n    except OSError as error:\n"
        "        refused.append((-1, error.errno))\nprint(refused)"
    )
    with sandbox.repl() as repl:
        assert repl.execute(RAISED + fill).stdout == "[(-1, 1), (-1, 1), (-1, 1), (-1, 1)]\n"


def test_programs_have_no_memory_of_contexts(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS) as repl:
        said = repl.run(["sh", "-c", "ulimit -d; ulimit -Hd"])
        assert all(int(kilobytes) < LIMITS.memory_bytes // 512 for kilobytes in said.stdout.split())


def test_context_is_given_while_a_block_runs(repl: SandboxedRepl) -> None:
    started = threading.Event()
    thread = threading.Thread(
        target=repl.execute,
        args=("print('on', flush=True)\nimport time\nwhile True: time.sleep(0.01)",),
        kwargs={"on_output": lambda *_: started.set()},
    )
    thread.start()
    assert started.wait(WAIT_S)
    repl.add_context("meanwhile")
    repl.interrupt()
    thread.join(WAIT_S)
    assert repl.execute("context_1").stdout == "'meanwhile'\n"


STEALS = {
    "takes": "print(len(s.recvmsg(1, 64, socket.MSG_DONTWAIT)[1]))",
    "closes": "os.close(7)",
    "fills": "while True: s.send(b'x' * 1000, socket.MSG_DONTWAIT)",
    "sends": "s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [4]))])",
}


@table("steals", STEALS)
def test_context_socket_misuse_harms_only_itself(sandbox: Sandbox, steals: str) -> None:
    around = "import array, os, socket\ns = socket.socket(fileno=7)\ntry:\n    {}\nfinally:\n    s.detach()"
    with sandbox.repl("first", limits=LIMITS.replace(max_replay_s=0)) as repl:
        repl.add_context("one")
        repl.execute(around.format(STEALS[steals]))
        assert repl.execute("context_1").stdout == "'one'\n"
        repl.add_context("two")
        repl.execute("context_2")
        repl.execute("import os; os.kill(os.getpid(), 9)")
        repl.add_context("three")
        assert repl.execute("context_1, context_2, context_3").stdout == "('one', 'two', 'three')\n"


def test_stolen_context_fails_its_block(repl: SandboxedRepl) -> None:
    assert repl.execute("import os; os.close(7)").status == "ok"
    repl.add_context("lost")
    block = repl.execute("context_1")
    assert block.status == "error"
    assert "the context context_1 cannot be loaded: its memfd is missing" in (block.error or "")


def test_context_that_cannot_be_added_is_refused(sandbox: Sandbox) -> None:
    with sandbox.repl(limits=LIMITS.replace(later_context_bytes=1 << 20)) as repl:
        with pytest.raises(
            ConfigurationError, match=r"a further context has 2,\d{3},\d{3} bytes, and there is room for 1,048,576"
        ):
            repl.add_context("x" * (2 << 20))
        assert repl.add_context("x" * (1 << 19)) == "context_1"
        with pytest.raises(ConfigurationError, match="raise later_context_bytes = 1,048,576"):
            repl.add_context("x" * (1 << 19))
        with pytest.raises(ContextRefused, match="an object"):
            repl.add_context(object())
        with pytest.raises(ContextRefused, match="is an address"):
            repl.add_context("https://example.org/x")
        assert repl.add_context("y") == "context_2"
        assert repl.execute("context_2").stdout == "'y'\n"
    with pytest.raises(ReplClosed):
        repl.add_context("z")
    with sandbox.repl(limits=ReplLimits()) as repl, pytest.raises(ConfigurationError, match="later_context_bytes = 0"):
        repl.add_context("z")
    with pytest.raises(SandboxFailed, match="not open"):
        sandbox.repl().add_context("z")


def test_all_later_contexts_come_back_together(sandbox: Sandbox) -> None:
    """As many contexts as a REPL may have come back at once."""
    with sandbox.repl() as repl, store("x") as one:
        for _ in range(MAX_LATER):
            repl.add_context(one)
        with pytest.raises(ConfigurationError, match="256 contexts at most"):
            repl.add_context(one)
        code = "sum(name.startswith('context_') for name in globals())"
        assert repl.execute(code).stdout == f"{MAX_LATER + 1}\n"
        repl.execute("import os; os.kill(os.getpid(), 9)")
        assert repl.execute(code).stdout == f"{MAX_LATER + 1}\n"


async def test_template_repls_take_later_contexts() -> None:
    async with Sandbox(LIMITS, warm=0) as sandbox, sandbox.template("shared") as template, template.repl() as repl:
        assert await repl.aadd_context("own") == "context_1"
        assert (await repl.aexecute("context, context_1")).stdout == "('shared', 'own')\n"
