"""The interface of all clients: one async call that returns the model's text and the usage of that call."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, Self

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage

PICTURE_CHARS = 6_000
"""Characters of a content part without text: about 2,000 tokens, as most providers count a picture."""
CHARS_PER_TOKEN = 4.0
"""Average characters per token of text in Latin script."""


call_headers: ContextVar[Mapping[str, str]] = ContextVar("rlm_broker_call_headers", default={})  # noqa: B039 - not changed
"""Headers for the request of the present call; empty unless tracing is on.

A tracing receiver of events sets them at `CallStarted`, and takes them back at `CallEnded`. Both events come in the
call's own task, and its further tasks inherit them. So calls at the same time have each their own.
"""


class CallId(msgspec.Struct, frozen=True):
    """Place of a call in its tree.

    Example:
        ```python
        client = ScriptedClient(lambda request: f"call {request.id.n} of run {request.id.run}")
        RLM(client).completion("text", "What is it?")
        ```

    Attributes:
        run: Name of the run, for example "1" for the root.
        block: The run's last block that has begun before the call; 0 before the first block.
        n: Number of the call within the block.
    """

    run: str
    block: int
    n: int

    def __str__(self) -> str:
        return f"run {self.run}, block {self.block}, call {self.n}"


SAMPLE_STEP = 1 << 20
"""Distance in `LMRequest.sample` of two samples of an item, or of two branches of a run."""


class LMRequest(msgspec.Struct, frozen=True):
    """One language model call.

    Example:
        ```python
        request = LMRequest((ChatMessage("user", "Is Rome a city?"),), temperature=0)
        print((await ScriptedClient(["Yes"]).complete(request)).text)  # Yes
        ```

    Attributes:
        messages: Conversation, in order; at least one message.
        model: Requested name; None means the client's own model.
        max_completion_tokens: Maximum output tokens; None leaves the number to the provider.
        depth: 0 for a turn of the root run's loop, 1 and more for queries of REPLs.
        question: Question of the run, outside of the prompt, for clients that retrieve instead of reasoning. Language
            models ignore it.
        is_loop: Whether the call is a turn of a run's loop, so that its reply may hold code, or a plain completion.
        sample: Number from 0 of this reply among several to the same prompt.
        on_text: Called with each piece of the reply as it arrives, by streaming clients. It must not block. With a
            retry, the pieces begin again.
        id: Place of the call in its run, for recordings.
        has_own_prompt: Whether the system prompt is this package's. Its words depend on the machine and the release.
        temperature: Sampling temperature in place of the client's option; None keeps the option. Functions and objects
            of another runtime ignore it.
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

    def in_sample(self, number: int) -> Self:
        """Return the request of a sample of its run, from 0: a cache answers each sample anew.

        Example:
            ```python
            LMRequest((ChatMessage("user", "Say a word."),)).in_sample(1).sample  # 1048576
            ```
        """
        return msgspec.structs.replace(self, sample=self.sample + number * SAMPLE_STEP)

    @property
    def chars(self) -> int:
        """Characters of all messages, to estimate tokens. A content part without text counts as `PICTURE_CHARS`."""
        chars = 0
        for message in self.messages:  # asked several times for each call: one loop, and no call for a plain text
            content = message.content
            chars += len(content) if isinstance(content, str) else _chars(content)
        return chars


IMPORTING: set[str] = set()
"""Libraries that clients are importing on threads of their own. A call that needs one waits for it."""


class LMReply(msgspec.Struct, frozen=True):
    """Outcome of one call.

    Example:
        ```python
        LMReply("Paris", Usage(total_calls=1, total_input_tokens=12, total_output_tokens=1))
        ```

    Attributes:
        text: Reply; empty if there is none.
        usage: Usage of this call alone, with `total_calls` 1.
        problem: Reason for an empty text, if the provider sent none.
        model: Name of the serving model, if it is not the client's own.
        extra: Values for a trainer, as JSON under the server's names: `token_ids`, `prompt_token_ids`, `logprobs`, and
            `finish_reason` beside them, or if it is not "stop". None if the server gave none of them.
    """

    text: str
    usage: Usage
    problem: str | None = None
    model: str | None = None
    extra: Mapping[str, Any] | None = None


def with_finish_reason(extra: dict[str, Any], finish_reason: Any) -> dict[str, Any] | None:
    """Add the reason of a reply's end to what the server gave beside its text. None if there is nothing to tell."""
    if isinstance(finish_reason, str) and (extra or finish_reason != "stop"):
        extra["finish_reason"] = finish_reason
    return extra or None


def with_text(reply: LMReply) -> LMReply:
    """Return the reply of a user's client, with an empty text in place of None."""
    has_none = isinstance(reply, LMReply) and reply.text is None
    return msgspec.structs.replace(reply, text="") if has_none else reply


class Client(Protocol):
    """A way to call one model, as users implement it.

    Further attributes are optional, and each may be missing or None:

    - `context_tokens`: size of the model's context window in tokens.
    - `max_concurrent`: calls at the same time. Further calls wait in a queue.
    - `fingerprint`: everything in the client, except secrets, that changes its replies. A `Cache` keeps no replies of a
      client without one.
    - `preflight()`: awaited before a run starts. It raises the error of every call, if there is one.
    - `is_priced`: False if the cost of its calls will not be known.
    - `count_tokens(text)`: tokens of a text for its model, or None. It runs in a thread, so it may take milliseconds.

    Example:
        ```python
        class Upper:
            model_name = "upper"

            async def complete(self, request: LMRequest) -> LMReply:
                return LMReply(str(request.messages[-1].content).upper(), Usage(total_calls=1))

            async def aclose(self) -> None:
                pass
        ```
    """

    @property
    def model_name(self) -> str:
        """Name under which it is registered and reported."""
        ...

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request. Cancelling it must end the call at the provider.

        Example:
            ```python
            reply = await ScriptedClient(["Paris"]).complete(request)
            print(reply.text, reply.usage.total_calls)  # Paris 1
            ```

        Args:
            request: The call.

        Returns:
            The reply, with its usage.

        Raises:
            ModelFailed: The call failed; the message is one sentence with the reason.
        """
        ...

    async def aclose(self) -> None:
        """Release connections, threads and other resources. A second call has no effect."""
        ...


class BaseClient:
    """A `Client` with a default for each optional ability.

    All clients of this package are of this class. Clients of users need not be: `adapters.adapted` wraps them.

    Example:
        ```python
        class Upper(BaseClient):
            model_name = "upper"

            async def complete(self, request: LMRequest) -> LMReply:
                return LMReply(str(request.messages[-1].content).upper(), Usage(total_calls=1))
        ```

    Attributes:
        model_name: Name for registration and reports.
        context_tokens: Size of the model's context window in tokens; None if it is not known.
        max_concurrent: Maximum calls at the same time; further ones wait. None leaves it to the handler.
        fingerprint: Text on which replies depend besides the request; None keeps its replies out of a `Cache`.
        is_priced: Whether the cost of its calls will be known; None if that is not known yet.
        why_unusable: Error of every call, if it is known before the first one; None if calls may succeed.
        counts_tokens: Whether `count_tokens` may be more exact than an estimate.
        answers_types: Whether it can give an answer of a wanted type. False if it answers in text by rules.
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
        """Answer one request; see `Client.complete`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Release resources. This one has none."""

    async def preflight(self) -> None:
        """Raise the error that every call would raise, if there is one."""

    def count_tokens(self, text: str) -> int | None:  # noqa: ARG002
        """Return the tokens of a text for the client's model, or None if that is not known."""
        return None

    def start_loading(self) -> None:
        """Start loading in the background, so that the first call does not wait. A second call has no effect."""

    async def loaded(self) -> None:
        """Wait until `is_priced` and `context_tokens` are as exact as they will be."""


def estimate_tokens(chars: int, chars_per_token: float = CHARS_PER_TOKEN) -> float:
    """Estimate the tokens of a text of `chars` characters, for providers that do not count them."""
    return chars / chars_per_token


def _chars(content: Iterable[Any]) -> int:
    texts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return sum(len(text) if isinstance(text, str) else PICTURE_CHARS for text in texts)
