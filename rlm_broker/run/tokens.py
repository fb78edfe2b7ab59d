"""The number of tokens that a text has for a model: counted if its client can, and by samples for a long text."""

from typing import Final

from rlm_broker.broker.clients.base import CHARS_PER_TOKEN, BaseClient, LMRequest, estimate_tokens
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ModelFailed
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN

SAMPLE_CHARS: Final = 10_000
"""Characters of each of the three samples of a long text: its beginning, its middle and its end."""
WIDE_FROM: Final = "\u2e80"
"""First character of the scripts of East Asia, in which each character takes about one token."""
SMALL_CHARS: Final = 4_000
"""Longest request, in characters, that is not counted: every model reads as much."""
CERTAINLY_TOO_LONG: Final = 8
"""Characters for each token of a window from which a request is refused without being counted."""


async def require_fit(client: BaseClient, request: LMRequest, *, is_exact: bool = True) -> None:
    """Refuse a request that is too long for its model.

    Args:
        is_exact: Whether the client may count, if it can.

    Raises:
        ModelFailed: The request is longer than the client's window; the message has the numbers.
    """
    window = client.context_tokens
    if window is None or request.chars <= window:  # no tokenizer makes more tokens than there are characters
        return
    texts = [str(message.content) for message in request.messages if isinstance(message.content, str)]
    tokens = request.chars / CHARS_PER_TOKEN
    if request.chars < CERTAINLY_TOO_LONG * window and client.counts_tokens and is_exact:
        tokens = sum([await count_tokens(client, text) for text in texts])
    if tokens > window:
        raise ModelFailed(
            f"the prompt is too long: {request.chars:,} characters, about {tokens:,.0f} tokens, and "
            f"{client.model_name} reads {window:,}: ask about a smaller part",
            "request",
        )


async def count_tokens(client: BaseClient, text: str, *, is_exact: bool = True) -> float:
    """Return how many tokens a text has.

    Args:
        is_exact: Whether the client counts, if it can. Otherwise the number is an estimate.
    """
    if not is_exact:
        return estimated(text)
    if len(text) <= 3 * SAMPLE_CHARS:
        return await _counted(client, text)
    sample = _sample(text)
    return await _counted(client, sample) * len(text) / len(sample)


def estimated(text: str) -> float:
    """Return an estimate of how many tokens a text has, rather too high. A long text is estimated by three samples."""
    if len(text) > 3 * SAMPLE_CHARS:
        sample = _sample(text)
        return estimated(sample) * len(text) / len(sample)
    wide = 0 if text.isascii() else sum(character >= WIDE_FROM for character in text)
    return wide + estimate_tokens(len(text) - wide, CAUTIOUS_CHARS_PER_TOKEN)


def _sample(text: str) -> str:
    middle = len(text) // 2
    return text[:SAMPLE_CHARS] + text[middle : middle + SAMPLE_CHARS] + text[-SAMPLE_CHARS:]


async def _counted(client: BaseClient, text: str) -> float:
    own = await in_thread(lambda _: client.count_tokens(text)) if client.counts_tokens else None
    return estimated(text) if own is None else own
