"""The questions of an evaluation: generated ones, and a file of JSON lines, the user's own or OOLONG's.

A question is made or read once for its key, and its context again when it is asked. So contexts of many megabytes are
not in memory together, and no log has them.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.scoring import Key, Scoring, dates_in
from rlm_broker.evaluation.tasks import TASKS, Problem, chars_of
from rlm_broker.values.text import printable

OWN: Final = "own"
"""Name of the task of the user's questions, and of the length of their contexts."""
COMPARED: Final = ["more common than", "less common than", "same frequency as"]
"""Answers of OOLONG to a question that compares."""
Source = list[str | int]
"""Origin of a context, as a log can keep it: a task and what was drawn, or a file and the place of a line."""


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """One question of an evaluation, without its context.

    Attributes:
        id: Text, unique in the evaluation.
        kind: What it asks for, or the task named by a line of a file.
        length: Length of its context as the user wrote it; "own" for a context of the user's.
        text: The question.
        key: Expected answer.
        source: Place of its context, for `context_of`.
    """

    id: str
    kind: str
    length: str
    text: str
    key: Key
    source: Source


def generated(
    task: str, lengths: Iterable[str], samples: int, seed: int, asked: Iterable[str] = ()
) -> list[TaskQuestion]:
    """Return `samples` questions of a task at each length in tokens, with their kinds in turn.

    Args:
        asked: Kinds of questions; without any, all kinds that the task has.

    Raises:
        ConfigurationError: A name, a length or a number cannot be used.
    """
    every = TASKS[task][1]
    chosen = tuple(asked) or every
    for name in (each for each in chosen if each not in every):
        raise ConfigurationError(f"{task} cannot ask for {name[:40]!r}: it has {', '.join(every)}")
    if samples < 1:
        raise ConfigurationError(f"{task} needs at least one sample, not {samples}")
    return [
        TaskQuestion("-".join(map(str, source)), kind, length, made.question, made.key, source)
        for length in lengths
        for number in range(samples)
        for kind in (chosen[number % len(chosen)],)
        for source in (cast("Source", [task, kind, length, seed, number]),)
        for made in (_made(task, kind, length, seed, number),)
    ]


def context_of(source: Source) -> object:
    """Return the context of a question, which is made or read again.

    Raises:
        ConfigurationError: The file cannot be read, or the line has changed and is no question any more.
    """
    task, *rest = source
    if task != OWN:
        return _made(str(task), *rest).context  # type: ignore[arg-type]
    file, offset = Path(str(rest[0])), int(rest[1])
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            line = _line(stream.readline(), f"{file}, at byte {offset:,}")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    return line.context if line.path is None else Path(line.path)


def _made(task: str, kind: str, length: str, seed: int, number: int) -> Problem:
    return TASKS[task][0](Random(f"{task} {kind} {length} {seed} {number}"), chars_of(length), kind)


def own(file: Path) -> list[TaskQuestion]:
    """Return the questions of a user's file.

    Raises:
        ConfigurationError: The file cannot be read, is empty, or has a line that is no question; the message has its
            number.
    """
    found: dict[str, TaskQuestion] = {}
    offset = 0
    try:
        with file.open("rb") as stream:
            for number, text in enumerate(stream, 1):
                if text.strip():
                    line = _line(text, f"{file}, line {number}")
                    id = str(number if line.id is None else line.id)
                    if id in found:
                        raise ConfigurationError(f"{file}, line {number}: the id {id[:40]!r} was in an earlier line")
                    source: Source = [OWN, str(file.absolute()), offset]
                    found[id] = TaskQuestion(id, line.task, line.length, line.question, line.key(), source)
                offset += len(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    if not found:
        raise ConfigurationError(f"{file} has no questions: write one JSON object in each line")
    return list(found.values())


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the user's file. Without an id, the number of the line is the id."""

    question: str
    answer: str | int | float | list[str | int | float] | None
    id: str | int | None = None
    context: Any = None
    path: str | None = None
    scoring: Scoring | None = None
    choices: list[str] = []
    task: str = OWN
    length: str = OWN

    def __post_init__(self) -> None:
        if (self.context is None) == (self.path is None):
            raise ValueError("give the context once, as context or as path")
        answer, scoring = self.answer, self.key().scoring
        is_number, is_text = isinstance(answer, int | float), isinstance(answer, str)
        fits = {"number": is_number, "near": is_number, "set": isinstance(answer, list), "absent": answer is None}
        fits |= {"choice": answer in self.choices, "date": is_text and bool(dates_in(str(answer)))}
        if not fits.get(scoring, is_text) or (self.choices and scoring != "choice"):
            raise ValueError(f"the answer {str(answer)[:40]!r} cannot be scored as {scoring}")

    def key(self) -> Key:
        """Return the key. The kind of the answer says how it is scored, unless the line does."""
        kinds: dict[type, Scoring] = {int: "number", float: "number", list: "set", type(None): "absent"}
        scoring = self.scoring or ("choice" if self.choices else kinds.get(type(self.answer), "exact"))
        expected = tuple(map(str, self.answer)) if isinstance(self.answer, list) else self.answer
        return Key(scoring, expected, choices=tuple(self.choices))


class _OolongLine(msgspec.Struct):
    """One row of OOLONG's synthetic part, as `datasets` writes it to JSON lines. Other columns are not read."""

    context_window_text: str
    question: str
    answer: str
    answer_type: str
    context_len: int
    id: str | int | None = None
    task_group: str = "oolong"

    def line(self) -> _Line:
        """Return the line saying the same. The answer is a list of one value as Python writes it, such as "[7]"."""
        kind = self.answer_type.removeprefix("ANSWER_TYPE.")
        day = re.fullmatch(r"\[datetime\.date\((\d+), (\d+), (\d+)\)\]", self.answer)
        (value,) = ["-".join(part.zfill(2) for part in day.groups())] if day else ast.literal_eval(self.answer)
        answer = int(value) if kind == "NUMERIC" else str(value)
        kinds: dict[str, Scoring] = {"NUMERIC": "near", "COMPARISON": "choice", "DATE": "date", "MONTH_YEAR": "date"}
        choices = COMPARED if kind == "COMPARISON" else []
        context, length, scoring = self.context_window_text, str(self.context_len), kinds.get(kind, "contains")
        return _Line(self.question, answer, self.id, context, None, scoring, choices, self.task_group, length)


def _line(text: bytes, where: str) -> _Line:
    try:
        if b'"context_window_text"' in text:
            return msgspec.json.decode(text, type=_OolongLine).line()
        return msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"), type=_Line)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no question: {printable(str(error))}") from None
