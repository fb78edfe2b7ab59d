"""What pydantic found, in words for a model."""

import pydantic

MOST = 10
"""Told at a time: a long list may be wrong in each of its places."""


def complaints(error: pydantic.ValidationError, whole: str) -> str:
    """Each place and what is wrong with it; `whole` stands for the value itself."""
    found = error.errors()[:MOST]
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in found)
