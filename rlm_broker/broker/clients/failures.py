"""Failed calls of providers: whether to retry, how long to wait, and their words without secrets."""

import time
from collections.abc import Iterable, Mapping
from datetime import UTC

from rlm_broker.errors import FailureCause
from rlm_broker.events.redaction import redact, secrets_of_environment
from rlm_broker.values.text import clip, printable

_MAX_CHARS = 500
"""Maximum characters of a provider's words in an error; longer text is cut."""
_LOOKED_AT_CHARS = 20_000
"""Maximum characters of a provider's words that are read; redaction of a megabyte would hold the event loop."""
LONGEST_RETRY_AFTER_S = 3_600.0
"""Maximum seconds that a provider may ask to wait. A larger number is taken for a mistake and counts as none.

It would close the client to all runs for as long as each may take.
"""
_OF_THE_REQUEST = frozenset({400, 413, 422})
_TRANSIENT = frozenset({408, 409, 425, 429})
_LASTING = frozenset({401, 403, 404})


def cause_of(status: int) -> FailureCause:
    """Return the cause of a failed call by its HTTP status."""
    if status in _TRANSIENT or status >= 500:
        return "transient"
    return "request" if status in _OF_THE_REQUEST else "provider"


def is_lasting(status: object) -> bool:
    """Return whether every further call would meet the same HTTP status: of a wrong key, or of no such model."""
    return status in _LASTING


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the provider asks to wait, or None.

    It reads the header `retry-after-ms`, then `retry-after` as seconds or as an HTTP date.
    """
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = headers.get(name)
        if not text:
            continue
        try:
            seconds = float(text) * scale
        except ValueError:
            seconds = _seconds_until(text)
        if 0 <= seconds <= LONGEST_RETRY_AFTER_S:
            return seconds
    return None


def one_line(text: str, secrets: Iterable[str] = ()) -> str:
    """Return text as one line of at most 500 characters, without secrets and with control characters escaped.

    Args:
        text: Words of a provider.
        secrets: Known secrets, in addition to those of the environment.
    """
    text = redact(text[:_LOOKED_AT_CHARS], [*secrets_of_environment(), *secrets])
    return clip(printable(" ".join(text.split())), _MAX_CHARS)


def words_of(error: Exception) -> str:
    """Return the words of an error of aiohttp: one of a broken connection, or of a malformed answer."""
    message = getattr(error, "message", str(error))
    if not isinstance(message, str):  # the object of a status line, as far as that came
        message = "the server closed it in the middle of the head of its answer"
    # aiohttp puts a mark below the wrong byte, on a line of its own.
    return message.rstrip("\n ^") or type(error).__name__


def no_text(text: str | None, finish_reason: str | None) -> str | None:
    """Return the reason why a reply has no text, or None if it has text or the model meant to send none."""
    if text or (text is not None and finish_reason in (None, "stop")):
        return None
    why = {
        "length": ": its output tokens were used up before any text came",
        "content_filter": ": the provider's content filter withheld it",
        "tool_calls": ": the model asked for a tool of the provider, and the request names none",
    }
    return f"the provider's answer has no text{why.get(finish_reason or '', '')}"


def _seconds_until(date: str) -> float:
    import email.utils  # few answers say when to try again

    try:
        when = email.utils.parsedate_to_datetime(date)
        return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return -1
