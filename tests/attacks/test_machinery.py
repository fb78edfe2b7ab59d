"""The REPL's own machinery and its init: model code may ruin only its own REPL."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from rlm_broker.sandbox.repl_blocks import MOST_KILLS
from tests.attacks.arena import PROTECTED, Arena, Attack, check, said_it_got_through
from tests.support.processes import living_parents_below
from tests.support.tables import table
from tests.support.waiting import LONGER_AND_LONGER

BREAKS = {
    "empties_the_builtins": "import builtins; builtins.__dict__.clear()",
    "replaces_print_and_len": "import builtins; builtins.print = builtins.len = builtins.isinstance = None",
    "empties_the_modules": "import sys; sys.modules.clear()",
    "empties_the_path": "import sys; sys.path.clear(); sys.path_importer_cache.clear()",
    "replaces_stdout": "import sys; sys.stdout = sys.stderr = None",
    "closes_stdout": "import sys; sys.stdout.close(); sys.__stdout__ = None",
    "deletes_every_name": "globals().clear()",
    "deletes_the_context": "del context; context = 'forged'",
    "breaks_the_encoder": "import sandbox_worker.wire.messages as m; m.encode = m._encoder = None",
    "breaks_the_channel": "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Channel': o._socket.close()",
    "breaks_json": "import json; json.dumps = json.loads = None",
    "breaks_signals": "import signal; [signal.signal(n, signal.SIG_IGN) for n in range(1, 65) if n not in (9, 19, 32, 33)]",
    "breaks_interrupts": "import sandbox_worker.repl.interrupts as i; i.Interrupts.armed = None",
    "never_switches_threads": "import sys; sys.setswitchinterval(1e6)",
    "traces_everything": "import sys, threading\ndef t(*a): raise ValueError\nthreading.settrace(t); sys.settrace(t); f = lambda: 1; f()",
    "profiles_everything": "import sys\nsys.setprofile(lambda *a: 1 / 0)",
    "recurses_for_ever": "def f(): f()\nf()",
    "recurses_in_c": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "allows_itself_no_file": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "allows_itself_no_stack": "import resource; resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096))",
    "allows_itself_no_memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "allows_itself_no_time": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (0, 0))",
    "leaves_its_folder": "import os, shutil; os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd())",
    "masks_every_mode": "import os; os.umask(0o777)",
    "closes_every_descriptor": "import os; os.closerange(0, 256)",
    "puts_something_else_at_the_connection": "import os; os.dup2(os.open('/dev/null', os.O_RDWR), 4)",
    "puts_the_connection_at_stdout": "import os; os.dup2(4, 1); print('scribble', flush=True)",
    "fills_the_connection": "import os\nos.set_blocking(4, False)\ntry:\n    while True: os.write(4, b'x' * 65536)\nexcept BlockingIOError: pass",
    "reads_the_connection": "import os, threading\nthreading.Thread(target=lambda: os.read(4, 65536), daemon=True).start()",
    "exits_in_a_thread": "import threading, os\nt = threading.Thread(target=os._exit, args=(3,)); t.start(); t.join()",
    "raises_at_its_end": "class X:\n    def __del__(self): raise SystemExit\nx = X(); del x",
    "registers_an_exit": "import atexit; atexit.register(lambda: 1 / 0)",
    "answers_with_an_object_that_bites": "class X:\n    def __str__(self): raise MemoryError\nFINAL(X())",
    "answers_with_too_much": "FINAL('x' * (70 << 20))",
    "sets_an_answer_that_bites": "class X(dict):\n    def get(self, *a): raise KeyboardInterrupt\nanswer = X()",
    "raises_what_no_except_stops": "class X(BaseException): pass\nraise X",
    "raises_an_error_that_bites": "class X(Exception):\n    def __str__(self): raise X\nraise X",
    "forks_and_falls_through": "import os; os.fork()",
    "forks_and_answers_for_its_parent": "import os\nif os.fork() == 0: FINAL('child')",
    "crashes": "import ctypes; ctypes.string_at(1)",
    "aborts": "import os; os.abort()",
    "crashes_in_a_thread": "import ctypes, threading; t = threading.Thread(target=ctypes.string_at, args=(1,)); t.start(); t.join()",
    "corrupts_none": "import ctypes; ctypes.memset(id(None), 0xFF, 16); x = [None] * 10",
    "frees_the_context": "import ctypes; ctypes.memset(id(context), 0, 8); del context",
}
ONE_AT_A_TIME = threading.Lock()
WAITS_FOR_ALL = "import os\ntry:\n    while True: os.wait()\nexcept OSError: pass"
OF_INIT = {
    "kills_it": "import os, signal\nfor n in range(1, 65):\n    try: os.kill(os.getppid(), n)\n    except OSError: pass",
    "kills_everybody_it_sees": "import os; os.kill(-1, 9)",
    "stops_it": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "kills_it_by_pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "reads_its_memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb'); print('<GOT>')",
    "reads_its_environment": "import os; open(f'/proc/{os.getppid()}/environ').read(); print('<GOT>')",
    "reads_its_maps": "import os; open(f'/proc/{os.getppid()}/maps').read(); print('<GOT>')",
    "lists_its_descriptors": "import os; os.listdir(f'/proc/{os.getppid()}/fd'); print('<GOT>')",
    "opens_its_control_socket": "import os; os.open(f'/proc/{os.getppid()}/fd/3', os.O_RDWR); print('<GOT>')",
    "raises_its_score": "import os; open(f'/proc/{os.getppid()}/oom_score_adj', 'w').write('1000'); print('<GOT>')",
    "limits_it": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)); print('<GOT>')",
    "traces_it": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0; print('<GOT>')",
    "plants_a_child_of_its": (
        "import ctypes, os; p = ctypes.CDLL(None).syscall(56, 0x8011, 0, 0, 0, 0)\n"
        "os._exit(0) if p == 0 else None\nassert p > 0; print('<GOT>')"
    ),
    "leaves_it_orphans": "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n        os._exit(0)",
    "floods_its_pipe": "import os\nfor _ in range(300): os.write(2, b'x' * 16384)",
    "sends_it_signals_as_fast_as_it_can": "import os\nfor _ in range(500):\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
}  # fmt: skip


@pytest.mark.parametrize("arena", PROTECTED, indirect=True)
@table("name", BREAKS, at_once=4)
def test_ruined_repl_is_replaced_with_its_context(arena: Arena, name: str) -> None:
    before = psutil.Process().memory_info().rss
    with arena.sandbox.repl("its context") as ruined:
        ruined.execute(BREAKS[name], timeout_s=1)
        # The next block may find it ruined, or be stolen from it. A replay ruins it again; after some kills in a row it is
        # replaced without one.
        for timeout_s in (*[LONGER_AND_LONGER[0]] * MOST_KILLS, *LONGER_AND_LONGER):
            later = ruined.execute("print(context)", timeout_s=timeout_s)
            if later.stdout == "its context\n":
                break
    assert later.stdout == "its context\n"
    with ONE_AT_A_TIME:
        arena.goes_on()
    assert psutil.Process().memory_info().rss - before < 300 << 20


@pytest.mark.parametrize("arena", PROTECTED, indirect=True)
@table("name", OF_INIT)
def test_init_outlives_ruined_repls(arena: Arena, name: str) -> None:
    if name == "lists_its_descriptors" and arena.level == "strict" and is_root_in_disguise():
        return  # the owner of init's entry in /proc is the kernel's root: names of descriptors are his to list
    arena.repl.execute(WAITS_FOR_ALL)  # else the REPL may be a parent, too
    inits = living_parents_below()
    check(arena, [Attack(name, OF_INIT[name], said_it_got_through)])
    assert inits <= living_parents_below()  # the very same ones


def is_root_in_disguise() -> bool:
    """Whether this user is root of the machine under another name, as `test_as_ordinary_user.py` makes him."""
    return os.getuid() != 0 and Path("/proc/self/uid_map").read_text().split()[1] == "0"
