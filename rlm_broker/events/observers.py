"""Observers of sandboxes and REPLs. A sandbox calls them; the board of the process, which `ps` lists, is one."""

from typing import Literal, Protocol

ReplState = Literal["starting", "idle", "busy"]


class ObservedRepl(Protocol):
    """The members of `SandboxedRepl` for observers.

    Attributes:
        tree: Id of the run tree with the REPL; None for a REPL of its own.
    """

    tree: str | None

    @property
    def pid(self) -> int | None:
        """Process id of its init; None while it has no process."""

    async def ainterrupt(self) -> None:
        """Interrupt its block."""

    async def aclose(self) -> None:
        """End its processes."""


class SandboxObserver:
    """A base of observers with empty methods. They are called from any thread, and must not block."""

    def sandbox_opens(self) -> None:
        """Take the opening of a sandbox. What this raises ends the opening."""

    def repl_opens(self, repl: ObservedRepl) -> None:
        """Take the opening of a REPL."""

    def repl_became(self, repl: ObservedRepl, state: ReplState) -> None:
        """Take the new state of a REPL. Each block calls this twice, so it takes a microsecond at most."""

    def repl_closed(self, repl: ObservedRepl) -> None:
        """Take the end of a REPL, or of its opening."""


OBSERVERS: list[SandboxObserver] = []
"""All observers of this process. A module adds its own when it is imported."""
