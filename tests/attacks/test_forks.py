"""REPLs of one family: what code does after the fork reaches neither another REPL, nor the processes that keep it."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

import psutil
import pytest

from rlm_broker.errors import ForkRefused, SandboxFailed
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from tests.attacks.arena import GOT_THROUGH, LIMITS
from tests.support.launcher import needs_strict
from tests.support.tables import Rows
from tests.support.waiting import until_now

pytestmark = needs_strict
C = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
TOUCHES = {
    "sends a signal": "os.kill(pid, 0); got()",
    "sends one to its group": "pid > 1 and (os.killpg(pid, 0), got())",  # killpg(1) would be kill(-1)
    "sends one to its thread": "assert c.syscall(234, pid, pid, 0) == 0; got()",
    "sends one by a pidfd": "signal.pidfd_send_signal(os.pidfd_open(pid), 0); got()",
    "takes a descriptor by a pidfd": "assert c.syscall(438, os.pidfd_open(pid), 4, 0) >= 0; got()",
    "reads its memory": "open(f'/proc/{pid}/mem', 'rb'); got()",
    "writes its memory": "open(f'/proc/{pid}/mem', 'r+b'); got()",
    "reads its memory by call": "b = ctypes.create_string_buffer(16)\n"
    "assert c.process_vm_readv(pid, b, 1, b, 1, 0) >= 0; got()",
    "traces": "assert c.ptrace(0x4206, pid, 0, 0) == 0; got()",
    "reads its environment": "open(f'/proc/{pid}/environ', 'rb').read(1); got()",
    "reads its maps": "open(f'/proc/{pid}/maps', 'rb').read(1); got()",
    "sees its descriptors": "[os.readlink(f'/proc/{pid}/fd/{n}') for n in os.listdir(f'/proc/{pid}/fd')]; got()",
    "opens its pipe": "open(f'/proc/{pid}/fd/1', 'wb'); got()",
    "enters its folder": "os.stat(f'/proc/{pid}/cwd/.'); got()",
    "limits it": "import resource; resource.prlimit(pid, resource.RLIMIT_NOFILE); got()",
    "pins it": "os.sched_setaffinity(pid, os.sched_getaffinity(0)); got()",
    "slows it": "os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(0, pid)); got()",
}
"""Each for every process of the worker but itself: init, hubs, keepers, the original and forks."""
FOR_EACH = """
import os, signal
def got(): print('{got}', pid)
for pid in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    if pid != os.getpid():
        try:
            exec({touch!r})
        except (OSError, AssertionError): pass
"""
ENDS = {
    "kills all": "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass",
    "kills its first group": "import os\ntry: os.killpg(os.getpgid(1), 9)\nexcept OSError: pass",
    "reaps for others": C + "assert c.prctl(36, 1, 0, 0, 0) == 0\nimport os\nif os.fork() == 0: os.fork(); os._exit(0)",
    "restricts itself with what it has": C + "print([fd for fd in range(40) if c.syscall(446, fd, 0) == 0])",
    "closes all that it has": "import os\nos.closerange(3, 100)",
    "writes to all that it has": "import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'k' * 20)\n    except OSError: pass",
}
"""Code that may end its own REPL, and must end no other one."""
ORPHANS = (
    C
    + """
import os, signal, time
assert c.prctl(36, 1, 0, 0, 0) == 0
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        assert c.prctl(36, 1, 0, 0, 0) == 0
        if os.fork() == 0:
            os.setpgid(0, 0)
            {does}
        os._exit(0)
    os.waitpid(pid, 0)
"""
)
HIDES = {
    "CPU time": "while True: pass",
    "memory": "own = bytearray(b'x') * (100 << 20); time.sleep(1000)",
}
"""Work of the orphans of a block, which keeps them below itself as their reaper: they reach a limit of the block's."""
KEEPS_RULESET = (
    C
    + """
import os
kept = []
def keep():
    if kept: return
    for fd in range(3, 60):
        try:
            if 'landlock' in os.readlink(f'/proc/self/fd/{fd}'): kept.append(os.dup(fd))
        except OSError: pass
os.register_at_fork(before=keep)
x = 'kept'
"""
)
RESTRICTS = """
layers = 0
while c.syscall(446, kept[0], 0) == 0: layers += 1
print(layers, ctypes.get_errno())
"""
DESCRIPTORS = """
import os
for fd in sorted(map(int, os.listdir('/proc/self/fd'))):
    try: print(os.readlink(f'/proc/self/fd/{fd}'))
    except FileNotFoundError: pass
"""
AT_FORK = """
import os
first, inside, x = os.getpid(), [], 'kept'
def spin():
    while True: pass
def hook():
    if not inside and os.path.exists('hang'):
        inside.append(1)
        {does}
        inside.clear()
os.register_at_fork({hook}=hook)
"""
STARTS = """if os.getpid() == first and os.fork() == 0:
            if os.fork() == 0: spin()
            os._exit(0)"""
HOLDS_UP = {
    "hub, before": ("before", "os.getpid() == first and spin()", 5),
    "hub, later": ("after_in_parent", "os.getpid() == first and spin()", 5),
    "keeper": ("after_in_child", "os.getppid() == first and spin()", 5),
    "REPL": ("after_in_child", "os.getppid() == first or spin()", 5),
    "hub starts another": ("after_in_parent", STARTS, 6),
}
"""Function for `os.register_at_fork`, and the number of processes: init, two REPLs with their keepers, and a hub that
rests."""
PROCESSES = "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, "strict", warm=0) as opened:
        yield opened


@pytest.fixture
def family(sandbox: Sandbox) -> Iterator[dict[str, SandboxedRepl]]:
    """The original, two forks of one moment, and a fork of a fork; each with a hub that waits."""
    with sandbox.repl("the context") as original:
        original.execute("import os\nname = 'original'")
        members = {"original": original, "fork": original.fork(), "sibling": original.fork()}
        members["younger"] = members["fork"].fork()
        yield members


def test_other_processes_of_the_family_are_out_of_reach(family: dict[str, SandboxedRepl]) -> None:
    for name, repl in family.items():
        repl.execute(f"name = {name!r}")
        family["original"].fork().close()  # so that a hub of the original waits
    rows = Rows()
    for name, repl in family.items():
        for what, touch in TOUCHES.items():
            with rows.trying(f"{name} {what}"):
                block = repl.execute(C + FOR_EACH.format(got=GOT_THROUGH, touch=touch))
                assert (block.status, block.stdout) == ("ok", ""), block
    assert [repl.get("name") for repl in family.values()] == [*family]
    rows.end()


@pytest.mark.parametrize("code", list(ENDS.values()), ids=list(ENDS))
def test_end_of_one_is_the_end_of_no_other(family: dict[str, SandboxedRepl], code: str) -> None:
    for name in ("fork", "original"):
        block = family[name].execute(code)
        assert "[0" not in block.stdout
        for other, repl in family.items():
            if other not in ("fork", name):
                assert repl.execute("print(name, context)").stdout == "original the context\n", (name, other)


def test_fork_holds_no_descriptor_of_another(family: dict[str, SandboxedRepl]) -> None:
    held = {name: repl.execute(DESCRIPTORS).stdout.split("\n")[:-1] for name, repl in family.items()}
    for name, found in held.items():
        kinds = [each.split(":")[0] for each in found]
        bells = [] if name == "original" else ["/memfd"]
        assert kinds == ["/dev/null", "pipe", "pipe", "socket", "pipe", "socket", *bells], (name, found)
    own = [each for found in held.values() for each in found if ":[" in each]
    assert len(own) == len({*own})


def test_hidden_copy_of_a_bell_cannot_grow(family: dict[str, SandboxedRepl]) -> None:
    code = "for fd in range(3, 100):\n    try:\n        if 'memfd' in os.readlink(f'/proc/self/fd/{fd}'): os.ftruncate(fd, 1 << 20)\n"
    code += "    except FileNotFoundError: pass\n    except PermissionError: print('sealed')"
    assert family["fork"].execute(code).stdout == "sealed\n"


@pytest.mark.parametrize("is_forked", [False, True])
def test_reaper_of_its_own_orphans_hides_none_of_them(sandbox: Sandbox, is_forked: bool) -> None:
    limits = LIMITS.replace(cpu_s=0.5, interrupt_grace_s=0.1, memory_bytes=150 << 20, max_replay_s=0)
    rows = Rows()
    for what, does in HIDES.items():
        with rows.trying(what), sandbox.repl("the context", limits=limits) as original, ExitStack() as stack:
            original.execute(f"name = {what!r}")
            repl = stack.enter_context(original.fork()) if is_forked else original
            assert original.pid is not None
            processes = psutil.Process(original.pid)
            before = len(processes.children(recursive=True))
            assert repl.execute(ORPHANS.format(does=does)).status in ("ok", "killed")
            until_now(partial(_has_fewer, processes, before))
            if is_forked:
                assert original.get("name") == what
    rows.end()


def _has_fewer(processes: psutil.Process, before: int) -> bool:
    return len(processes.children(recursive=True)) < before


def test_rulesets_that_code_has_kept_restrict_itself_alone(sandbox: Sandbox) -> None:
    with sandbox.repl("the context") as original:
        original.execute(KEEPS_RULESET)
        fork, sibling = original.fork(), original.fork()
        layers, error = map(int, fork.execute(RESTRICTS).stdout.split())
        assert (0 < layers <= 16, error) == (True, errno.E2BIG)
        with pytest.raises(ForkRefused, match="Landlock keeps no more apart"):
            fork.fork()
        assert [each.get("x") for each in (fork, sibling, original)] == ["kept"] * 3
        block = fork.execute("import os, signal\nsignal.signal(2, signal.SIG_IGN)\nos.fork()\nwhile True: pass", 0.3)
        assert (block.status, "line 4 of the block" in (block.error or "")) == ("killed", True)
        assert sibling.fork().get("x") == original.fork().get("x") == "kept"


@pytest.mark.parametrize("hook", ["before", "after_in_child", "after_in_parent"])
def test_code_that_restricts_its_hub_or_keepers_gets_no_fork(sandbox: Sandbox, hook: str) -> None:
    """Such a REPL goes on with its variables, or loses its process. It can be killed with all that it has started."""
    limits = LIMITS.replace(checkpoint="each", max_replay_s=0)
    code = (
        KEEPS_RULESET
        + f"os.register_at_fork({hook}=lambda: [0 for fd in kept for _ in range(16) if c.syscall(446, fd, 0)])"
    )
    with sandbox.repl("the context", limits=limits) as repl:
        repl.execute(code)
        with pytest.raises(ForkRefused):
            _fork(repl, times=3)
        block = repl.execute("print(x)")
        assert block.stdout == "kept\n" or (block.status, hook) == ("killed", "after_in_parent"), block
        assert repl.execute("import os; os.fork(); os._exit(1)").status == "killed"
        assert repl.execute("print(context)").stdout == "the context\n"


@pytest.mark.parametrize(("hook", "does", "left"), list(HOLDS_UP.values()), ids=list(HOLDS_UP))
def test_code_that_holds_up_a_fork_goes_on_in_no_process(hook: str, does: str, left: int) -> None:
    with Sandbox(LIMITS.replace(start_timeout_s=1), "strict", warm=0) as sandbox, sandbox.repl() as repl:
        repl.execute(AT_FORK.format(hook=hook, does=does))
        fork = repl.fork()
        repl.files.write("hang", b"")
        with suppress(SandboxFailed):
            repl.fork().close()
        until_now(lambda: fork.execute(PROCESSES).stdout == f"{left}\n")
        assert [each.get("x") for each in (repl, fork)] == ["kept"] * 2


def test_keepers_of_a_refused_fork_are_no_children_of_the_repl() -> None:
    """The keeper of the fork ends later than that of the REPL that would have gone on."""
    code = "import os, time\nn = []\ndef end():\n    if len(n) < 3:\n        time.sleep(0.3 if len(n) == 1 else 0)\n        os._exit(1)\n"
    code += "os.register_at_fork(before=lambda: n.append(1), after_in_child=end)"
    with Sandbox(LIMITS, "strict", warm=0) as sandbox, sandbox.repl() as repl:
        repl.execute(code)
        with pytest.raises(ForkRefused):
            repl.fork()
        assert repl.execute("os.wait()").error == "ChildProcessError: [Errno 10] No child processes"
        assert repl.fork().execute("print(len(n))").status == "ok"


def _fork(repl: SandboxedRepl, times: int) -> None:
    for _ in range(times):
        repl.fork()
