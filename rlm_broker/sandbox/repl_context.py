"""The context of one REPL, as its workers load it: each of them anew, and so it is kept as long as the REPL."""

import asyncio
from typing import Final

from rlm_broker.context.store import StoredContext, refuse_a_name, store
from rlm_broker.errors import ReplClosed

INHERITED: Final = object()
"""Given in place of a context: the REPL has the one that its fork server has."""
SMALL_CHARS = 1 << 16
"""Longest text that is stored on the event loop, in less time than a thread takes to start. Beyond it a thread does."""


class ReplContext:
    """What was given as the context of a REPL, stored once.

    Args:
        given: See `Sandbox.repl`; or `INHERITED`.

    Raises:
        ContextRefused: It is the name of something else than itself.
    """

    def __init__(self, given: object) -> None:
        refuse_a_name(given)
        self._given = given
        self._own: StoredContext | None = None
        self._is_closed = False

    async def stored(self) -> StoredContext | None:
        """Return the context as a worker loads it; None where the fork server has it.

        Raises:
            ReplClosed: The REPL was closed, maybe while a worker was restarted.
            ContextRefused: It cannot be read.
        """
        if self._is_closed:
            raise ReplClosed("this REPL was closed")
        if self._given is INHERITED:
            return None
        if isinstance(self._given, StoredContext):  # its owner closes it; several REPLs may share it
            return self._given
        if self._own is not None:
            return self._own
        if self._given is None or (isinstance(self._given, str) and len(self._given) < SMALL_CHARS):
            self._own = store(self._given)
        else:
            self._own = await asyncio.to_thread(store, self._given)
        return self._own

    def close(self) -> None:
        """Free what was stored for this REPL. Harmless when repeated."""
        self._is_closed = True
        if self._own is not None:
            self._own.close()
