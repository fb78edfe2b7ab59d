"""The front door: composes everything, the one module that knows all rooms."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from rlm_broker.clients.base import Client
from rlm_broker.clients.named import client_for
from rlm_broker.context import StoredContext, store
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled
from rlm_broker.handler.calls import Caller, RunCalls
from rlm_broker.handler.handler import LMHandler
from rlm_broker.handler.routing import ModelPolicy
from rlm_broker.home import Home, Resident
from rlm_broker.ledger import Ledger
from rlm_broker.limits import Limits
from rlm_broker.recursion import Recursion
from rlm_broker.runner import Runner, Tree
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.trace.events import Emit, Event, RunStarted
from rlm_broker.types import Completion

ROOT_RUN = "1"


class RLM:
    """A language model whose context is a variable in a sandboxed REPL.

    As a context manager it keeps its handler and its fork server between calls; otherwise each call starts its own and
    ends them.

    Args:
        model: The root model: a name ("offline", "openai/gpt-5-mini") or a client object.
        sub_model: Answers what the REPL asks; None is the root model.
        models: Further models that code may name.
        limits: Bounds of each run tree; None takes the defaults.
        isolation: See `Sandbox`.
        allow_exec: Whether code may start other programs.
        model_policy: What a model is worth that code names; see `ModelPolicy`.
        system_prompt: In place of our own, for every run of the tree.
        on_event: Called with everything that happens; what it raises is dropped. It must not block.

    Raises:
        ConfigurationError: A model, key or level that there is not.
    """

    def __init__(
        self,
        model: str | Client = "offline",
        sub_model: str | Client | None = None,
        *,
        models: Mapping[str, str | Client] | None = None,
        limits: Limits | None = None,
        isolation: str = "auto",
        allow_exec: bool = True,
        model_policy: ModelPolicy = "allow",
        system_prompt: str | None = None,
        on_event: Emit | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._root = _client(model)
        self._sub = None if sub_model is None else _client(sub_model)
        self._models = {name: _client(client) for name, client in (models or {}).items()}
        self._isolation = isolation
        self._allow_exec = allow_exec
        self._policy: ModelPolicy = model_policy
        self._system_prompt = system_prompt
        self._on_event = on_event
        self._kept: _Machinery | None = None
        Sandbox(self.limits, isolation)  # an unknown level is refused here and not in the first call

    def completion(self, prompt: object, root_prompt: str | None = None) -> Completion:
        """Answer a question about a context.

        Args:
            prompt: The context: text, a dict or list of plain values, or a path; see `context.store`.
            root_prompt: The question. None: the task is in the context.

        Raises:
            LimitReached: A limit ended it; carries `partial_answer`.
            RunCancelled: Ctrl+C; carries `partial_answer`.
            ModelFailed, ContextRefused, IsolationUnavailable, SandboxFailed: What their names say.
        """
        home = self._kept.home if self._kept else Home.background()
        attempt = _Attempt()
        try:
            return home.run(self._complete(prompt, root_prompt, attempt))
        except KeyboardInterrupt:
            raise RunCancelled(attempt.partial_answer) from None

    async def acompletion(self, prompt: object, root_prompt: str | None = None) -> Completion:
        """`completion`, awaited. Cancelling it ends the run and everything below it."""
        home = self._kept.home if self._kept else Home.here()
        return await home.arun(self._complete(prompt, root_prompt, _Attempt()))

    def __enter__(self) -> "RLM":
        self._kept = self._machinery(Home.background())
        self._kept.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "RLM":
        self._kept = self._machinery(Home.here())
        await self._kept.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.aclose()

    def close(self) -> None:
        """End what it keeps. Harmless when repeated."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _machinery(self, home: Home) -> "_Machinery":
        handler = LMHandler(
            self._root,
            other_backend_client=self._sub,
            model_policy=self._policy,
            open_client=client_for,
            call_timeout_s=self.limits.call_timeout_s,
            home=home,
        )
        for name, client in self._models.items():
            handler.register_client(name, client)
        sandbox = Sandbox(
            self.limits, self._isolation, allow_exec=self._allow_exec, listener=handler.listener, home=home
        )
        return _Machinery(home, handler, sandbox)

    async def _complete(self, prompt: object, question: str | None, attempt: "_Attempt") -> Completion:
        if question is not None and not question.strip():
            raise ConfigurationError("the question is empty: say what you want to know, or pass None")
        if isinstance(prompt, StoredContext):
            return await self._run(prompt, question, attempt)
        with await asyncio.to_thread(store, prompt) as context:
            return await self._run(context, question, attempt)

    async def _run(self, context: StoredContext, question: str | None, attempt: "_Attempt") -> Completion:
        if self._kept is not None:
            return await self._bounded(self._kept, context, question, attempt)
        async with self._machinery(Home.here()) as machinery:
            return await self._bounded(machinery, context, question, attempt)

    async def _bounded(
        self, machinery: "_Machinery", context: StoredContext, question: str | None, attempt: "_Attempt"
    ) -> Completion:
        limit_s = self.limits.run_timeout_s
        ledger = Ledger(self.limits)
        calls = RunCalls(machinery.handler, ledger, self._emit)
        tree = Tree(calls, ledger, machinery.sandbox, self._emit, self._system_prompt)
        caller = Caller(ROOT_RUN, 0, question)
        self._emit(RunStarted(ROOT_RUN, 0, question, self._root.model_name, self._metadata(context)))
        recursion = Recursion(tree, caller)
        attempt.runner = Runner(tree, caller, recursion, recursion.child_traces)
        try:
            async with asyncio.timeout(limit_s):
                return await attempt.runner.run(context)
        except TimeoutError:
            assert limit_s is not None
            raise LimitReached("run_timeout_s", limit_s, limit_s, attempt.partial_answer) from None

    def _metadata(self, context: StoredContext) -> dict[str, Any]:
        info = context.info
        return {
            "model": self._root.model_name,
            "sub_model": (self._sub or self._root).model_name,
            "isolation": self._isolation,
            "limits": self.limits.model_dump(),
            "context": {"type": info.type_name, "chars": info.total_chars, "parts": info.parts_total},
        }

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            with contextlib.suppress(Exception):  # a callback is the user's, and must not break the run
                self._on_event(event)


class _Machinery(Resident):
    """A handler and a sandbox whose REPLs connect to it, on one loop."""

    def __init__(self, home: Home, handler: LMHandler, sandbox: Sandbox) -> None:
        self._home = home
        self.handler = handler
        self.sandbox = sandbox

    async def _open(self) -> None:
        try:
            await self.handler.__aenter__()
            await self.sandbox.__aenter__()
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        await self.sandbox.aclose()
        await self.handler.aclose()


class _Attempt:
    """What is known of a run from outside while it runs."""

    def __init__(self) -> None:
        self.runner: Runner | None = None

    @property
    def partial_answer(self) -> str | None:
        return self.runner.progress.partial_answer if self.runner else None


def _client(model: str | Client) -> Client:
    return client_for(model) if isinstance(model, str) else model
