"""Results of blocks and completions."""

from dataclasses import dataclass
from typing import Any


@dataclass
class RLMChatCompletion:
    """One completion of a model, or of a child run."""

    response: str


class REPLResult:
    """Outcome of one block."""

    def __init__(
        self,
        stdout: str,
        stderr: str,
        locals: Any,
        execution_time: float = 0.0,
        rlm_calls: list[RLMChatCompletion] | None = None,
        final_answer: str | None = None,
    ) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.locals = locals
        self.execution_time = execution_time
        self.rlm_calls = rlm_calls or []
        self.final_answer = final_answer
