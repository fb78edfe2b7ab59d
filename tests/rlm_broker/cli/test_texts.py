"""Arguments of every kind of text, for each parameter of each command: no traceback, one sentence, a documented code."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rlm_broker.cli.main import cli
from tests.support.command import ENVIRONMENT, run
from tests.support.forked_python import python

ODD = ["", "\n", "\udcff\udc80", "~nobody", "a=~nobody", "a=" + "b" * 300, "c" * 100_000]
PLAIN = ["a", " ", "\x01\x1b[31m", "\u2028", "é中\U0001f600", "/dev/null", "/nowhere", "..", "-", "--", "-x", "*", "["]
LIKE_VALUES = ["a=b", "a://b", "http://[x", "1e400", "nan", "-1", "9" * 5_000]
TEXTS = [*ODD, *PLAIN, *LIKE_VALUES, "word " * 60, "\udcff" * 300, "/b" * 3_000]
"""Texts as shells pass them: they have no NUL characters, and bytes that are no UTF-8 are lone surrogates."""
LONGEST_SENTENCE = 5_000
NOTES = ("warning: ", "note: ", "rlm-broker ")
"""Beginnings of lines that may stand before the sentence."""
PLAYS = """
import json, os, sys, traceback, warnings
from rlm_broker.cli import main
rows, null = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
cases, here = json.load(sys.stdin), os.getcwd()
os.dup2(null, 0)
os.dup2(null, 1)
for number, arguments in enumerate(cases):
    os.mkdir(f"{here}/{number}")
    os.chdir(f"{here}/{number}")
    os.dup2(said := os.open(f"{here}/said", os.O_RDWR | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdin, sys.argv, code = open(0, closefd=False), ["rlm-broker", *arguments], 0
    try:
        main.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = -1
    sys.stderr.flush()
    print(json.dumps([code, os.pread(said, 1 << 20, 0).decode("utf-8", "replace")]), file=rows, flush=True)
    os.close(said)
"""
"""A program that plays the command lines of its input, each in a folder of its own."""


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port that is in use: a server that could start ends there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


BASES = {
    "ask": ["Who?", "missing"],
    "chat": ["missing"],
    "batch": ["missing"],
    "eval": ["--data", "missing"],
    "exec": ["missing"],
    "serve": ["--port", "TAKEN"],
    "mcp": [],
    "doctor": [],
    "models": [],
    "kernel install": ["--user", "--sys-prefix"],
    "kernel uninstall": [],
    "config show": [],
    "config trust": [],
    "runs list": [],
    "runs stop": ["missing"],
    "runs show": ["missing"],
    "runs view": ["missing", "--no-open"],
    "runs export": ["missing"],
}
"""Arguments with which each command ends at once, before it runs anything."""


def parameters(name: str) -> list[click.Parameter]:
    command: click.Command | None = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return [each for each in command.params if not getattr(each, "is_flag", False)]


def played(name: str, taken: str) -> list[list[str]]:
    """Return the command lines: each text as each argument, and odd texts as the value of each option."""
    base = [each.replace("TAKEN", taken) for each in BASES[name]]
    places = [each.name for each in parameters(name) if isinstance(each, click.Argument)]
    lines = [[*name.split(), *base[: places.index(place)], "--", text] for place in places for text in TEXTS]
    for option in parameters(name):
        if isinstance(option, click.Option):
            is_text = isinstance(option.type, click.Path | click.types.StringParamType)
            lines += [[*name.split(), *base, f"{option.opts[-1]}={text}"] for text in (ODD if is_text else ODD[-1:])]
    return lines or [[*name.split(), text] for text in TEXTS if text not in ("", "--")]


def test_each_command_is_played() -> None:
    assert {name.partition(" ")[0] for name in BASES} == {*cli.list_commands(click.Context(cli))}


@pytest.mark.parametrize("name", BASES)
def test_no_text_of_an_argument_is_a_traceback(name: str, taken: str, tmp_path: Path) -> None:
    lines = played(name, taken)
    # No package is looked for on the network.
    variables = ENVIRONMENT | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "UV_OFFLINE": "1"}
    done = python("-c", PLAYS, stdin=json.dumps(lines), env=variables, cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    for arguments, (code, said) in zip(lines, rows, strict=True):
        *notes, sentence = said.removesuffix("\n").split("\n")
        is_told = sentence.startswith("rlm-broker ") and len(sentence) < LONGEST_SENTENCE
        is_told = is_told and all(note.startswith(NOTES) for note in notes)
        is_told = is_told or any("\n" in each for each in arguments)  # repeated as it was given
        if code not in range(6) or (code and not is_told) or "Traceback" in said:
            wrong.append(([each[:40] for each in arguments], code, said[-500:]))
    assert wrong == []


def test_a_paragraph_is_a_question(tmp_path: Path) -> None:
    """A question of 5,000 characters about a file is answered, by a process of its own."""
    (tmp_path / "text.txt").write_text("The beekeeper is called Ada.\n")
    done = run("ask", "Please read this with care. " * 180 + "Who is the beekeeper?", tmp_path / "text.txt", "-q")
    assert (done.returncode, done.stderr) == (0, "")
