"""Each limit of a REPL, exceeded for real: what the model is told, and that the next block works."""

from collections.abc import Iterator

import psutil
import pytest

from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.messages import Query, Slot
from tests.support.tables import table
from tests.support.waiting import WAIT_S, within_longer

MIB = 1 << 20
LIMITS = Limits(
    memory_bytes=160 * MIB,
    max_processes=12,
    max_open_files=40,
    scratch_bytes=8 * MIB,
    max_scratch_files=200,
    max_output_bytes=10_000,
    interrupt_grace_s=0.3,
    max_repl_restarts=1000,
)


@pytest.fixture(scope="module", params=["strict", "standard"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param, warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl("the context") as opened:
        yield opened
        assert opened.execute("print(context)").stdout == "the context\n"


ONE_LEVEL = pytest.mark.parametrize("sandbox", ["standard"], indirect=True)
"""Mark of behaviour that is the same at each level."""
NEEDS_PROCESSES = pytest.mark.parametrize("sandbox", ["strict"], indirect=True)
"""At the level standard a REPL is one process."""


LITTLE_MEMORY = Limits(memory_bytes=48 * MIB)
SMALL_FRAMES = Limits(max_frame_bytes=1 << 12)


def test_memory_limit_raises_memory_error_and_is_named(repl: SandboxedRepl) -> None:
    block = repl.execute("x = bytearray(1 << 30)")
    assert (block.status, block.error, block.limit) == ("error", "MemoryError", "memory_bytes")
    assert repl.execute("raise ValueError('MemoryError')").limit is None


def test_libraries_do_not_count_as_memory(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=Limits(memory_bytes=192 * MIB)) as repl:
        assert repl.execute("import pandas\nimport matplotlib.pyplot").error is None


@ONE_LEVEL
@table("size", [10, 20_000])
def test_repl_at_memory_limit_can_free_memory(sandbox: Sandbox, size: int) -> None:
    """A REPL that has used up its memory can be told to free it."""
    with sandbox.repl(limits=LIMITS.replace(memory_bytes=64 * MIB)) as repl:
        for _ in range(2):
            filled = repl.execute(f"held = []\nwhile True: held.append(bytes({size}))")
            assert (filled.status, filled.error) == ("error", "MemoryError")
            assert repl.execute("print(len(held) > 0)").stdout == "True\n"
            assert repl.execute("del held").status == "ok"
            assert repl.execute("held = [bytes(500) for _ in range(30_000)]").status == "ok"


FILLS = {
    "strict": "held = []\nwhile True: held.append(bytes({size}))",
    "standard": "held = globals().get('held', [])\nwhile True: held.append(bytes({size}))",
}
"""Level → block that fills the memory: `held` is let go of first, or added to."""


@table("size", [700, 20_000, 200_000, 5_000_000])
def test_repl_survives_repeated_memory_errors(sandbox: Sandbox, size: int) -> None:
    with sandbox.repl(limits=LITTLE_MEMORY) as repl:
        for _ in range(2):
            filled = repl.execute(FILLS[sandbox.level].format(size=size))
            assert (filled.status, filled.error) == ("error", "MemoryError")
            assert repl.execute("print(len(held) > 0)").stdout == "True\n"
        assert repl.execute("del held").status == "ok"
        assert repl.execute("held = [bytes(500) for _ in range(20_000)]").status == "ok"


FULL = {
    "strict": "held = []\ntry:\n    while True: held.append(bytes(1000))\nexcept MemoryError: pass\n",
    "standard": "held = []\ntry:\n    while True: held.append([None])\nexcept MemoryError: pass\n",
}
"""Level → block that goes on with full memory."""
SENT = {
    "lines": "for _ in range(400): print('x' * 1000)",
    "lines of halves of characters": "for _ in range(40): print('\\ud800' * 3000)",
    "a batch": "llm_query_batched([f'{number}' + 'x' * 2000 for number in range(200)])",
    "a long answer": "llm_query('long')",
    "a tool's result": "tool('x' * 3000)",
    "a child's context": "rlm_query('task', context=['x' * 1000] * 9)",
    "a display": ("class Page:\n    def _repr_html_(self): return '<p>' * 30_000\ndisplay(Page())"),
    "an answer": "FINAL('x' * 50_000)",
    "fields": "SUBMIT(['x' * 1000] * 50)",
    "the value": "held[:20_000]",
}


@table("name", SENT)
def test_repl_sends_what_it_can_with_full_memory(sandbox: Sandbox, name: str) -> None:
    """No message ends the REPL, and the memory can be freed."""

    async def answer(query: Query) -> list[Slot]:
        return [Slot(text="y" * (300_000 if prompt == "long" else 1000)) for prompt in query.texts]

    with sandbox.repl(answer=answer, tools=["tool"], limits=LITTLE_MEMORY) as repl:
        sent = repl.execute(FULL[sandbox.level] + SENT[name], value=True)
        assert sent.status in ("ok", "error")
        assert repl.execute("print(len(held) > 0)").stdout == "True\n"
        assert repl.execute("del held\nprint(1)").stdout == "1\n"


def test_repl_that_prints_with_full_memory_loses_no_line(open_sandbox: Sandbox) -> None:
    code = "lines = [f'{number} ' + 'x' * 3000 for number in range(200)]\n" + FULL["strict"]
    with open_sandbox.repl(limits=Limits(memory_bytes=64 * MIB)) as repl:
        block = repl.execute(code + "for line in lines: print(line)")
        assert (block.status, block.error) == ("ok", None)
        assert block.stdout == "".join(f"{number} " + "x" * 3000 + "\n" for number in range(200))


def test_print_longer_than_a_message_is_sent_in_pieces(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=SMALL_FRAMES) as repl:
        for unit in ("x", "\0\n", "\U0001f600"):
            block = repl.execute(f"text = {unit!r} * 30_000\nprint(text)\nprint('end', text, flush=True)")
            assert (block.status, block.stdout) == ("ok", f"{unit * 30_000}\nend {unit * 30_000}\n")


@table(
    "code",
    [
        "answer = {'content': 'x' * 60_000, 'ready': False}",
        "raise ValueError('\\0' * 900)",
        "raise SystemExit('\\0' * 900)",
        "FINAL('x' * 5_000)",
        "SUBMIT(['x'] * 5_000)",
        "['x'] * 5_000",
        "".join(f"variable_{number} = {number}\n" for number in range(200)),
    ],
)
def test_result_longer_than_a_message_ends_no_repl(open_sandbox: Sandbox, code: str) -> None:
    with open_sandbox.repl(limits=SMALL_FRAMES) as repl:
        repl.execute("kept = 1")
        assert repl.execute(code, value=True).status != "killed"
        assert repl.execute("print(kept)").stdout == "1\n"


def test_repl_without_memory_to_continue_says_so(open_sandbox: Sandbox) -> None:
    no_memory = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nFINAL('x' * 4_000_000)"
    with open_sandbox.repl(limits=Limits(memory_bytes=48 * MIB)) as repl:
        told = [repl.execute(no_memory).error, *(repl.execute("print([1] * 1_000_000)").error for _ in range(2))]
    assert "MemoryError" in told or "it used up its memory (memory_bytes)" in str(told)
    assert "os._exit" not in str(told)


@NEEDS_PROCESSES
def test_fork_bomb_ends_in_an_error(repl: SandboxedRepl) -> None:
    block = repl.execute("import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(1000)")
    assert (block.status, block.error) == ("error", "BlockingIOError: [Errno 11] Resource temporarily unavailable")


def test_thread_bomb_is_bounded(repl: SandboxedRepl) -> None:
    code = (
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "threads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in range(200)]\n"
        "for thread in threads: thread.start()\n"
        "time.sleep(1000)"
    )
    block = repl.execute(code)
    assert block.status in ("error", "killed")
    assert "can't start new thread" in (block.error or "") or "max_processes = 12" in (block.error or "")


def test_cpu_time_limit_is_named(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=Limits(cpu_s=0.5)) as repl:
        block = repl.execute("while True: pass", timeout_s=WAIT_S)
        assert block.status == "killed"
        assert "cpu_s = 0.5 s CPU time" in (block.error or "")
        assert repl.execute("1").stdout == "1\n"


def test_file_size_is_bounded_by_scratch_folder(repl: SandboxedRepl) -> None:
    assert "File too large" in (repl.execute("open('big', 'wb').truncate(9 << 20)").error or "")


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("for n in range(9): open(f'{n}', 'wb').write(bytes(1 << 20))", "scratch_bytes"),
        (
            "import os\nos.mkdir('d', 0o300)\nfor n in range(9): open(f'd/{n}', 'wb').write(bytes(1 << 20))",
            "scratch_bytes",
        ),
        (
            "import os\nfiles = []\nfor n in range(9):\n"
            "    files.append(open('f', 'wb'))\n    files[-1].write(bytes(1 << 20))\n    os.unlink('f')",
            "scratch_bytes",
        ),
        ("for n in range(300): open(f'{n}', 'w').close()", "max_scratch_files"),
        ("import os\nfor _ in range(300):\n    os.mkdir('d')\n    os.chdir('d')", "max_scratch_files"),
    ],
)
def test_scratch_folder_is_bounded_as_a_whole(repl: SandboxedRepl, code: str, limit: str) -> None:
    block = repl.execute(f"{code}\nimport time\ntime.sleep(1000)")
    if repl.isolation.level == "strict":  # it is a file system of its own, and its size the kernel's affair
        assert "No space left on device" in (block.error or "")
        repl.execute("files = None")
    else:
        assert block.status == "killed"
        assert f", {limit} = " in (block.error or "")
        assert repl.execute("import os\nos.listdir()").stdout == "[]\n"


def test_descriptors_are_bounded(repl: SandboxedRepl) -> None:
    assert "Too many open files" in (repl.execute("files = [open('/dev/null') for _ in range(50)]").error or "")


@ONE_LEVEL
@table(
    "loop",
    [
        "while True: print('x' * 100)",
        "import os\nwhile True: os.write(1, b'x' * 10_000)",
        "import ctypes\nputs = ctypes.PyDLL(None).puts\nwhile True: puts(b'x' * 1000)",  # it holds the GIL meanwhile
    ],
)
def test_print_loop_costs_no_memory(repl: SandboxedRepl, loop: str) -> None:
    before = psutil.Process().memory_info().rss
    block = repl.execute(loop, timeout_s=0.5)
    assert block.status in ("interrupted", "killed")
    assert len(block.stdout) < 6 * LIMITS.max_output_bytes
    assert psutil.Process().memory_info().rss - before < 64 * MIB


@table(
    "code, statuses",
    [
        ("import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')", {"interrupted", "killed"}),
        ("10 ** 10 ** 8", {"interrupted", "killed"}),
        ("sum(range(10 ** 12))", {"killed", "interrupted"}),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"killed"}),
        (
            "import time\nwhile True:\n    try: time.sleep(0.001)\n    except BaseException: pass",
            {"killed"},
        ),
        ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass", {"killed"}),
        ("import os\nos.closerange(0, 100)\nwhile True: pass", {"killed"}),
    ],
    at_once=7,
)
def test_stubborn_block_is_ended_in_time(sandbox: Sandbox, code: str, statuses: set[str]) -> None:
    """Code that resists its end is ended in time, and the next block works."""
    with sandbox.repl("the context") as repl:
        block = within_longer(
            lambda limit_s: repl.execute(code, timeout_s=limit_s), lambda block: block.status in statuses
        )
        assert block.status in statuses
        assert block.error
        assert repl.execute("print(context)").stdout == "the context\n"


def test_killed_block_names_its_line(repl: SandboxedRepl) -> None:
    repl.execute("import signal\ndef spin():\n    while True: pass")
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('there')\nspin()"
    block = within_longer(lambda limit_s: repl.execute(code, timeout_s=limit_s), lambda block: block.stdout)
    assert block.post_mortem is not None
    assert block.post_mortem.where == "It was at line 3 of an earlier block, in spin"
    assert "It was at line 3 of an earlier block, in spin" in (block.error or "")


OF_1000_LINES = "0\n1\n2\n\n... [3,876 more cut, lines: 995] ...\n998\n999\n"


@pytest.fixture
def few_lines(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl(limits=Limits(max_output_lines=5)) as opened:
        yield opened


@table(
    "stream, code",
    [
        ("stdout", "for number in range(1000): print(number)"),
        ("stdout", "import sys\nsys.stdout.write(''.join(f'{number}\\n' for number in range(1000)))\nNone"),
        ("stderr", "import sys\nfor number in range(1000): print(number, file=sys.stderr)"),
        ("stdout", "import os\nfor number in range(1000): os.write(1, f'{number}\\n'.encode())"),
        ("stderr", "import os\nfor number in range(1000): os.write(2, f'{number}\\n'.encode())"),
    ],
)
def test_output_lines_keep_first_and_last(few_lines: SandboxedRepl, stream: str, code: str) -> None:
    """If a block prints many lines, the first and the last are kept."""
    block = few_lines.execute(code)
    assert block.status == "ok"
    assert getattr(block, stream) == OF_1000_LINES
    assert few_lines.execute("for number in range(5): print(number)").stdout == "0\n1\n2\n3\n4\n"


def test_unbounded_output_lines_are_all_kept(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        assert repl.execute("for number in range(20_000): print()").stdout == "\n" * 20_000
