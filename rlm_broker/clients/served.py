"""A server's own list of its models, as `GET /models` answers."""

from typing import Any

import msgspec


class Served(msgspec.Struct):
    """One model of the list. Other fields are ignored.

    Attributes:
        id: Its name at the server.
        max_model_len: Size of its context window in tokens, where the server says so; not checked.
    """

    id: str
    max_model_len: Any = None


class _Listed(msgspec.Struct):
    data: list[Served] = []


def served(body: bytes) -> list[Served]:
    """Return the models in an answer; none if it is not a list of models: the first call shows whether it works."""
    try:
        return msgspec.json.decode(body, type=_Listed).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
