"""Values that a server and an executor hand to each other."""

from pydantic import BaseModel


class CodeExecResult(BaseModel):
    """Outcome of a step of code."""

    stdout: str
    stderr: str
    exit_code: int
