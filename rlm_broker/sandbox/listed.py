"""A REPL that is on the board of its process while it is open, so that `ps` lists it and `stop` ends it."""

from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.sandbox.repl_worker import ReplWorker
from rlm_broker.trace.watchers import WATCHERS


class ListedRepl(AsyncResource):
    """Base of `SandboxedRepl`: its opening, its end, and what other processes are told of it.

    Attributes:
        is_listed: Whether it is on the board while it is open.
        tree: Id of the run tree that has the REPL, as in `Run.id`; None for a REPL of its own.
    """

    tree: str | None = None
    is_listed = True
    _worker: ReplWorker

    @property
    def is_closed(self) -> bool:
        """Whether the REPL was closed, and so runs no block any more."""
        return self._worker.is_closed

    @property
    def pid(self) -> int | None:
        """Process id of its init, which all its other processes are below; None while it has no process."""
        return None if self._worker.started is None else self._worker.started.worker.init.pid

    async def ainterrupt(self) -> None:
        """Interrupt the block that runs."""
        raise NotImplementedError

    async def _open(self) -> None:
        if self.is_listed:
            WATCHERS.add_repl(self)
        await self._worker.open()
        WATCHERS.became(self, "idle")

    async def _close(self) -> None:
        try:
            await self._worker.close()
        finally:
            WATCHERS.remove_repl(self)
