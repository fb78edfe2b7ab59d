"""The site of the documentation builds without a warning, is whole, and is read without a network."""

import json
import re
import subprocess
from pathlib import Path
from typing import get_args

import click

import rlm_broker
from rlm_broker.cli.main import cli
from rlm_broker.cli.settings.settings import DEFAULTS
from rlm_broker.limits import Limits
from sandbox_worker.wire import messages
from sandbox_worker.wire.names import CHUNKS, LINES, RESERVED, SEARCH
from scripts import man
from scripts.site import generated, hooks
from tests.support import page_code, site_pages
from tests.support.places import PROJECT


def test_site_is_whole_and_offline(tmp_path: Path) -> None:
    """Build the site once and check all of it: the build takes most of the time."""
    site = tmp_path.resolve() / "site"
    built = subprocess.run([PROJECT / "scripts" / "docs", site], capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
    assert site_pages.faults(site) == []
    read = site_pages.pages(site)
    reference = {path.name: page for path, page in read.items() if path.parent == site / "reference"}
    anchors = set().union(*(page.anchors for page in reference.values()))
    assert {name for name in rlm_broker.__all__ if f"rlm_broker.{name}" not in anchors} == set()
    assert set(options(cli, "rlm-broker")) - anchors == set()
    assert (
        site / "search" / "search_index.js"
    ).stat().st_size > 10_000  # what a page that is opened from a folder reads


def test_protocol_page_has_every_message() -> None:
    text = (PROJECT / "docs" / "reference" / "protocol.md").read_text()
    shown = [piece.text for piece in page_code.pieces(text) if piece.language == "json"]
    frames = {frame["type"]: json.dumps(frame).encode() for frame in map(json.loads, shown) if "type" in frame}
    decoders = {messages.Hello: messages.decode_hello, messages.Welcome: messages.decode_welcome}
    decoders |= dict.fromkeys(get_args(messages.FromWorker), messages.decode_from_worker)
    decoders |= dict.fromkeys(get_args(messages.FromOrchestrator), messages.decode_from_orchestrator)
    for kind, decode in decoders.items():
        tag = str(kind.__struct_config__.tag)
        assert f"### {tag.capitalize()} {{ #{tag} }}" in text
        assert type(decode(frames[tag])) is kind
    parts = set(re.findall(r"^<!-- generated: (?:part|message) (\w+) -->$", text, re.MULTILINE))
    assert parts >= {kind.__name__ for kind in decoders} | {
        "Slot",
        "ChildContext",
        "VariableFact",
        "TextPart",
        "MessagePart",
    }
    assert all(f"generated: packets {union}" in text for union in ("ToZygote", "FromZygote", "ToInit", "FromInit"))


def test_settings_page_has_every_setting() -> None:
    text = (PROJECT / "docs" / "reference" / "settings.md").read_text()
    filled = hooks.MARK.sub(lambda mark: getattr(generated, mark[1])(*filter(None, [mark[2]])), text)
    named = set(re.findall(r"`(\w+)`\{ #\1 \}", filled))
    assert named == {*Limits.fields, *DEFAULTS}


def test_repl_page_has_every_name() -> None:
    text = (PROJECT / "docs" / "reference" / "repl.md").read_text()
    missing = {name for name in RESERVED | {SEARCH, CHUNKS, LINES} if not re.search(rf"\b{name}\b", text)}
    assert missing == set()


def test_markdown_of_github_gets_blank_lines() -> None:
    written = "Two:\n- one\n  goes on\n- two:\n  - deep\n\nTable:\n| a |\n| - |\n\n1. x\n\n   more\n2. y\n\nEnd.\n```\nno:\n- item\n```"
    assert hooks.with_blank_lines(written).split("\n") == [
        *("Two:", "", "- one", "    goes on", "- two:", "    - deep", "", "Table:", "", "| a |", "| - |", ""),
        *("1. x", "", "    more", "", "2. y", "", "End.", "```", "no:", "- item", "```"),
    ]


def options(command: click.Command, path: str) -> list[str]:
    """Return the anchors of a command, of its options and of all commands below it."""
    found = [path.replace(" ", "-")]
    found += [
        f"{found[0]}{option}" for each in command.params if isinstance(each, click.Option) for option in each.opts
    ]
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            each = command.get_command(click.Context(command), name)
            assert each is not None
            found += options(each, f"{path} {name}")
    return found


def test_site_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link href="https://fonts.example/x.css" rel="stylesheet"><img src="gone.png"><a href="b.html#nowhere">x</a>'
        '<a href="b.html#here">x</a><a href="c.html">x</a><a href="https://example.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">x</h1><link href="https://example.org/b" rel="canonical">')
    (tmp_path / "s.css").write_text("@import 'x.css';")
    assert site_pages.faults(tmp_path) == [
        "a.html loads https://fonts.example/x.css",
        "a.html loads gone.png, which is not there",
        "a.html links to b.html#nowhere, and there is no such anchor",
        "a.html links to c.html, which is not there",
        "s.css loads @import",
    ]


def test_manual_page_has_each_command_and_option() -> None:
    """The page of `man` is written from the texts of `--help`, and no line of a text is taken for a request."""
    lines = man.page().splitlines()
    for words in ("ask", "chat", "runs stop", "config trust"):
        assert any(line.startswith(f".SS rlm\\-broker {words} ") for line in lines)
    assert ".B \\-\\-base\\-url URL" in lines
    assert any("rlm\\-broker chat logs/" in line for line in lines)
    assert {line.split()[0] for line in lines if line.startswith(".")} <= {
        *(".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".nf", ".fi")
    }
