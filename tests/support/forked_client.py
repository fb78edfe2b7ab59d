"""Runs a program by the process that forks, where only a command can be named: in scripts of a shell.

    python -IS forked_client.py SOCKET ARGUMENTS

ARGUMENTS are those of `forked_python`. Standard streams, folder and variables are handed on, and so are signals. The
exit code is that of the program.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Have the program run, and return its exit code as a shell tells it."""
    address, *arguments = sys.argv[1:]
    request = {
        "arguments": arguments,
        "cwd": os.getcwd(),  # noqa: PTH109 - this starts in a few milliseconds, without pathlib
        "env": dict(os.environ),
        "takes_terminal": False,
        "ignores": [],
        "takes_down": False,
    }
    with socket.socket(socket.AF_UNIX) as connected:
        folder, _, name = address.rpartition("/")
        place = os.open(folder, os.O_PATH)
        connected.connect(f"/proc/self/fd/{place}/{name}")  # TMPDIR may be longer than an address of a socket may be
        os.close(place)
        socket.send_fds(connected, [json.dumps(request).encode() + b"\n"], [_opened(number) for number in range(3)])
        replies = connected.makefile()
        pid = int(replies.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: os.kill(pid, got))
        code = int(replies.readline())
    return code if code >= 0 else 128 - code


def _opened(number: int) -> int:
    try:
        os.fstat(number)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)
    return number


if __name__ == "__main__":
    sys.exit(main())
