"""Entry point of `python -m rlm_broker` and of the console script."""

import gc
import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first in the path. If it is of another user, its click.py would run here.
    del sys.path[0]

# `signal` imports enum, and Ctrl+C would be a traceback for as long.
import _signal as signal  # type: ignore[import-not-found]


def main() -> None:
    """Run the command line. Until it listens to signals itself, Ctrl+C ends the process with 130 and no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    gc.disable()  # modules leave little garbage, and looking for it takes 7 % of their import
    from rlm_broker.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
