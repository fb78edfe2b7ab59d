"""Output of text from models and sandboxes. On a terminal control characters are shown, and have no effect."""

import os
import sys
from typing import TextIO

import click

from rlm_broker.values.text import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to stdout or stderr. A pipe or a file gets each character as it is."""
    target: TextIO = sys.stderr if err else sys.stdout
    shown = printable(text, keep="\n\t") if target.isatty() else text
    click.echo(shown, nl=nl, err=err, color=True)  # else `click` removes escape sequences in pipes


def say_if_typed() -> None:
    """Inform the user that the command waits for input, if stdin is a terminal."""
    if sys.stdin.isatty():
        say("reading from the terminal; Ctrl+D at the start of a line ends the text", err=True)


def has_display() -> bool:
    """Whether a browser could show a page here."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
