"""First process of a node: it starts a command, and all orphans of the node become its children, as with pid 1.

    python -m scripts.cluster.first_process COMMAND ...

It stays when the command ends, so that what the command has left behind can be counted.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Start the command, and take leave of each process that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(sys.argv[1:], start_new_session=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    main()
