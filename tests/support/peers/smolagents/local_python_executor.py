"""An executor, its results and its errors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_LEN_OUTPUT = 50_000


class InterpreterError(ValueError):
    """Code cannot be run, or has failed."""


class ExecutionTimeoutError(Exception):
    """Code has run for too long."""


@dataclass
class CodeOutput:
    """Outcome of a step."""

    output: Any
    logs: str
    is_final_answer: bool


class PythonExecutor(ABC):
    """Runs the steps of an agent."""

    @abstractmethod
    def send_tools(self, tools: dict[str, Any]) -> None:
        """Give code functions."""

    @abstractmethod
    def send_variables(self, variables: dict[str, Any]) -> None:
        """Give code variables."""

    @abstractmethod
    def __call__(self, code_action: str) -> CodeOutput:
        """Run a step."""
