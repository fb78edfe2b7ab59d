"""Runs the code of one Markdown page, or of the docstrings of a package, in a process of its own.

    python -m tests.support.page_run PAGE FOLDER FORKS FAULTS

Model names of OpenAI and addresses of model servers lead to a fake server on loopback. The variable `FAKE_PORT` hands its
port to commands, which are processes of their own.
"""

import ast
import asyncio
import configparser
import contextlib
import inspect
import io
import json
import os
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support import docstring_code, forked_client, page_code
from tests.support.fake_openai import Answer, FakeOpenAI, completion, streamed
from tests.support.page_command import FAKE_PORT, redirect
from tests.support.places import PROJECT

WAIT_S = 90
ANSWER = "an answer"
PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "ini": lambda text: configparser.ConfigParser(strict=False, interpolation=None).read_string(text),
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
"""Language: parser of its blocks, which raises if the text is not of that language."""


class Script:
    """Replies of the fake server: those given, in order, the last again and again."""

    def __init__(self) -> None:
        self._replies: list[str] = []

    def model_says(self, *replies: str) -> None:
        """Set the replies from now on."""
        self._replies = list(replies)

    def __call__(self, request: dict[str, Any]) -> Answer:
        """Answer one request."""
        text = self._reply(json.dumps(request["messages"][0]))
        return streamed(text) if request.get("stream") else completion(text)

    def _reply(self, first_message: str) -> str:
        if self._replies:
            return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return f"```repl\nprint(len(context))\nFINAL({ANSWER!r})\n```" if "```repl" in first_message else ANSWER


def run(path: Path, folder: Path, forks: str) -> list[str]:
    """Run the code of the page or package `path` within `folder`, and return a line or more for each fault.

    Its commands are forks of the process whose socket is `forks`.

    This process is the page's from here on: its folder, its variables and its name resolution are changed.
    """
    script = Script()
    with FakeOpenAI(script) as server:
        _prepare(folder, server.port, forks)
        name = str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else path.name
        faults: list[str] = []
        with asyncio.Runner() as runner:
            if path.is_dir():
                return docstring_code.faults(path, runner)
            page = _Page(name, {"__name__": "__main__", "model_says": script.model_says}, runner)
            for piece in page_code.pieces(path.read_text()):
                try:
                    problem = page.run(piece)
                except Exception as error:  # noqa: BLE001 - a fault of the page, which is reported
                    problem = f"{type(error).__name__}: {error}"
                if problem is not None:
                    faults.append(f"{name}:{piece.line}: {problem}")
        return faults


def _prepare(folder: Path, port: int, forks: str) -> None:
    os.chdir(folder)
    for name in list(os.environ):
        if name.endswith("_API_KEY") or name.startswith("RLM_BROKER_"):
            del os.environ[name]
    bin_folder = folder.parent / "bin"
    bin_folder.mkdir()
    executable = bin_folder / "rlm-broker"
    executable.write_text(
        f'#!/bin/sh\nexec {sys.executable} -IS {forked_client.__file__} {forks} -m tests.support.page_command "$@"\n'
    )
    executable.chmod(0o755)
    os.environ |= {
        "PATH": f"{bin_folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
        "XDG_CONFIG_HOME": str(folder.parent / "config"),
        "XDG_RUNTIME_DIR": str(folder.parent),  # the user's own processes are not those of the page
        "OPENAI_API_KEY": "sk-of-the-page",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "GPU_KEY": "sk-of-the-gpu",
        "TEAM_KEY": "sk-of-the-whole-team",
        FAKE_PORT: str(port),
    }
    redirect(port)


@dataclass
class _Page:
    """The state of a page between its blocks.

    Attributes:
        name: Name of the page in tracebacks.
        names: Variables of its Python code.
        runner: Holds the event loop of code that awaits.
        printed: Text that the last Python block printed.
    """

    name: str
    names: dict[str, Any]
    runner: asyncio.Runner
    printed: str = ""

    def run(self, piece: page_code.Piece) -> str | None:
        """Run one block, and return what is wrong with it."""
        if piece.mark == "output":
            return page_code.difference(piece.text, self.printed)
        if piece.mark == "file":
            Path(piece.value).parent.mkdir(parents=True, exist_ok=True)
            Path(piece.value).write_text(piece.text)
        elif piece.language in ("python", "hidden"):
            return self._execute(piece)
        if piece.mark == "not run":
            return None
        if piece.language in PARSERS:
            PARSERS[piece.language](piece.text)
        return _command_lines(piece) if piece.language == "console" else None

    def _execute(self, piece: page_code.Piece) -> str | None:
        blank = "\n" * (piece.line - 1)  # so that lines of a traceback are those of the page
        code = compile(blank + piece.text, self.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if piece.mark == "not run":
            return None
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                if code.co_flags & inspect.CO_COROUTINE:
                    self.runner.run(eval(code, self.names))
                else:
                    exec(code, self.names)
        except BaseException:  # noqa: BLE001 - SystemExit is a fault of the page, too
            return traceback.format_exc(limit=-6)
        finally:
            self.printed = output.getvalue()
        return None


def _command_lines(piece: page_code.Piece) -> str | None:
    """Run the commands of a console block, and return what is wrong with the first that is wrong."""
    commands = list(page_code.commands(piece.text))
    for number, (line, shown) in enumerate(commands, 1):
        done = subprocess.run(
            ["bash", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        expected = int(piece.value) if piece.mark == "exits" and number == len(commands) else 0
        if done.returncode != expected:
            return f"`{line}` ended with {done.returncode}:\n{done.stdout}"
        if shown.strip() and (problem := page_code.difference(shown, done.stdout)):
            return f"`{line}`: {problem}"
    return None


def main() -> None:
    """Run a page, and write its faults into a file."""
    path, folder, forks, said = sys.argv[1:]
    faults = run(Path(path), Path(folder), forks)
    Path(said).write_text(json.dumps(faults))


if __name__ == "__main__":
    main()
