"""The public door of the sandbox: REPLs for untrusted code, with or without a model behind them."""

from rlm_broker.errors import SandboxFailed
from rlm_broker.home import Home, Resident
from rlm_broker.limits import Limits
from rlm_broker.sandbox import policy
from rlm_broker.sandbox.host import Host
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.transport.connection import QueryHandler, refuse
from rlm_broker.transport.listener import Listener


class Sandbox(Resident):
    """Starts REPLs in processes of their own, isolated from the machine and from each other.

    Use it as a context manager (`with` or `async with`): the fork server is started when it is entered, and nothing
    that was started in it is left when it is left.

    Args:
        limits: Bounds of each REPL; None takes the defaults of `Limits`.
        isolation: "auto" (the strongest level that there is, or an error), "strict", or "process", which protects
            nothing and is never chosen by itself.
        allow_exec: Whether code may start other programs. They run behind the same walls.
        listener: The port that REPLs connect to; None opens one of its own on loopback.
        home: Where it lives; None is decided by how it is opened.

    Raises:
        ConfigurationError: There is no such level.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        isolation: str = "auto",
        *,
        allow_exec: bool = True,
        listener: Listener | None = None,
        home: Home | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.level = policy.resolve(isolation)
        policy.warn_if_unprotected(self.level)
        self._allow_exec = allow_exec
        self._listener = listener
        self._own_listener: Listener | None = None
        self._host: Host | None = None
        self._home = home

    def repl(self, context: object = None, handler: QueryHandler = refuse) -> SandboxedRepl:
        """A new REPL, to be used as a context manager.

        Args:
            context: What its variable `context` holds: text, a dict or list of plain values, or a path; see `store`.
                A `StoredContext` is shared: it stays the caller's to close.
            handler: Answers `llm_query` and its like. Without one they say that no model is connected.

        Raises:
            SandboxFailed: The sandbox is not open. (A context that cannot be read is refused when it is entered.)
        """
        host, listener = self._host, self._listener or self._own_listener
        if host is None or listener is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        return SandboxedRepl(self.home, host, listener, context, handler, self.limits)

    async def _open(self) -> None:
        if self._host is not None:
            return
        host = Host(self.level, self.limits, self._allow_exec)
        try:
            if self._listener is None:
                self._own_listener = Listener()
                await self._own_listener.start()
            await host.start()
        except BaseException:
            await self._close()
            raise
        self._host = host

    async def _close(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await host.close()
        if self._own_listener is not None:
            await self._own_listener.stop()
            self._own_listener = None
