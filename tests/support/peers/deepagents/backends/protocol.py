"""Answers of a backend. Errors are values in them."""

from dataclasses import dataclass


@dataclass
class ExecuteResponse:
    """Outcome of a command line."""

    output: str
    exit_code: int | None = None
    truncated: bool = False


@dataclass
class FileUploadResponse:
    """Outcome of one written file."""

    path: str
    error: str | None = None


@dataclass
class FileDownloadResponse:
    """Outcome of one read file."""

    path: str
    content: bytes | None = None
    error: str | None = None
