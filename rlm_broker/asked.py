"""The context and the question, as callers give them."""

import warnings
from os import PathLike
from typing import Final

from rlm_broker.context.store import StoredContext, refuse_a_name, store
from rlm_broker.errors import ConfigurationError

ORDER = "the context comes first, then the question"
NOT_GIVEN: Final = object()
LONG_QUESTION_CHARS = 10_000
"""Characters from which on a question beside a shorter context that ends with "?" is taken for the context."""


def given_once(
    prompt: object, root_prompt: str | None, context: object, question: str | None
) -> tuple[object, str | None]:
    """Return the context and the question, each given under one of its two names.

    Raises:
        ConfigurationError: There is no context, or one of them was given under both names.
    """
    given = [each for each in (prompt, context) if each is not NOT_GIVEN]
    if len(given) != 1:
        raise ConfigurationError(
            "give the context once: it is prompt or context" if given else "there is no context: give it first"
        )
    if root_prompt is not None and question is not None:
        raise ConfigurationError("give the question once: it is root_prompt or question")
    return given[0], question if root_prompt is None else root_prompt


def require_question(question: object) -> None:
    """Raises: ConfigurationError."""
    if question is not None and not isinstance(question, str):
        order = f": {ORDER}" if isinstance(question, PathLike | dict | list) else ""
        raise ConfigurationError(f"the question is text or None, and not {type(question).__name__}{order}")
    if question is not None and not question.strip():
        raise ConfigurationError("the question is empty: say what you want to know")


def stored(prompt: object, question: str | None) -> StoredContext:
    """Store what the user hands in; in a thread, since it reads files. Refuse a name that stands for what it names."""
    is_long = question is not None and len(question) > LONG_QUESTION_CHARS
    if is_long and isinstance(prompt, str) and len(prompt) < LONG_QUESTION_CHARS and prompt.rstrip().endswith("?"):
        warnings.warn(
            f"the context is a question, and the question {len(question or ''):,} characters: {ORDER}", stacklevel=2
        )
    if question is not None:
        refuse_a_name(question, "the question", ORDER)
    return store(prompt)
