"""What every client is: one async call that returns its text and its own usage."""

from dataclasses import dataclass
from typing import Protocol

from rlm_broker.types import ChatMessage, Usage


@dataclass(frozen=True, slots=True)
class LMRequest:
    """One language model call.

    Attributes:
        messages: The conversation, in order; at least one.
        model: The name that was asked for, or None for the client's own.
        max_completion_tokens: Output tokens at most; None leaves it to the provider.
        depth: 0 for the root model of a run, 1 and more for what its REPL asks.
        question: The question of the run, out of band: for clients that retrieve and do not reason. A client that
            sends requests to a model ignores it.
        is_loop: The call is a turn of a run's loop, whose reply may hold code; otherwise it is a plain completion.
    """

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    max_completion_tokens: int | None = None
    depth: int = 0
    question: str | None = None
    is_loop: bool = False


@dataclass(frozen=True, slots=True)
class LMReply:
    """What one call returned: its text, and what this call alone used (`usage.total_calls` is 1)."""

    text: str
    usage: Usage


class Client(Protocol):
    """A way to call models.

    It may have an attribute `context_tokens`, how many tokens its model can read, or None where that is not known.
    """

    @property
    def model_name(self) -> str:
        """The name it is registered and reported under."""
        ...

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request. Cancelling it ends the call at the provider.

        Raises:
            ModelFailed: With one sentence that says why.
        """
        ...

    async def aclose(self) -> None:
        """Give back what the client holds (connections, threads). Harmless when called twice."""
        ...
