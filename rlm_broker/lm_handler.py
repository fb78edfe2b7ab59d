"""The public handler: the broker, and what answers the REPLs of a loop of the user's own."""

from collections.abc import Mapping
from typing import Any

from rlm_broker.callback import Callback
from rlm_broker.errors import SandboxFailed
from rlm_broker.handler.broker import Broker
from rlm_broker.limits import Limits
from rlm_broker.run.answers import Budget, ReplAnswers
from rlm_broker.run.tools import Tools
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.trace.events import Emit


class LMHandler(Broker):
    __doc__ = Broker.__doc__

    def answers(
        self,
        limits: Limits | None = None,
        *,
        depth: int = 1,
        tools: Tools | Mapping[str, Any] | None = None,
        on_event: Emit | None = None,
        question: str | None = None,
        sandbox: Sandbox | None = None,
        budget: Budget | None = None,
    ) -> ReplAnswers:
        """Return what answers one REPL: `Sandbox.repl(answer=...)` takes it.

        Each has a session, limits, a usage and a fair share of the clients' places of its own. It runs on the event
        loop of the handler, also where the sandbox is on another.

        Args:
            limits: Bounds of what the REPL asks, and of all below it. None takes the defaults.
            depth: Of what the REPL asks; it decides which model answers. 1 is below a root.
            tools: What code may call, as for `RLM`. Give their names and values to the REPL as well.
            on_event: Called with each call, tool and child. It must not block.
            question: What the REPL works on, for clients that retrieve.
            sandbox: Where child runs of `rlm_query` have their REPLs, as far as `Limits.max_depth` allows any. None:
                `rlm_query` is answered as `llm_query`.
            budget: Means that this REPL shares with others, beside its own limits.

        Raises:
            ConfigurationError: An argument cannot be used.
            SandboxFailed: The handler is not open.
        """
        if not self.is_open or self.event_loop is None:
            raise SandboxFailed("the handler is not open: use it as `with LMHandler(...) as handler:`")
        told = None if on_event is None else Callback(on_event, "on_event")
        return ReplAnswers(self, self.event_loop, limits, depth, tools, told, question, sandbox, budget)
