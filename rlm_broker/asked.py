"""What one run is to do, as callers give it: the context, the question, and what holds for this run alone."""

import warnings
from dataclasses import dataclass
from os import PathLike
from typing import Final

from rlm_broker.callback import Callback
from rlm_broker.context.store import refuse_a_name, store
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.limits import Limits, ReplLimits, RunLimits, with_set
from rlm_broker.models.model import Given
from rlm_broker.prompts.instructions import Instructions
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.tools import Tools

ORDER = "the context comes first, then the question"
NOT_GIVEN: Final = object()
LONG_QUESTION_CHARS = 10_000
"""Characters from which on a question beside a shorter context that ends with "?" is taken for the context."""
PROMPT_CHARS = 1 << 16
"""Characters of the longest context that a `Completion` has as its `prompt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one run is to do.

    Attributes:
        on_event: Told of this run, beside what is told of all.
        tells_text: Whether replies are followed as they come.
    """

    context: object
    question: str | None
    model: Given | None = None
    sub_model: Given | None = None
    instructions: Instructions
    limits: Limits
    output_type: OutputType | None
    tools: Tools
    on_event: Callback | None = None
    tells_text: bool = False

    @property
    def prompt(self) -> str | None:
        """What a `Completion` tells of the context: a short text itself. It keeps no large one in memory."""
        return self.context if isinstance(self.context, str) and len(self.context) <= PROMPT_CHARS else None


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


def limits_of_a_run(
    base: Limits, limits: RunLimits | ReplLimits | None, timeout_s: float | None, *, keeps_repl: bool
) -> Limits:
    """Return the limits of one run.

    Args:
        base: What holds where nothing is given.
        limits: What is set of them holds.
        timeout_s: The run's time in seconds; None is that of `limits`.
        keeps_repl: Whether the REPL is one for several runs, so that its bounds are none of this run's.

    Raises:
        ConfigurationError: The time is given twice, or a limit cannot be used.
    """
    if not isinstance(limits, RunLimits | ReplLimits | None):
        raise ConfigurationError(f"limits is a Limits, and not {type(limits).__name__}")
    require_kind("timeout_s", timeout_s, int, float, type(None))
    fields = set() if limits is None else limits.model_fields_set
    if keeps_repl and (of_repl := sorted(fields & ReplLimits.model_fields.keys())):
        raise ConfigurationError(f"a persistent RLM has one REPL: give {', '.join(of_repl)} to RLM, for all runs")
    if timeout_s is not None and "run_timeout_s" in fields:
        raise ConfigurationError("give the run's time once: it is timeout_s or run_timeout_s of limits")
    changed = base if limits is None else with_set(base, limits)
    return changed if timeout_s is None else with_set(changed, RunLimits(run_timeout_s=timeout_s))
