"""Text from models and from sandboxes, on its way to a terminal: as text it is shown, it steers nothing."""

import sys
from typing import TextIO

import click

from rlm_broker.shown import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to stdout or stderr. What is no terminal gets every character as it is."""
    target: TextIO = sys.stderr if err else sys.stdout
    shown = printable(text, keep="\n\t") if target.isatty() else text
    click.echo(shown, nl=nl, err=err, color=True)  # colour is what `click` would take out of a pipe, too


def say_if_typed() -> None:
    """Say what the command waits for, if stdin is a terminal."""
    if sys.stdin.isatty():
        say("reading from the terminal; Ctrl+D at the start of a line ends the text", err=True)
