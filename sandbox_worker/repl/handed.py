"""Later contexts: those that a REPL is given while it lives. Init hands over their memfds, and the REPL maps them."""

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
    """Receiver of later contexts, from the socket on which init hands over their memfds.

    Args:
        reserve: Reserve that lends address space for them.
        mapping_works: Whether texts can be mapped. Otherwise they are copied.
    """

    def __init__(self, reserve: Reserve, mapping_works: bool) -> None:
        self._socket = socket.socket(fileno=HANDED_FD)
        self._reserve = reserve
        self._mapping_works = mapping_works

    def take(self, pieces: Sequence[ContextPiece]) -> Any:
        """Return the context of these pieces, whose memfds are the next ones in the socket.

        Raises:
            ContextBroken: A memfd is missing, or a piece cannot be loaded.
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
        except OSError as error:  # model code has received the memfd itself, or has closed the socket
            raise ContextBroken(f"its memfd is missing: {error.strerror}") from None
        if len(fds) != 1:
            raise ContextBroken("its memfd is missing")
        return fds[0]
