"""A command on a real terminal, and what it shows there."""

import os
import pty
import re
import termios
from collections.abc import Callable

from tests.support.command import ENVIRONMENT, WAIT_S, started

COLUMNS = 70
"""Columns of the terminal."""
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(
    *command: str, keys: bytes = b"", after: bytes | Callable[[bytes], bool] = b"", **variables: str
) -> bytes:
    """Return everything that the command shows. `keys` are typed once it has shown `after`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    env = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": str(COLUMNS), **variables}  # pytest-xdist sets this variable, too
    with started(*command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, takes_terminal=True) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # EIO: no process has the terminal open any more
                break
            if not piece:
                break
            seen += piece
            if keys and (after in seen if isinstance(after, bytes) else after(seen)):
                os.write(ours, keys)
                keys = b""
        process.wait(WAIT_S)
    os.close(ours)
    return seen


def lines_shown(seen: bytes) -> list[str]:
    """Return the lines that the terminal was sent, without what steers it."""
    return [line for line in re.split(r"[\r\n]+", _CONTROL.sub(b"", seen).decode()) if line]
