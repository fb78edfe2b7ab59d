"""Writes the manual page of the command line, from the same texts as `--help`.

python -m scripts.man >rlm-broker.1
"""

import re
import sys
from collections.abc import Iterator

import click

from rlm_broker.cli.main import cli
from rlm_broker.version import __version__


def page() -> str:
    """Return the page in the language of `man`."""
    head = [
        '.TH RLM-BROKER 1 "" "rlm-broker ' + __version__ + '" "User Commands"',
        ".SH NAME",
        "rlm-broker \\- ask models",
    ]
    head[-1] += " about texts of any size: they write code, and a sandbox runs it"
    return "\n".join([*head, ".SH COMMANDS", *_commands(cli, click.Context(cli, info_name="rlm-broker"))]) + "\n"


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        yield f".SS {_plain(below.command_path)} {_plain(' '.join(command.collect_usage_pieces(below)))}"
        for text in (command.help or "", command.epilog or ""):
            for paragraph in re.split(r"\n\s*\n", text.strip()):
                yield from (".PP", *_lines(paragraph))
        for option in command.get_params(below):
            if isinstance(option, click.Option) and (record := option.get_help_record(below)):
                yield from (".TP", f".B {_plain(record[0])}", *_lines(record[1]))
        if isinstance(command, click.Group):
            yield from _commands(command, below)


def _lines(paragraph: str) -> Iterator[str]:
    """Yield the lines of a paragraph. One that begins with `\b` is printed as it is."""
    is_whole = paragraph.lstrip().startswith("\b")
    lines = [_plain(line.strip()) for line in paragraph.replace("\b", "").strip().splitlines()]
    yield from (".nf", *lines, ".fi") if is_whole else lines


def _plain(text: str) -> str:
    """Return a text that `man` shows as it is."""
    shown = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{shown}" if shown.startswith((".", "'")) else shown


if __name__ == "__main__":
    sys.stdout.write(page())
