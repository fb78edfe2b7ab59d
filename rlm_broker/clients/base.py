"""What every client is: one async call that returns its text and its own usage."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from rlm_broker.clients.recording import CallId
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import ChatMessage, Usage

PICTURE_CHARS = 6_000
"""What a content part that is no text counts as: some 2,000 tokens, as most providers take for a picture."""
CHARS_PER_TOKEN = 4.0
"""Characters of one token, as text in Latin script has them on average."""


class LMRequest(msgspec.Struct, frozen=True):
    """One language model call.

    Attributes:
        messages: The conversation, in order; at least one.
        model: The name that was asked for, or None for the client's own.
        max_completion_tokens: Output tokens at most; None leaves it to the provider.
        depth: 0 for the root model of a run, 1 and more for what its REPL asks.
        question: The question of the run, out of band: for clients that retrieve and do not reason. A client that
            sends requests to a model ignores it.
        is_loop: The call is a turn of a run's loop, whose reply may hold code; otherwise it is a plain completion.
        sample: Which of several answers to one and the same prompt this is to be, from 0.
        on_text: Called with each piece of the reply as it comes, by clients that can; it must not block. A call that is
            tried again begins anew.
        id: Which call of a run it is, for whoever writes it down.
        has_own_prompt: The system prompt is this package's, whose words depend on the machine and the release.
        temperature: Of sampling, in place of the one that the client's options have; None leaves it to them. A client
            that cannot set it (a function, an object of another runtime) does not.
    """

    messages: tuple[ChatMessage, ...]
    model: str | None = None
    max_completion_tokens: int | None = None
    depth: int = 0
    question: str | None = None
    is_loop: bool = False
    sample: int = 0
    on_text: Callable[[str], None] | None = None
    id: CallId | None = None
    has_own_prompt: bool = False
    temperature: float | None = None

    @property
    def chars(self) -> int:
        """Characters of all messages, for an estimate of tokens; a content part without text counts as a picture."""
        return sum(_chars(message.content) for message in self.messages)


class LMReply(msgspec.Struct, frozen=True):
    """What one call returned.

    Attributes:
        usage: What this call alone used; its `total_calls` is 1.
        problem: Why there is no text, where the provider sent none.
        model: The model that served, where that is not the client's own.
    """

    text: str
    usage: Usage
    problem: str | None = None
    model: str | None = None


def with_text(reply: LMReply) -> LMReply:
    """Return a reply of a client of the user's; where its text is None, one with an empty text."""
    has_none = isinstance(reply, LMReply) and reply.text is None
    return msgspec.structs.replace(reply, text="") if has_none else reply


class Client(Protocol):
    """A way to call models. It may have further attributes, each of which may be missing or None:

    - `context_tokens`: how many tokens its model can read.
    - `max_concurrent`: how many calls it takes at the same time; further ones are queued before it.
    - `fingerprint`: text that tells on what its replies depend beside the request, without any secret. Only the replies
      of a client that has one are kept in a `Cache`.
    - `preflight()`: awaited before a run starts anything; it raises what every call would.
    - `is_priced`: False where what its calls cost will not be known.
    - `count_tokens(text)`: how many tokens a text has for its model, or None. It may take milliseconds: it is called in
      a thread.
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


class BaseClient:
    """A `Client` that has a value for each of the optional abilities: here those of one that has none of them.

    All clients of this package are of this class. A user's own need not be: `brought.adapted` wraps them.

    Attributes:
        why_unusable: The error of every call, where it is known before the first; None where calls may succeed.
        counts_tokens: Whether `count_tokens` may know more than an estimate does.
        answers_types: Whether an answer may be of a type that is asked for. False where it is text by rules.
    """

    model_name: str
    context_tokens: int | None = None
    max_concurrent: int | None = None
    fingerprint: str | None = None
    is_priced: bool | None = None
    why_unusable: ConfigurationError | None = None
    counts_tokens: bool = False
    answers_types: bool = True

    def complete(self, request: LMRequest) -> Coroutine[Any, Any, LMReply]:
        """Answer one request, see `Client`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Give back what the client holds: nothing."""

    async def preflight(self) -> None:
        """Raise what every call would raise."""

    def count_tokens(self, text: str) -> int | None:  # noqa: ARG002
        """Return how many tokens a text has for its model, where that is known."""
        return None

    def start_loading(self) -> None:
        """Begin, in the background, to load what the first call would wait for. Harmless when repeated."""

    async def loaded(self) -> None:
        """Wait until `is_priced` is known, as far as it can be."""


def estimate_tokens(chars: int, chars_per_token: float = CHARS_PER_TOKEN) -> float:
    """Estimate how many tokens a text of `chars` characters has, where the provider has not counted them."""
    return chars / chars_per_token


def _chars(content: str | list[Any]) -> int:
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return sum(len(text) if isinstance(text, str) else PICTURE_CHARS for text in texts)
