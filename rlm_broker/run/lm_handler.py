"""The public handler: a broker with answers for REPLs of the user's own loop."""

from collections.abc import Mapping
from typing import Any

from rlm_broker.broker.broker import Broker
from rlm_broker.errors import SandboxFailed
from rlm_broker.events.callback import Callback
from rlm_broker.events.event import Emit
from rlm_broker.limits import Limits
from rlm_broker.run.answers import Budget, ReplAnswers
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools


class LMHandler(Broker):
    """Routes completions by model name and depth to clients, and answers the queries of REPLs.

    Use it as a context manager, or `start` and `stop` it. It closes no client: each belongs to the code that made it.

    Example:
        ```python
        with LMHandler(OpenAICompatibleClient("http://localhost:8000/v1", "qwen3")) as handler:
            print(handler.completion("Say a word."))
        ```

    Args:
        client: Client for depth 0, and for all calls that no other client serves.
        host: Address to bind; one beyond loopback is refused unless `insecure_bind`.
        port: TCP port; 0 takes a free one.
        other_backend_client: Client for depth 1 and deeper.
        batch_max_concurrent: Calls of one one-shot batch at the same time.
        one_shot: Also serve the field's one-shot protocol. It has no token: every process that reaches the port may
            call.
        model_policy: Which models model code may name; see `ModelPolicy`.
        open_client: Makes the client of an unlisted name, for the policy `open`.
        call_timeout_s: Seconds after which a call fails, unless it names another limit. Waiting for its turn does not
            count.
        cache: Stores replies; None stores none.
        event_loop: Event loop on which it lives; None: the way of opening it decides.
    """

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
