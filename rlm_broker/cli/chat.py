"""`rlm-broker chat PATH...`: a conversation about files. The REPL, and what code has found out in it, stay.

For `ask -c` the last exchanges at a terminal are kept in the user's state folder.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlm_broker.broker.clients.offline import GOES_ON
from rlm_broker.cli import signals
from rlm_broker.cli.composition import rlm_of
from rlm_broker.cli.models import say_stand_in
from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.sources import STDIN, stored
from rlm_broker.cli.terminal import say
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, RunFailed
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.usage import Usage
from rlm_broker.values.host_files import replacement
from rlm_broker.values.text import shorten
from rlm_broker.watch.progress_line import ProgressLine
from rlm_broker.watch.server import ControlSocket

HELP = """/files  what this is about
/undo   forget the last question and its answer; variables of the REPL stay
/cost   calls, tokens and dollars so far
/quit   leave, as Ctrl+D does. Ctrl+C ends an answer with what there is; variables stay"""
PROMPT = "> "
MOST_FILES = 40
"""Files that `/files` names."""
MOST_EARLIER, MOST_CHARS = 6, 1_500
"""Earlier exchanges that a question brings along, and characters of each text of them."""


def run(paths: tuple[str, ...], *, assignments: tuple[str, ...], **options: Any) -> int:
    """Talk until the input ends, and return the exit code.

    Raises:
        ConfigurationError: There are no paths, or a path or a setting cannot be used.
    """
    verbose, quiet = options.pop("verbose"), options.pop("quiet")
    if not paths or STDIN in paths:
        raise ConfigurationError("name the files or folders to talk about: stdin has the questions")
    settings = Settings(assigned(assignments, **options))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # else a question could have lone surrogates, which no model takes
    with ControlSocket("chat"), stored(paths, settings) as context, rlm_of(settings) as rlm:
        if not quiet:
            say_stand_in("chat", settings)
            about = shorten(", ".join(paths), MOST_CHARS)
            say(f"about {about}, {context.info.total_chars:,} characters; /help says more", err=True)
        with rlm.persistent_repl() as repl:
            talk = Talk(rlm, repl, context, None if quiet else verbose)
            while (line := _line()) is not None:
                if not talk.take(line):
                    break
    return int(talk.unanswered > 0 and not sys.stdin.isatty())


class Talk:
    """Questions about one context, each with the exchanges before it.

    Args:
        rlm: Open.
        repl: REPL of all questions.
        context: What they are about.
        verbose: Whether turns are shown with their texts; None shows no progress.

    Attributes:
        unanswered: Number of questions that had no answer.
    """

    def __init__(self, rlm: RLM, repl: PersistentRepl, context: StoredContext, verbose: bool | None) -> None:
        self._rlm = rlm
        self._repl = repl
        self._context = context
        self._verbose = verbose
        self._said: list[tuple[str, str]] = []
        self._used = Usage()
        self.unanswered = 0

    def take(self, line: str) -> bool:
        """Answer a question or a command. Return whether the conversation goes on."""
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: say(HELP),
            "/files": self._show_files,
            "/undo": self._undo,
            "/cost": lambda: say(str(self._used) or "nothing yet"),
        }
        if line in ("/quit", "/exit"):
            return False
        if line in commands:
            commands[line]()
        elif (word := line.partition(" ")[0]) in commands:
            say(f"{word} takes nothing behind it", err=True)
        elif line.startswith("/") and " " not in line:
            say(f"there is no {line}; there are: {', '.join(commands)}, /quit", err=True)
        elif line:
            self._ask(line)
            if signals.has_come():  # a Ctrl+C ends the answer alone; SIGTERM and SIGHUP end the conversation, too
                raise signals.EndedBySignal
        return True

    def _ask(self, question: str) -> None:
        with contextlib.ExitStack() as stack:
            follow = None
            if self._verbose is not None:
                follow = stack.enter_context(contextlib.closing(ProgressLine(sys.stderr, is_verbose=self._verbose)))
            try:
                asked = self._rlm.start(
                    self._context, AskedBefore((), self._said).with_question(question), on_event=follow, repl=self._repl
                )
                with signals.calling(asked.stop):
                    completion = asked.result()
            except RunFailed as failed:
                self.unanswered += 1
                self._used += failed.usage_summary.total
                if failed.partial_answer:
                    say(failed.partial_answer)
                say(f"rlm-broker chat: {failed}", err=True)
                return
        self.unanswered += completion.response is None
        self._used += completion.usage_summary.total
        self._said.append((question, _answer(completion)))
        say(self._said[-1][1])

    def _show_files(self) -> None:
        info = self._context.info
        for name, chars in info.parts[:MOST_FILES]:
            say(f"{name}: {chars:,} characters")
        if (more := info.parts_total - min(MOST_FILES, len(info.parts))) > 0:
            say(f"and {more:,} more")

    def _undo(self) -> None:
        say(f"forgotten: {self._said.pop()[0]}" if self._said else "there is no question to forget", err=True)


def _answer(completion: Completion) -> str:
    if completion.response is not None:
        return completion.response
    if completion.limit is not None:
        return f"(no answer: {completion.limit} was reached)"
    return "(stopped before there was an answer)" if completion.is_stopped else "(no answer)"


def _line() -> str | None:
    """Return the next line of the user's; None at the end of the input. Ctrl+C forgets the line."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its history
    while True:
        try:
            return input(PROMPT if is_typed else "").strip()
        except EOFError:
            if is_typed:
                say("")  # else the shell's prompt would stand behind ours
            return None
        except KeyboardInterrupt:
            if not is_typed or signals.has_come():
                raise
            say("\nCtrl+D leaves", err=True)


# -- exchanges -----------------------------------------------------------------------------------------------------


class AskedBefore(NamedTuple):
    """Exchanges about the same paths, oldest first. For `ask -c` the last ones at a terminal are kept.

    Attributes:
        paths: What they are about.
        said: Questions with their answers.
    """

    paths: tuple[str, ...]
    said: list[tuple[str, str]]

    def with_question(self, question: str) -> str:
        """Return a question with the exchanges before it, so that "and why?" means what it says."""
        if not self.said:
            return question
        before = [
            f"Asked: {shorten(asked, MOST_CHARS)}\nAnswered: {shorten(told, MOST_CHARS)}"
            for asked, told in self.said[-MOST_EARLIER:]
        ]
        return "\n\n".join([question, GOES_ON, *before])

    def and_now(self, question: str, answer: str) -> "AskedBefore":
        """Return the exchanges with one more."""
        return AskedBefore(self.paths, [*self.said, (question, answer)])

    def remember(self) -> None:
        """Write them down, for the eyes of this user alone. A home that cannot be written to is no error."""
        if not self.paths or STDIN in self.paths:
            return
        record = {"paths": [os.path.abspath(path) for path in self.paths], "said": self.said[-MOST_EARLIER:]}  # noqa: PTH100
        with contextlib.suppress(OSError, RuntimeError):
            file = _last_file()
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacement(file) as opened:
                opened.write(json.dumps(record).encode())


def last_asked(paths: Sequence[str]) -> AskedBefore:
    """Return the last exchanges, about these paths if there are any, else about their own.

    Raises:
        ConfigurationError: There are none.
    """
    try:
        record = json.loads(_last_file().read_text())
        said = [(str(question), str(answer)) for question, answer in record["said"]]
        return AskedBefore(tuple(paths) or tuple(map(str, record["paths"])), said)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        raise ConfigurationError("there is no last question: -c goes on from that of `ask` at a terminal") from None


def _last_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rlm-broker" / "last.json"
