"""Attacks of a block on the checkpoint of its REPL: at worst it loses its own variables, and no process waits for it."""

from collections.abc import Iterator

import psutil
import pytest

from rlm_broker import ReplLimits, Sandbox
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.workers import source
from tests.support.launcher import needs_strict
from tests.support.processes import living_below
from tests.support.waiting import until_now

pytestmark = needs_strict
EACH = ReplLimits(checkpoint="each", max_replay_s=0, block_timeout_s=1, interrupt_grace_s=0.2, memory_bytes=256 << 20)
FIND = "[int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
STARTS = "import os, signal, time, socket, resource, threading\nx = 1\n"

HOSTILE = {
    "kills it": ("", f"os.kill(max({FIND}), signal.SIGKILL)"),
    "stops it": ("", f"os.kill(max({FIND}), signal.SIGSTOP)"),
    "floods it": (
        "",
        f"for n in {{*range(1, 65)}} - {{9, 19, 32, 33}}:\n"
        f"    try: os.kill(max({FIND}), n)\n    except (ProcessLookupError, ValueError): break",
    ),
    "runs a function in it": (
        "signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))",
        f"os.kill(max({FIND}), 10)",
    ),
    "signals all": ("", "signal.signal(15, signal.SIG_IGN); os.kill(-1, 15); os.killpg(0, 15)"),
    "closes descriptor 7": ("os.close(7)", ""),
    "puts another socket at descriptor 7": ("a, b = socket.socketpair(); os.dup2(a.fileno(), 7); b.send(b'c')", ""),
    "ends at each fork": ("os.register_at_fork(after_in_child=lambda: os._exit(1))", ""),
    "closes all at each fork": ("os.register_at_fork(after_in_child=lambda: os.closerange(5, 99))", ""),
    "starts a process in it": (
        "busy = []\ndef starts():\n    if busy: time.sleep(1000)\n    busy.append(1); os.fork()\n"
        "os.register_at_fork(after_in_child=starts)",
        "",
    ),
    "is the reaper of its copies": ("import ctypes; assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0", ""),
    "leaves no process": ("resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))", ""),
    "leaves no descriptor": ("full = []\ntry:\n    while True: full.append(os.dup(0))\nexcept OSError: pass", ""),
}
FALSE_COPY = """
def pretend():
    if pretend.is_busy: return
    pretend.is_busy = True
    if (false := os.fork()) == 0:
        time.sleep(1000)
    for fd in {*range(3, 20)} - {4, 5, 7}:
        try: os.write(fd, false.to_bytes(8, 'little') + bytes(8))
        except OSError: pass
    pretend.is_busy = False
pretend.is_busy = False
os.register_at_fork(before=pretend, after_in_child=lambda: pretend.is_busy or os._exit(1))
"""


@pytest.fixture(autouse=True)
def _copies_are_given_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "RESUMES_S", 0.5)


@pytest.fixture
def repl(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl("the context", limits=EACH) as opened:
        yield opened
        below = set(psutil.Process(opened.pid).children(recursive=True))
    until_now(lambda: not below & living_below())


@pytest.mark.parametrize(("before", "code"), list(HOSTILE.values()), ids=list(HOSTILE))
def test_hostile_block_loses_only_its_own_variables(repl: SandboxedRepl, before: str, code: str) -> None:
    assert repl.execute(STARTS + before).status == "ok"
    block = repl.execute(f"y = 2\n{code}\nos._exit(1)")
    assert block.status == "killed"
    assert repl.execute("print(context, globals().get('x', 1), 'y' in globals())").stdout == "the context 1 False\n"
    if block.blocks_undone is None:
        assert "There was no checkpoint of its variables: " in (block.error or "")


def test_function_after_forks_loses_only_its_own_rollback(repl: SandboxedRepl) -> None:
    repl.execute("import os\nos.register_at_fork(after_in_child=lambda: os._exit(1))\nx = 1")
    assert repl.execute("os._exit(1)").blocks_undone == 2  # the older checkpoint
    assert repl.execute("print(context, 'x' in globals())").stdout == "the context False\n"


def test_endless_function_at_forks_is_killed_with_its_block(repl: SandboxedRepl) -> None:
    for moment in ("before", "after_in_parent", "after_in_child"):
        repl.execute(f"import os, time\nos.register_at_fork({moment}=lambda: time.sleep(1000))\nx = 1")
        block = repl.execute("y = 2", timeout_s=0.2)
        assert (block.status, block.limit) == ("killed", "block_timeout_s")
        assert block.blocks_undone in (2, None)  # the older checkpoint; or the new one, of which a parent is left
        assert repl.execute("print(context, 'x' in globals())").stdout == "the context False\n"


def test_false_copy_gives_way_to_a_fresh_repl(repl: SandboxedRepl) -> None:
    """A process of code's, which init takes for the checkpoint, is as untrusted as code. This one says nothing."""
    repl.execute(STARTS + FALSE_COPY)
    block = repl.execute("os._exit(1)")
    assert (block.status, block.blocks_undone) == ("killed", None)
    assert (block.error or "").endswith("There was no checkpoint of its variables: it could not go on")
    assert repl.execute("print(context, 'x' in globals())").stdout == "the context False\n"


def test_copy_that_does_not_go_on_gives_way_to_a_fresh_repl(repl: SandboxedRepl) -> None:
    repl.execute("import os, random, time\nrandom.setstate = lambda state: time.sleep(1000)")
    block = repl.execute("os._exit(1)")
    assert (block.status, block.blocks_undone) == ("killed", None)
    assert (block.error or "").endswith("There was no checkpoint of its variables: it could not go on")
    assert repl.execute("print(context, 'random' in globals())").stdout == "the context False\n"
