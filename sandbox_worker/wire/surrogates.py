"""Lone surrogates: half characters that a `str` may hold, and neither UTF-8 nor the JSON of other programs."""

import re

_LONE = re.compile("[\ud800-\udfff]")


def written_out(json_text: str) -> str:
    """Return JSON with its lone surrogates as Python source has them: `\\\\ud800`, six characters that can be read."""
    return _LONE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json_text)
