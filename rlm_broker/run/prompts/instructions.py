"""The user's instructions to models: a system prompt, a profile of ours, a prologue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.results import ChatMessage

Profile = Literal["both", "final", "answer", "compact"]
"""Variant of our own system prompt.

`final` tells a model to end with `FINAL`, `answer` with the `answer` dict, and `both` names both ways; every way works
in each of them. `compact` is a third as long, for small models. A model known to read less than 16,000 tokens
gets it in place of `both`.
"""


@dataclass(frozen=True, slots=True)
class Instructions:
    """The user's instructions to models.

    Example:
        ```python
        RLM("offline", instructions=Instructions(profile="compact", prologue="Answer in French."))
        ```

    Attributes:
        system: System prompt in place of our own: one text for every run of a tree, or a function from the depth to it.
        profile: Variant of our own system prompt, see `Profile`; the messages of each turn keep to it, too.
        prologue: Text before the first user message of the root.
        messages: Function over the messages of each turn, to prune or to annotate: it gets the depth of the run and the
            messages so far, and returns those to send in this turn. `Completion.messages` keeps all of them.
    """

    system: str | Callable[[int], str] | None = None
    profile: Profile = "both"
    prologue: str | None = None
    messages: Callable[[int, Sequence[ChatMessage]], Sequence[ChatMessage]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.system, str | None) and not callable(self.system):
            raise ConfigurationError(f"the system prompt must be text or a function, not {type(self.system).__name__}")
        require_kind("the prologue", self.prologue, str, type(None))
        if self.messages is not None and not callable(self.messages):
            raise ConfigurationError(f"messages must be a function, not {type(self.messages).__name__}")
        if self.profile not in get_args(Profile):
            known = ", ".join(get_args(Profile))
            raise ConfigurationError(f"the prompt profile must be one of {known}, not {self.profile!r}")
        if self.system is not None and self.profile != "both":
            raise ConfigurationError("give either a system prompt or a prompt profile, which is part of our own prompt")


def messages_to_send(instructions: Instructions, depth: int, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages to send in a turn of a run at `depth`: these, or those that the user's function returns.

    Raises:
        ConfigurationError: The function returned no messages.
    """
    if instructions.messages is None:
        return messages
    chosen = instructions.messages(depth, tuple(messages))
    if not isinstance(chosen, list | tuple) or not chosen or not all(isinstance(each, ChatMessage) for each in chosen):
        raise ConfigurationError("the function `messages` must return a list of ChatMessage, and at least one")
    return chosen
