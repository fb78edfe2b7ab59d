"""What providers say when a call fails: whether to try again, and the words without their secrets."""

import email.utils
import time
from collections.abc import Iterable, Mapping
from datetime import UTC

from rlm_broker.errors import FailureCause
from rlm_broker.redaction import redact, secrets_of_environment

_MAX_CHARS = 500
_LOOKED_AT_CHARS = 20_000
LONGEST_RETRY_AFTER_S = 3_600.0
"""Seconds that a provider may ask to be left alone. A larger number is no wish but a mistake, and counts as none given:
it would close the client to all runs for as long as each may take."""
_OF_THE_REQUEST = frozenset({400, 413, 422})
_TRANSIENT = frozenset({408, 409, 425, 429})


def cause_of(status: int) -> FailureCause:
    """What an HTTP status says of a failed call."""
    if status in _TRANSIENT or status >= 500:
        return "transient"
    return "request" if status in _OF_THE_REQUEST else "provider"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the provider wants to be left alone: `retry-after-ms`, or `retry-after` as a number or a date."""
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
    """Return `text` without secrets, on one line, not too long, and with what would steer a terminal written out.

    Args:
        secrets: Known ones, beside those of the environment.
    """
    text = redact(text[:_LOOKED_AT_CHARS], [*secrets_of_environment(), *secrets])
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(text.split()))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def no_text(text: str | None, finish_reason: str | None) -> str | None:
    """Why a reply has no text, if that is not what the model wanted."""
    if text or (text is not None and finish_reason in (None, "stop")):
        return None
    why = {
        "length": ": its tokens were used up before it said anything",
        "content_filter": ": the provider's content filter withheld it",
        "tool_calls": ": the model wants to call a tool of the provider's, and there is none",
    }
    return f"the provider's answer has no text{why.get(finish_reason or '', '')}"


def _seconds_until(date: str) -> float:
    try:
        when = email.utils.parsedate_to_datetime(date)
        return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return -1
