"""The base of sandboxes: file tools made of command lines and whole files."""

import abc
import shlex
from typing import Any


class BaseSandbox(abc.ABC):
    """A sandbox has an id, runs command lines and copies files; the rest is made of these."""

    @property
    @abc.abstractmethod
    def id(self) -> str: ...

    @abc.abstractmethod
    def execute(self, command: str, *, timeout: int | None = None) -> Any: ...

    @abc.abstractmethod
    def upload_files(self, files: list[tuple[str, bytes]]) -> list[Any]: ...

    @abc.abstractmethod
    def download_files(self, paths: list[str]) -> list[Any]: ...

    def read(self, path: str) -> str:
        """Return the text of a file, as the tool of an agent does: by a command line."""
        return str(self.execute(f"cat {shlex.quote(path)}").output)
