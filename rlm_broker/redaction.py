"""Keys and passwords in text that is written down."""

import re

SECRET = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|Bearer [A-Za-z0-9._-]{16,}|(?i:api[_-]?key|password)\s*[=:]\s*[A-Za-z0-9+/._-]{8,}"
)
"""What looks like a key or a password."""
SLICE_CHARS = 1 << 16
"""Characters searched in one call, which takes 3 ms. The search keeps the interpreter's lock: one call for 16 million
characters would stop all other threads, and so the event loop, for 0.7 s."""
LONGEST_START_CHARS = 1 << 12
"""Characters beyond a slice in which a secret that began in the slice must be recognisable."""


def redact(text: str) -> str:
    """Replace what looks like a secret by `[redacted]`."""
    pieces: list[str] = []
    done = 0
    for start in range(0, len(text), SLICE_CHARS):
        end = start + SLICE_CHARS
        for found in SECRET.finditer(text, max(start, done), min(len(text), end + LONGEST_START_CHARS)):
            if found.start() >= end:
                break
            if found.start() < done:
                continue
            whole = SECRET.match(text, found.start())  # as long as it is, also beyond the slice
            assert whole is not None
            pieces += (text[done : found.start()], "[redacted]")
            done = whole.end()
    return "".join([*pieces, text[done:]]) if pieces else text
