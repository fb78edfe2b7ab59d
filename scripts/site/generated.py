"""Parts of the reference that are made from the code when the site is built, so that they are never out of date."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click
    import griffe

PROJECT = Path(__file__).resolve().parents[2]
WIRE = ("messages", "control", "prompts")
"""Modules of `sandbox_worker.wire` that define messages and their parts."""
ORCHESTRATOR, REPL = "orchestrator", "REPL"
NO_FLAG = {
    "api_key": "Key of the models at `base_url`, best as `env:NAME`: then the key is read from that variable.",
    "cache": "File of replies that are used again. Prompts are kept as hashes, replies as they are.",
    "cluster": "Address of the Ray cluster on whose nodes the REPLs are, such as `auto`.",
    "encoding": "Encoding of text without a byte order mark, such as `cp1252`. None is UTF-8.",
    "max_nodes": "Nodes of the cluster at most. None is all.",
    "model_policy": "Which models code may name.",
    "prompt_profile": "What the model is told to end with.",
    "recursion": "Which children get a REPL.",
    "resources": "Resources of Ray that each node must have, such as `rlm=1`.",
    "strict_text": "Whether text with bytes that cannot be decoded is refused. If not, they are replaced.",
}
"""Setting that `ask` has no option for: its meaning."""
MEANINGS = {
    "block": "Number of the block, from 1.",
    "code": "Python code.",
    "content": "A text, or a list of content parts.",
    "detail": "How much of the picture's detail the provider looks at.",
    "error": "Why there is no text, or None.",
    "id": "Id of the query that it answers.",
    "max_completion_tokens": "Output tokens of each completion, at most.",
    "name": "Name of the variable.",
    "role": "Author of the message.",
    "size": "Length or shape; None where there is none.",
    "slots": "One for each prompt.",
    "status": "How the block ended: `ok`, `error`, `exited` or `interrupted`.",
    "stream": "`stdout` or `stderr`.",
    "system": "System prompt of each completion.",
    "text": "Text as it is.",
    "token": "One-time token of the session.",
    "type": "Name of its type.",
    "want": "Kind of the query; see below.",
}
"""Field of a message: its meaning where the docstring of the message leaves it to the name."""


def commands() -> str:
    """Return a section for each command, with its usage, its options and its exit codes."""
    import click

    from rlm_broker.cli.main import cli

    return "\n\n".join(_command(cli, click.Context(cli, info_name="rlm-broker"), level=2))


def settings() -> str:
    """Return a table of the settings that are no limits."""
    from rlm_broker.cli.commands import ASK as command
    from rlm_broker.cli.settings.settings import DEFAULTS, PREFIX

    options = {option.name: option for option in command.params if hasattr(option, "help")}
    rows = ["| setting | default | flag of `ask` | variable | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, default in DEFAULTS.items():
        option: Any = options.get(name)
        flag = f"[`{option.opts[0]}`](cli.md#rlm-broker-ask{option.opts[0]})" if option else "none"
        meaning = option.help if option else NO_FLAG[name]
        value = "none" if default is None else f"`{default}`"
        rows.append(f"| `{name}`{{ #{name} }} | {value} | {flag} | `{PREFIX}{name.upper()}` | {meaning} |")
    return "\n".join(rows)


def limits(model: str) -> str:
    """Return a definition list of the fields of `RunLimits` or `ReplLimits`."""
    from rlm_broker import limits as module

    parts = []
    kind = getattr(module, model)
    for name, description in kind.descriptions().items():
        value = getattr(kind(), name)
        parts.append(f"`{name}`{{ #{name} }}\n:   Default: {_amount(name, value)}. {_one_line(description)}\n")
    return "\n".join(parts)


def message(name: str) -> str:
    """Return what a message says, who sends it, in which states of a connection, and its fields."""
    from rlm_broker.broker.transport.session import TRANSITIONS
    from sandbox_worker.wire import messages

    kind = getattr(messages, name)
    sender, receiver = (REPL, ORCHESTRATOR) if kind in _members(messages.FromWorker) else (ORCHESTRATOR, REPL)
    steps = [(state, after[kind]) for state, after in TRANSITIONS.items() if kind in after]
    when = ", ".join(
        f"`{state.name}`" if state is after else f"`{state.name}`, which becomes `{after.name}`"
        for state, after in steps
    )
    named = sender.capitalize() if sender == ORCHESTRATOR else sender
    head = f"*{named} → {receiver}. State: {when or 'before the first'}.*"
    return f"{head}\n\n{_described(_wire()[name])}"


def part(name: str) -> str:
    """Return what a part of a message is, and its fields."""
    return _described(_wire()[name])


def packets(union: str) -> str:
    """Return a definition list of the messages of a union of `control`."""
    from sandbox_worker.wire import control

    members = _members(getattr(control, union))
    parts = []
    for kind in members:
        each = _wire()[kind.__name__]
        fields = ", ".join(f"`{field}`" for field in _fields(each))
        text = _one_line(_text(each))
        parts.append(
            f"`{kind.__name__.lower()}`{{ #packet-{kind.__name__.lower()} }}\n:   {text} Fields: {fields or 'none'}.\n"
        )
    return "\n".join(parts)


def _members(union: Any) -> tuple[type, ...]:
    """Return the classes of a union, those of unions inside it included."""
    members: tuple[type, ...] = union.__args__
    return members


def _command(command: "click.Command", context: "click.Context", level: int) -> Iterator[str]:
    import click

    path = context.command_path
    anchor = path.replace(" ", "-")
    yield f"{'#' * level} {path} {{ #{anchor} }}"
    for paragraph in (command.help or "").strip().split("\n\n"):
        lines = paragraph.removeprefix("\b\n")  # before lines that are shown as they are
        yield paragraph if lines == paragraph else f"```sh\n{lines}\n```"
    yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```"
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        yield "\n".join(["| option | meaning |", "| --- | --- |", *(_option(each, anchor) for each in options)])
    if command.epilog:
        yield f"```text\n{command.epilog.removeprefix(chr(8)).strip()}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _command(below, click.Context(below, info_name=name, parent=context), level + 1)


def _option(option: "click.Option", anchor: str) -> str:
    """Return the row of an option. Each of its names is an anchor: `rlm-broker-ask--model`."""
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    names = [f"`{name}{value}`{{ #{anchor}{name} }}" for name in option.opts]
    names += [f"`{name}`" for name in option.secondary_opts]
    return f"| {', '.join(names)} | {option.help or ''} |"


def _amount(name: str, value: Any) -> str:
    """Return the default of a limit, with its unit."""
    if value is None:
        return "no bound"
    if isinstance(value, str):
        return f"`{value}`"
    if name.endswith("_bytes"):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value and not value % size:
                return f"{value // size} {unit}"
    return f"{value:,g} s" if name.endswith("_s") else f"{value:,}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


@functools.cache
def _wire() -> "dict[str, griffe.Class]":
    """Return the classes of the wire by name.

    They are read and not imported: only their source has the documentation of their fields.
    """
    import griffe

    package = griffe.load("sandbox_worker.wire", search_paths=[PROJECT], docstring_parser="google")
    members = {name: each for module in WIRE for name, each in package[module].members.items()}
    return {name: each for name, each in members.items() if isinstance(each, griffe.Class)}


def _fields(kind: "griffe.Class") -> "dict[str, griffe.Attribute]":
    import griffe

    members = kind.members.items()
    return {
        name: each for name, each in members if isinstance(each, griffe.Attribute) and "property" not in each.labels
    }


def _text(kind: "griffe.Class") -> str:
    """Return the docstring of a class without its list of attributes."""
    import griffe

    sections = kind.docstring.parsed if kind.docstring else []
    return "\n\n".join(each.value for each in sections if isinstance(each, griffe.DocstringSectionText))


def _described(kind: "griffe.Class") -> str:
    """Return the docstring of a class and a table of its fields."""
    import griffe

    meanings = {
        name.strip(): _one_line(attribute.description)
        for section in (kind.docstring.parsed if kind.docstring else [])
        if isinstance(section, griffe.DocstringSectionAttributes)
        for attribute in section.value
        for name in attribute.name.split(",")
    }
    fields = _fields(kind)
    if not fields:
        return f"{_text(kind)} It has no fields."
    rows = []
    for name, field in fields.items():
        meaning = meanings.get(name) or MEANINGS.get(name, "")
        row = f"| `{name}` | `{_type(str(field.annotation))}` | {_default(field)} | {meaning} |"
        rows.append(row.replace("||", "|"))
    return "\n".join(
        [f"{_text(kind)}\n", "| field | type | if left out | meaning |", "| --- | --- | --- | --- |", *rows]
    )


def _type(annotation: str) -> str:
    """Return an annotation without its bounds, as a cell of a table."""
    bare = re.sub(r"Annotated\[(.*?), msgspec\.Meta\(.*?\)\]", r"\1", annotation)
    return bare.replace("|", "or").replace("msgspec.Raw", "JSON")


def _default(field: "griffe.Attribute") -> str:
    return "required" if field.value is None else f"`{field.value}`".replace("msgspec.UNSET", "absent")
