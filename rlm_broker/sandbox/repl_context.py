"""The contexts of one REPL. Each of its workers loads them anew, so that they are kept as long as the REPL."""

from dataclasses import dataclass

from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.store import refuse_a_name, store, store_as_it_is
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ConfigurationError, ReplClosed
from sandbox_worker.wire.names import CONTEXT, numbered


@dataclass(frozen=True, slots=True)
class Inherited:
    """Stands for a context that the REPL's fork server has, and each of its workers inherits.

    Attributes:
        stored: The same context as the orchestrator has stored it.
    """

    stored: StoredContext


SMALL_CHARS = 1 << 16
"""Characters of a text that is stored on the event loop, in less time than a thread takes to start. A thread stores a
longer one."""


MAX_LATER = 256
"""Memfds of contexts that one REPL may be given while it lives; more are refused. A fresh REPL gets all of them at
once, and the kernel queues 278 small packets on a unix socket: each takes 768
of the 212,992 bytes of net.core.wmem_default."""


class ReplContext:
    """The contexts of one REPL, each stored once.

    Args:
        given: Context that the REPL begins with, see `Sandbox.repl`; or `Inherited`.
        later_bytes: Bytes that contexts which are added may take together.

    Attributes:
        later: Name of the variable → context that was added.

    Raises:
        ContextRefused: A name was given where its content was meant, such as that of a file.
    """

    def __init__(self, given: object, later_bytes: int) -> None:
        refuse_a_name(given)
        self._given = given
        self._later_bytes = later_bytes
        self.later: dict[str, StoredContext] = {}
        self._own: StoredContext | None = None
        self._is_closed = False

    async def stored(self) -> StoredContext | None:
        """Return the context as a worker loads it; None if the fork server has it.

        Raises:
            ReplClosed: The REPL was closed, maybe while a worker was restarted.
            ContextRefused: The context cannot be read.
        """
        if self._is_closed:
            raise ReplClosed("this REPL was closed")
        if isinstance(self._given, Inherited):
            return None
        if isinstance(self._given, StoredContext):  # its owner closes it; several REPLs may share it
            return self._given
        if self._own is not None:
            return self._own
        if self._given is None or (isinstance(self._given, str) and len(self._given) < SMALL_CHARS):
            self._own = store_as_it_is(self._given)
        else:
            self._own = await in_thread(lambda _: store_as_it_is(self._given), discard=StoredContext.close)
        return self._own

    def named(self, name: str) -> StoredContext | None:
        """Return the context that code has as the variable `name`, or None. The REPL closes it."""
        if name in self.later:
            return self.later[name]
        if self._is_closed or name not in (CONTEXT, numbered(CONTEXT, 0)):
            return None
        given = self._given.stored if isinstance(self._given, Inherited) else self._given
        return given if isinstance(given, StoredContext) else self._own

    async def add(self, given: object) -> str:
        """Store one more context, which the REPL is given while it lives, and return its name.

        Raises:
            ConfigurationError: There is no room for it.
            ReplClosed, ContextRefused: As for `stored`.
        """
        if isinstance(given, StoredContext):
            stored = given.another()
        else:
            stored = await in_thread(lambda _: store(given), discard=StoredContext.close)
        try:
            if self._is_closed:
                raise ReplClosed("this REPL was closed")
            self._require_room([piece.form.mapped_bytes for _, piece in stored.pieces()])
        except BaseException:
            stored.close()
            raise
        name = numbered(CONTEXT, len(self.later) + 1)
        self.later[name] = stored
        return name

    def drop(self, name: str) -> None:
        """Forget and close the context that was added last."""
        self.later.pop(name).close()

    def _require_room(self, sizes_bytes: list[int]) -> None:
        has = [piece.form.mapped_bytes for stored in self.later.values() for _, piece in stored.pieces()]
        room_bytes = self._later_bytes - sum(has)
        if sum(sizes_bytes) > room_bytes:
            raise ConfigurationError(
                f"a further context has {sum(sizes_bytes):,} bytes, and there is room for {room_bytes:,}: raise "
                f"later_context_bytes = {self._later_bytes:,} in the limits of the REPL"
            )
        if len(has) + len(sizes_bytes) > MAX_LATER:
            raise ConfigurationError(f"a REPL is given {MAX_LATER} contexts at most while it lives: open another REPL")

    def free(self) -> None:
        """Free all that was stored for this REPL, which may store its first context again."""
        own, self._own = self._own, None
        for stored in (own, *self.later.values()):
            if stored is not None:
                stored.close()
        self.later.clear()

    def close(self) -> None:
        """Free all that was stored for this REPL, and store no more. Has no effect when repeated."""
        self._is_closed = True
        self.free()
