"""Plain values."""

from dataclasses import dataclass


@dataclass
class User:
    """A user of the machine."""

    name: str


@dataclass
class ExecResult:
    """Outcome of a command."""

    stdout: bytes
    stderr: bytes
    exit_code: int
