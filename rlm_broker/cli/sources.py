"""Sources of a context on the command line: files and folders, stdin, and pipes such as `<(zcat x.gz)`."""

import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rlm_broker.cli.settings.settings import Settings
from rlm_broker.cli.terminal import say, say_if_typed
from rlm_broker.context.store import Encoded, Paths, store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError
from rlm_broker.values.host_files import refusal_told

STDIN = "-"
"""Path, or file of a program, that means stdin."""
SILENCE_S = 1.0
"""Seconds without a byte on a pipe. After them the user is informed about the wait."""
MOST_BYTES = 4 << 30
"""Bytes of one pipe. More are refused: all of them are held in memory, and a pipe may have no end."""


class Pipe:
    """A pipe or stdin as a stream of bytes. It says what it waits for, and it ends.

    Args:
        fd: It stays the caller's to close.
        name: What the user calls it.
        advice: What else the user can do; the end of a sentence.
    """

    def __init__(self, fd: int, name: str, advice: str) -> None:
        self._fd = fd
        self._name = name
        self._advice = advice
        self._left = MOST_BYTES
        self._silence_ms: float | None = SILENCE_S * 1e3
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, once there are any; none at the end.

        Raises:
            OSError: It cannot be read.
            ValueError: It has more than `MOST_BYTES`.
        """
        while True:
            if not self._poll.poll(self._silence_ms):
                say(f"reading {self._name} to its end; {self._advice}", err=True)
                self._silence_ms = None
                continue
            try:
                piece = os.read(self._fd, size)
            except BlockingIOError:  # another reader of the pipe has taken what there was
                continue
            self._left -= len(piece)
            if self._left < 0:
                raise ValueError(f"{self._name} has more than {MOST_BYTES:,} bytes: save a part of it as a file")
            return piece


def stored(paths: Sequence[str], settings: Settings) -> StoredContext:
    """Store what is asked about, and say what of it was left out or replaced.

    One path is as `Paths` has it. A pipe is a text; beside other paths it is a part of a dict, under its own path.

    Args:
        paths: As the command line has them. None at all, like `-`, is stdin.
        settings: Those of the encoding are used.

    Raises:
        ConfigurationError: A path cannot be read, or is empty.
    """

    def encoded(source: object) -> StoredContext:
        context = store(Encoded(source, settings["encoding"], "strict" if settings["strict_text"] else "replace"))
        for remark in context.info.remarks(with_names=True):
            say(f"warning: {remark}", err=True)
        return context

    if not paths or STDIN in paths:
        return _not_empty(encoded(_stdin(paths)), paths)
    if not any(map(_is_pipe, paths)):
        return encoded(Paths(paths))
    with ExitStack() as stack:
        found = {}
        for path in paths:
            source = _opened(path, stack) if _is_pipe(path) else Paths([path])
            found[path] = stack.enter_context(closing(encoded(source)))
        if len(found) == 1:
            return _not_empty(next(iter(found.values())).another(), paths)
        return store(found)


def _stdin(paths: Sequence[str]) -> Pipe:
    if len(paths) > 1:
        raise ConfigurationError("- is stdin, and cannot be combined with other paths")
    say_if_typed()
    advice = "to ask about files, name them behind the question" if not paths else "its writer ends it"
    return Pipe(sys.stdin.fileno(), "stdin", advice)


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return False


def _opened(path: str, stack: ExitStack) -> Pipe:
    """Open a pipe without waiting for its writer. Linux polls one without a writer so far as silent, not as ended."""
    with refusal_told(f"cannot read {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return Pipe(fd, path, "it is a pipe, and its writer ends it")


def _not_empty(context: StoredContext, paths: Sequence[str]) -> StoredContext:
    if context.info.total_chars:
        return context
    context.close()
    if not paths:
        raise ConfigurationError("name files or folders to ask about, or pipe a text in: stdin is empty")
    raise ConfigurationError(f"{'stdin' if STDIN in paths else paths[0]} is empty: a question needs a text")
