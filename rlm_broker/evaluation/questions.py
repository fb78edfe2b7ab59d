"""The questions of an evaluation: generated ones, and the user's own from a file of JSON lines."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, get_args

import msgspec

from rlm_broker.broker.clients.base import estimate_tokens
from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.lengths import Length
from rlm_broker.evaluation.scoring import Key, Scoring
from rlm_broker.evaluation.tasks.problem import Problem
from rlm_broker.evaluation.tasks.task import TASKS, Task
from rlm_broker.values.text import printable
from rlm_broker.values.validation import did_you_mean
from sandbox_worker.wire.text_json import decode_escaped

OWN_LENGTH: Final = "own"
"""Name of the length of the user's contexts."""
MOST_LINE_BYTES: Final = 1 << 30
"""Bytes of a line of the user's file; a longer one is refused, since it is read into memory."""

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Question:
    """One question of an evaluation. Its context is made or read when it is asked.

    Attributes:
        id: Text that no other question of the evaluation has.
        task: Name of its task.
        length: Name of its length.
        tokens: About how many tokens its context has.
        problem: Makes the context, the question and the key.
    """

    id: str
    task: str
    length: str
    tokens: int
    problem: Callable[[], Problem]


def tasks_of(text: str) -> tuple[Task, ...]:
    """Return the tasks that a text names, in the order of `TASKS`; "all" is each of them.

    Raises:
        ConfigurationError: There is no such task, or none is named.
    """
    names = {name.strip() for name in text.split(",") if name.strip()}
    for name in sorted(names - TASKS.keys() - {"all"}):
        raise ConfigurationError(f"there is no task {name[:40]!r}{did_you_mean(name, list(TASKS))}")
    if not names:
        raise ConfigurationError(f"there is no task: name some of {', '.join(TASKS)}, or all")
    return tuple(task for name, task in TASKS.items() if name in names or "all" in names)


def generated(tasks: Sequence[Task], lengths: Sequence[Length], samples: int, seed: int) -> list[Question]:
    """Return `samples` questions of each task at each length.

    Raises:
        ConfigurationError: A length is too short or too long.
    """
    return [
        Question(
            f"{task.name}-{length.name}-{length.unit}-{seed}-{number}",
            task.name,
            length.name,
            round(chars / task.chars_per_token),
            partial(task.problem, seed, number, chars),
        )
        for length in lengths
        for task in tasks
        for chars in (length.chars(task.chars_per_token),)
        for number in range(1, samples + 1)
    ]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the user's file. Without an id, the number of the line is the id."""

    question: str
    answer: str | int | float | list[str | int | float] | None
    id: str | int | None = None
    context: Any = None
    path: str | None = None
    scoring: str | None = None
    choices: list[str] = []
    task: str = "data"


def own(file: Path) -> list[Question]:
    """Return the questions of a user's file. Contexts are read when they are asked.

    Raises:
        ConfigurationError: The file cannot be read, is empty, or has a line that is no question; the message has its
            number.
    """
    questions: dict[str, Question] = {}
    try:
        for number, offset, text in _lines(file):
            line = _line(text, file, number)
            id = str(number if line.id is None else line.id)
            if id in questions:
                raise ConfigurationError(f"{file}, line {number}: the id {id[:40]!r} was in an earlier line")
            tokens = math.ceil(estimate_tokens(_chars(line)))
            questions[id] = Question(id, line.task, OWN_LENGTH, tokens, partial(_read, file, number, offset))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    if not questions:
        raise ConfigurationError(f"{file} has no questions: write one JSON object in each line")
    return list(questions.values())


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the place in the file and the content of each line that is not blank."""
    offset = 0
    with file.open("rb") as stream:
        for number, text in enumerate(iter(partial(stream.readline, MOST_LINE_BYTES + 1), b""), 1):
            if len(text) > MOST_LINE_BYTES:
                raise ConfigurationError(
                    f"{file}, line {number} has more than {MOST_LINE_BYTES:,} bytes: give its context as a path"
                )
            if text.strip():
                yield number, offset, text
            offset += len(text)


def _read(file: Path, number: int, offset: int) -> Problem:
    """Return the problem of a line, from its place in the file.

    Raises:
        ConfigurationError: The file cannot be read, or the line has changed and is no question any more.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            line = _line(stream.readline(MOST_LINE_BYTES), file, number)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    context = line.context if line.path is None else Path(line.path)
    return Problem(context, line.question, _key(line, f"{file}, line {number}"))


def _line(text: bytes, file: Path, number: int) -> _Line:
    """Return a checked line.

    Raises:
        ConfigurationError: It is no question with an answer.
    """
    where = f"{file}, line {number}"
    try:
        line = decode_escaped(text.removeprefix(BYTE_ORDER_MARK), _Line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no question: {printable(str(error))}") from None
    if (line.context is None) == (line.path is None):
        raise ConfigurationError(f"{where}: give the context once, as context or as path")
    if line.id is not None and not str(line.id).strip():
        raise ConfigurationError(f"{where}: the id is empty")
    if not line.question.strip():
        raise ConfigurationError(f"{where}: the question is empty")
    _key(line, where)
    return line


def _chars(line: _Line) -> int:
    """Return about how many characters the context of a line has; 0 for a folder."""
    if line.path is None:
        return len(line.context) if isinstance(line.context, str) else len(msgspec.json.encode(line.context))
    path = Path(line.path)
    try:
        return path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError):  # no path can be so long, or have such characters: the run says so
        return 0


def _key(line: _Line, where: str) -> Key:
    """Return the key of a line. The kind of its answer says how it is scored, unless the line does.

    Raises:
        ConfigurationError: There is no such scoring, or the answer is not of its kind.
    """
    answer = line.answer
    is_number = isinstance(answer, int | float)
    by_kind: Scoring = "number" if is_number else "set" if isinstance(answer, list) else "exact"
    scoring = line.scoring or ("absent" if answer is None else "choice" if line.choices else by_kind)
    if scoring not in get_args(Scoring):
        raise ConfigurationError(f"{where}: there is no scoring {scoring[:40]!r}: use {', '.join(get_args(Scoring))}")
    wanted = {"number": is_number, "near": is_number, "set": isinstance(answer, list), "absent": answer is None}
    if not wanted.get(scoring, isinstance(answer, str) and answer.strip()):
        kinds = {"number": "a number", "near": "a number", "set": "a list", "absent": "null"}
        raise ConfigurationError(f"{where}: the answer for scoring {scoring!r} must be {kinds.get(scoring, 'a text')}")
    if (scoring == "choice") != bool(line.choices) or (line.choices and answer not in line.choices):
        raise ConfigurationError(f"{where}: give choices for scoring 'choice' alone, with the answer among them")
    expected = tuple(map(str, answer)) if isinstance(answer, list) else answer
    return Key(cast("Scoring", scoring), expected, choices=tuple(line.choices))
