"""Functions and values for code, without the way in which a function is called."""

from dataclasses import dataclass
from typing import Any

from sandbox_worker.wire.messages import Slot

MAX_ARGUMENT_CHARS = 4 << 20
"""Characters of the arguments of one call, as JSON; a call with more is refused."""
SHOWN_NAME_CHARS = 80
"""Characters of a name that an error shows. Model code may give a name of any length."""


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """The facts about a function that code may call.

    Attributes:
        signature: Its parameters and its result, as Python writes them.
        description: One paragraph for the model.
        timeout_s: Seconds of one call, in place of `tool_timeout_s` of the limits; None takes these.
    """

    signature: str
    description: str
    timeout_s: float | None = None


class ToolSet:
    """Functions that code may call, and values that it finds. A subclass says how a function is called.

    Attributes:
        functions: Name → facts about the function.
        values: Name → value.
        notes: Name of a value → its description.
        for_children: Functions and values of child runs.
    """

    functions: dict[str, ToolFacts]
    values: dict[str, Any]
    notes: dict[str, str]
    for_children: "ToolSet"

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return list(self.functions)

    def documentation(self) -> list[str]:
        """Return a line for each function and value, for a prompt."""
        lines = [f"- `{name}{facts.signature}`: {facts.description}" for name, facts in self.functions.items()]
        return lines + [f"- `{name}`: {self.notes[name]}" for name in self.values]

    def unknown(self, name: str) -> Slot:
        """Return the answer to a call of a tool that does not exist."""
        there_are = ", ".join(self.functions) or "none"
        return Slot(error=f"there is no tool {name[:SHOWN_NAME_CHARS]!r}; there are: {there_are}")

    def refusal(self, name: str, arguments: str) -> Slot | None:
        """Return the answer to a call that cannot be made: there is no such tool, or it is given too much."""
        if name not in self.functions:
            return self.unknown(name)
        if len(arguments) > MAX_ARGUMENT_CHARS:
            given = f"{len(arguments):,} characters, more than {MAX_ARGUMENT_CHARS:,}"
            return Slot(error=f"{name}() was given {given}: give less at a time")
        return None

    async def call(self, name: str, arguments: str, timeout_s: float) -> Slot:
        """Call a function with arguments that code gave, as an encoded dict of `args` and `kwargs`.

        Returns:
            Its result, encoded; or an error for code.
        """
        raise NotImplementedError
