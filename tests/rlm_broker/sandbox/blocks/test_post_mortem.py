import signal
from typing import get_args

import pytest

from rlm_broker.sandbox.blocks import post_mortem
from sandbox_worker.wire.bounds import WatchedLimit
from sandbox_worker.wire.control import BROKEN, OUT_OF_MEMORY, Died, Exceeded, LastSeen

STACK = """Current thread 0x00007f0005e7cb80 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "<block 3>", line 7 in search
  File "<block 4>", line 2 in <module>
  File "/usr/lib/site-packages/sandbox_worker/execution.py", line 62 in _evaluate
"""


@pytest.mark.parametrize(
    ("died", "reason"),
    [
        (Died(exit_code=3), "its process ended by itself with exit code 3 (os._exit)"),
        (
            Died(exit_code=OUT_OF_MEMORY),
            "it used up its memory (memory_bytes) to the point that its REPL could not go on",
        ),
        (Died(exit_code=BROKEN), "it broke the REPL that it runs in"),
        (Died(signal=signal.SIGKILL), "its process was ended by SIGKILL"),
        (Died(signal=signal.SIGSEGV), "its process was ended by SIGSEGV (a crash in C code, or too deep a recursion)"),
        (Died(signal=40), "its process was ended by signal 40"),
        (
            Exceeded("memory_bytes", 300 << 20, 256 << 20, LastSeen()),
            "its processes used 300 MiB together, memory_bytes = 256 MiB",
        ),
        (
            Exceeded("max_processes", 70, 64, LastSeen()),
            "its processes used 70 threads and processes together, max_processes = 64 threads and processes",
        ),
        (
            Exceeded("scratch_bytes", 9 << 20, 8 << 20, LastSeen()),
            "its processes used 9 MiB of the scratch folder together, scratch_bytes = 8 MiB of the scratch folder",
        ),
        (
            Exceeded("max_scratch_files", 201, 200, LastSeen()),
            "its processes used 201 files in the scratch folder together, "
            "max_scratch_files = 200 files in the scratch folder",
        ),
        (
            Exceeded("cpu_s", 12.03, 12, LastSeen()),
            "its processes used 12.03 s CPU time together, cpu_s = 12 s CPU time",
        ),
    ],
)
def test_reason_names_the_cause_of_the_end(died: Died | Exceeded, reason: str) -> None:
    assert post_mortem.reason(died) == reason


def test_reason_shows_only_the_newest_line_of_model_code() -> None:
    """The newest line of the model's code is told, and no frame of the package."""
    told = post_mortem.located(LastSeen(STACK, 5 << 20, 1.5, 2, 3), block=3)
    assert told.where == "It was at line 7 of the block, in search"
    assert "sandbox_worker" not in told.stack
    assert post_mortem.located(LastSeen(STACK), block=4).where == "It was at line 7 of an earlier block, in search"
    assert post_mortem.sentence("it was slow", told) == (
        "it was slow. It was at line 7 of the block, in search. It used 5 MiB (processes: 2, threads: 3)"
    )


@pytest.mark.parametrize(
    ("used_bytes", "told"), [(0, "less than 1 MiB"), (900_000, "less than 1 MiB"), (1 << 20, "1 MiB")]
)
def test_small_cpu_usage_is_not_told_as_zero(used_bytes: int, told: str) -> None:
    """A program that uses very little CPU time is not reported with zero."""
    seen = post_mortem.located(LastSeen("", used_bytes, 0.1, 1, 1), block=1)
    assert post_mortem.sentence("it was slow", seen) == f"it was slow. It used {told} (processes: 1, threads: 1)"


@pytest.mark.parametrize(
    "stack",
    ["", "garbage \x1b[31m", '  File "<block 1>", line \u0662 in x', 'File "<block 1>", line 1 in ' + "x" * 9000],
)
def test_a_stack_that_says_nothing_is_left_out(stack: str) -> None:
    assert post_mortem.sentence("it was slow", post_mortem.located(LastSeen(stack), block=1)) == "it was slow"


def test_line_in_digits_of_another_script_is_no_frame() -> None:
    """Model code may write to the descriptor that the stack comes through."""
    seen = LastSeen(stack='  File "<block 1>", line \u0662 in <module>\n  File "<block 1>", line 5 in <module>\n')
    assert post_mortem.located(seen, 1).where == "It was at line 5 of the block"


@pytest.mark.parametrize("limit", get_args(WatchedLimit))
def test_limit_that_init_watches_has_a_sentence(limit: WatchedLimit) -> None:
    assert " used " in post_mortem.reason(Exceeded(limit, 2 << 20, 1 << 20, LastSeen()))
