"""Errors and results of a code interpreter."""

from typing import Any


class CodeInterpreterError(RuntimeError):
    """Something that code cannot repair. The session is over, unless nothing had begun."""


class CodeExecutionError(CodeInterpreterError):
    """Code has failed in an interpreter that goes on."""


class FinalOutput:
    """The fields that code has submitted."""

    def __init__(self, output: Any) -> None:
        self.output = output
