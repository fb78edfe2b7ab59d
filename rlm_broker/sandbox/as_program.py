"""A program as `python FILE` runs it, by blocks of a REPL: what the interpreter does before and after the program."""

import dataclasses
from typing import Final

from rlm_broker.results import Block

NO_DISPLAY: Final = "\nNone\n"
"""Last line of a program's block. A REPL shows the value of a last expression, and `python FILE` does not."""
AT_ITS_START: Final = """
__import__("sys").argv[:] = {argv!r}
__import__("sys").path.insert(0, __import__("os").getcwd())
"""
"""The interpreter's work before a program begins. It binds no name in the program's namespace."""
AT_ITS_END: Final = """
import atexit, threading
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
atexit._run_exitfuncs()
"""
"""The interpreter's work when a program has come to its end."""


def with_its_end(block: Block, end: Block) -> Block:
    """Return the outcome of a program: that of its block, and of `AT_ITS_END` after it."""
    return dataclasses.replace(
        block if end.status == "ok" else end,
        code=block.code,
        stdout=block.stdout + end.stdout,
        stderr=block.stderr + end.stderr,
        execution_time=block.execution_time + end.execution_time,
        displays=block.displays + end.displays,
        displays_omitted=block.displays_omitted + end.displays_omitted,
    )
