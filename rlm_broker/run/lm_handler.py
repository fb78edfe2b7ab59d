"""The public handler: a broker that can also answer the REPLs of a loop that is the user's own."""

from collections.abc import Mapping
from typing import Any

from rlm_broker.broker.broker import Broker
from rlm_broker.errors import SandboxFailed
from rlm_broker.events.callback import Callback
from rlm_broker.events.event import Emit
from rlm_broker.limits import Limits
from rlm_broker.run.answers import Budget, ReplAnswers
from rlm_broker.run.tools import Tools
from rlm_broker.sandbox.sandbox import Sandbox


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
        """Return the query handler of one REPL, for `Sandbox.repl(answer=...)`.

        Each has its own session, limits, usage and fair share of the clients' places. It runs on the event loop of the
        handler, even if the sandbox lives on another.

        Example:
            ```python
            answers = handler.answers(Limits(max_llm_calls=50))
            with sandbox.repl("some text", answer=answers) as repl:
                repl.execute("print(llm_query('Summarise: ' + context))")
            ```

        Args:
            limits: Limits of the REPL's queries and of everything below them. None takes the defaults.
            depth: Depth of the REPL's queries, 1 or more; it decides which model answers them. 1 is directly below a
                root.
            tools: Functions and values for code, as for `RLM`. Give their names and values to the REPL as well.
            on_event: Called with the events of each call, tool and child. It must not block.
            question: Task of the REPL, for clients that retrieve instead of reasoning.
            sandbox: Sandbox for the REPLs of child runs, if `Limits.max_depth` allows any. With None, `rlm_query` is
                answered like `llm_query`.
            budget: Limits that this REPL shares with others, in addition to its own.

        Returns:
            The query handler, with the attributes `tools`, `values` and `usage`.

        Raises:
            ConfigurationError: An argument cannot be used.
            SandboxFailed: The handler is not open.
        """
        if not self.is_open or self.event_loop is None:
            raise SandboxFailed("the handler is not open: use it as `with LMHandler(...) as handler:`")
        told = None if on_event is None else Callback(on_event, "on_event")
        return ReplAnswers(self, self.event_loop, limits, depth, tools, told, question, sandbox, budget)
