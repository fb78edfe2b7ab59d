"""What the user wants models to be told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rlm_broker.errors import ConfigurationError, require_kind

Profile = Literal["both", "final", "answer", "compact"]
"""Of our own system prompt. `final` tells a model to end with `FINAL`, `answer` with the `answer` dict, and `both` of
both; all of them work. `compact` is a third as long, for small models; a model that is known to read less than 16,000
tokens is told that instead of `both`."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the user wants models to be told.

    Attributes:
        system: In place of our own system prompt: for every run of a tree, or by depth.
        profile: Of our own system prompt, see `Profile`; the messages of each turn keep to it, too.
        prologue: Before the first user message of the root.
    """

    system: str | Callable[[int], str] | None = None
    profile: Profile = "both"
    prologue: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.system, str | None) and not callable(self.system):
            raise ConfigurationError(f"a system prompt is text or a function, not {type(self.system).__name__}")
        require_kind("the prologue", self.prologue, str, type(None))
        if self.profile not in get_args(Profile):
            known = ", ".join(get_args(Profile))
            raise ConfigurationError(f"the prompt profile must be one of {known}, not {self.profile!r}")
        if self.system is not None and self.profile != "both":
            raise ConfigurationError("give either a system prompt or a prompt profile, which is part of our own prompt")
