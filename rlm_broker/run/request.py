"""The request for one run: its context, its question and its settings."""

import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from os import PathLike
from typing import Any, Final

from msgspec import Struct

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.models.model import Given
from rlm_broker.context.store import refuse_a_name, store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import Emit
from rlm_broker.limits import Limits, ReplLimits, RunLimits, with_set
from rlm_broker.run.earlier import Earlier
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.prompts.system import prompts_digest
from rlm_broker.run.tree import QueryHandlerFactory
from rlm_broker.sandbox.tools import Tools

ORDER = "the context comes first, then the question"


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Final[Any] = _NotGiven()
"""Default of a context argument, since None may be a context."""
LONG_QUESTION_CHARS = 10_000
"""Characters of a question from which a shorter context with "?" at its end is a warning: the caller has most likely
swapped the two."""
PROMPT_CHARS = 1 << 16
"""Maximum characters of a context in `Completion.prompt`; for a longer one it is None."""


MakesCompleting = Callable[[Completing], Completing]
"""Makes, from the handler, the `Completing` that takes its place for one attempt of a run."""


class RunRequest(Struct, frozen=True, kw_only=True):
    """One run: its context, question and settings. An `Engine` starts it.

    Attributes:
        context: Context in any form that `store` takes; a `StoredContext` stays its owner's.
        question: Question; None: the task is in the context.
        output_type: Type of the answer; None takes any text.
        tools: Functions and values for code.
        instructions: Instructions to the models.
        limits: Limits of the run and of everything below it.
        model, sub_model: Models of this run alone; None takes the engine's.
        is_auto: Whether a child gets a REPL only if it needs one.
        query_handler: Replaces the recursion; None keeps it.
        receivers: Called with each event.
        tells_text: Whether pieces of replies become `CallText` events.
        place: Entered before the run begins, and left at its end; None begins at once.
        repl: A REPL for several runs; None opens one for the run, or takes the engine's.
        completing: Replaces the handler for the calls of one attempt; None keeps it.
        warns: Whether a warning is logged if files are left out of the context.
        earlier: Turns of another run from which it goes on; None for a run of its own.
    """

    context: object = NOT_GIVEN
    question: str | None = None
    output_type: OutputType | None = None
    tools: Tools
    instructions: Instructions
    limits: Limits
    model: Given | None = None
    sub_model: Given | None = None
    is_auto: bool = False
    query_handler: QueryHandlerFactory | None = None
    receivers: tuple[Emit, ...] = ()
    tells_text: bool = False
    place: AbstractAsyncContextManager[Any] | None = None
    repl: PersistentRepl | None = None
    completing: MakesCompleting | None = None
    warns: bool = False
    earlier: Earlier | None = None

    def __post_init__(self) -> None:
        require_question(self.question)

    @property
    def prompts_digest(self) -> str:
        """Digest of what models are told. It changes with the words of a release, not with the settings."""
        return prompts_digest(self.instructions.profile)

    @property
    def prompt(self) -> str | None:
        """Context for `Completion.prompt`: a short text, else None, so that no large one stays in memory."""
        return self.context if isinstance(self.context, str) and len(self.context) <= PROMPT_CHARS else None

    @property
    def is_small(self) -> bool:
        """Whether storing the context takes microseconds: a short text. An absolute path may be on a file system that
        stalls."""
        return self.prompt is not None and not any(
            (text or "").startswith(("/", "~")) for text in (self.prompt, self.question)
        )


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
            "give the context once, as prompt or as context" if given else "there is no context: give it first"
        )
    if root_prompt is not None and question is not None:
        raise ConfigurationError("give the question once, as root_prompt or as question")
    return given[0], question if root_prompt is None else root_prompt


def require_question(question: object) -> None:
    """Raise `ConfigurationError` for a question that is neither text nor None, or has only white space."""
    if question is not None and not isinstance(question, str):
        order = f": {ORDER}" if isinstance(question, PathLike | dict | list) else ""
        raise ConfigurationError(f"the question must be text or None, not {type(question).__name__}{order}")
    if question is not None and not question.strip():
        raise ConfigurationError("the question is empty: say what you want to know")


def stored(prompt: object, question: str | None) -> StoredContext:
    """Store the user's context, and refuse the name of a file as the question: most likely its content is meant."""
    is_long = question is not None and len(question) > LONG_QUESTION_CHARS
    if is_long and isinstance(prompt, str) and len(prompt) < LONG_QUESTION_CHARS and prompt.rstrip().endswith("?"):
        warnings.warn(
            f"the context is a question, and the question {len(question or ''):,} characters: {ORDER}", stacklevel=2
        )
    if question is not None:
        refuse_a_name(question, "the question", ORDER)
    return store(prompt)


def no_limits(given: object) -> ConfigurationError:
    """Return the error for an argument `limits` of another class. Of a dict it says how it is written."""
    written = f": write limits=Limits({', '.join(f'{name}=...' for name in given)})" if isinstance(given, dict) else ""
    return ConfigurationError(f"limits must be a Limits, not {type(given).__name__}{written}")


def limits_of_a_run(
    base: Limits, limits: RunLimits | ReplLimits | None, timeout_s: float | None, *, keeps_repl: bool
) -> Limits:
    """Return the limits of one run.

    Args:
        base: Limits of the `RLM`.
        limits: Set fields replace `base`'s.
        timeout_s: Seconds of the run; None takes `run_timeout_s` of `limits` or `base`.
        keeps_repl: Whether the REPL serves several runs, so that a single run cannot change its limits.

    Raises:
        ConfigurationError: The time is given twice, or a limit cannot be used.
    """
    if not isinstance(limits, RunLimits | ReplLimits | None):
        raise no_limits(limits)
    require_kind("timeout_s", timeout_s, int, float, type(None))
    fields = set() if limits is None else limits.given.keys()
    if keeps_repl and (of_repl := sorted(fields & ReplLimits.fields.keys())):
        raise ConfigurationError(f"a persistent RLM has one REPL: give {', '.join(of_repl)} to RLM, for all runs")
    if timeout_s is not None and "run_timeout_s" in fields:
        raise ConfigurationError("give the run's time once, as timeout_s or as run_timeout_s of limits")
    changed = base if limits is None else with_set(base, limits)
    return changed if timeout_s is None else with_set(changed, RunLimits(run_timeout_s=timeout_s))
