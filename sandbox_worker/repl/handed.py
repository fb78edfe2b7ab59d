"""Contexts that a REPL is given while it lives: memfds come from init, and are mapped as the first context was."""

import os
import socket
from collections.abc import Sequence
from typing import Any

from sandbox_worker.loading.context import ContextBroken, load_into
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.wire.descriptors import HANDED_FD, receive
from sandbox_worker.wire.values import decode_context


class HandedContexts:
    """Takes contexts out of the socket on which init hands them over.

    Args:
        reserve: Lets the process have address space for them.
        mapping_works: Whether texts can be mapped; else they are copied.
    """

    def __init__(self, reserve: Reserve, mapping_works: bool) -> None:
        self._socket = socket.socket(fileno=HANDED_FD)
        self._reserve = reserve
        self._mapping_works = mapping_works

    def take(self, pieces: Sequence[ContextPiece]) -> Any:
        """Return the context of these pieces, whose memfds are the next in the socket.

        Raises:
            ContextBroken: They are not there, or cannot be loaded.
        """
        loaded: dict[str, Any] = {}
        for piece in pieces:
            fd = self._next()
            try:
                self._reserve.lend(piece.form.mapped_bytes)
                load_into(loaded, "", fd, piece, self._mapping_works, decode_context)
            finally:
                os.close(fd)
        return loaded[""]

    def _next(self) -> int:
        try:
            _, fds = receive(self._socket, 1, 1, socket.MSG_DONTWAIT)
        except OSError as error:  # model code has taken it, or has closed the socket
            raise ContextBroken(f"its memfd is not there: {error.strerror}") from None
        if len(fds) != 1:
            raise ContextBroken("its memfd is not there")
        return fds[0]
