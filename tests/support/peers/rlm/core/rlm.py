"""The loop, as far as it makes an environment."""

from typing import Any

from rlm.environments import get_environment


def environment_of(kind: str, given: dict[str, Any]) -> Any:
    """Make an environment as a completion does: by the name in this module."""
    return get_environment(kind, given)
