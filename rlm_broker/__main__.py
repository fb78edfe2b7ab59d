"""`python -m rlm_broker`, and the console script."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which may be somebody else's: its click.py is not ours

import signal


def main() -> None:
    """Run the command. While it is being imported, Ctrl+C ends it like any program: without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlm_broker.cli.main import main as command

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
