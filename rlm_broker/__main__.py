"""Entry point of `python -m rlm_broker` and of the console script."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the current folder first in the path. If it is of another user, its click.py would run here.
    del sys.path[0]

import signal


def main() -> None:
    """Run the command line.

    While its modules are imported, SIGINT has its default action: Ctrl+C ends the process without a traceback.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlm_broker.cli.main import main as command

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
