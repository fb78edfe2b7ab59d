"""The object `rlm` of a request, for what OpenAI's interface has no words; and bounds on the items of a request.

Clients send the object as `extra_body`. All clients wait while the event loop reads messages, parts and files, so their
number is bounded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from rlm_broker.limits import RunLimits
from rlm_broker.serve.errors import ApiError

Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that ask for what a run cannot do: the values that ask for nothing, and why others are refused."""


def require_neutral(given: Mapping[str, Any], known: Neutral) -> None:
    """Refuse fields that ask for what a run cannot do, and fields that the server does not know.

    Raises:
        ApiError: 400, with the field as `param`.
    """
    for name, value in given.items():
        if name not in known:
            raise ApiError(400, f"there is no field {name[:60]!r}: leave it out", param=name[:60])
        neutral, why = known[name]
        if value is not None and not any(_is_same(value, each) for each in neutral):
            raise ApiError(400, f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def _is_same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class RlmOptions(BaseModel):
    """Options of one request. Limits may be tighter than those of the server, and never wider.

    Attributes:
        question: Question. All texts and files of the last message are then the context.
        context: Context in place of texts and files: a text, or a list or dict of plain values.
        run_timeout_s: Seconds of the run, with its waits for the client's tools.
        max_budget_usd: US dollars of the run and all below it.
        max_tokens: Tokens of the run and all below it, input and output.
        max_llm_calls: Calls of models of the run and all below it.
        max_iterations: Turns of the run.
        max_depth: Levels of runs that have a REPL.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    question: str | None = None
    context: Any = None
    run_timeout_s: PositiveFloat | None = None
    max_budget_usd: PositiveFloat | None = None
    max_tokens: PositiveInt | None = None
    max_llm_calls: PositiveInt | None = None
    max_iterations: PositiveInt | None = None
    max_depth: Annotated[int, Field(ge=1)] | None = None

    def limits(self, **more: Any) -> RunLimits | None:
        """Return the limits that the request sets, or None if it sets none.

        Args:
            more: Further limits; None is not set.
        """
        said = self.model_dump(exclude={"question", "context"}) | more
        given = {name: value for name, value in said.items() if value is not None}
        return RunLimits(**given) if given else None


MOST_ITEMS: Final = 5_000
"""Messages or items of one request, and parts of all of them; also items of a whole conversation that is kept."""
MOST_FILES: Final = 1_000
"""Files in the messages of one request."""


def _counted(items: Any) -> Any:
    """Refuse a list with too many messages, parts or files, before each of them is looked at."""
    if not isinstance(items, list):
        return items
    parts = files = 0
    if len(items) > MOST_ITEMS:
        raise _too_many(f"{MOST_ITEMS:,} messages or items: leave out the oldest")
    for item in items:
        for content in (item.get("content"), item.get("output")) if isinstance(item, Mapping) else ():
            if isinstance(content, list):
                parts += len(content)
                if parts > MOST_ITEMS:
                    raise _too_many(f"{MOST_ITEMS:,} parts: join texts, or send a file")
                files += sum(isinstance(part, Mapping) and part.get("type") in _FILES for part in content)
    if files > MOST_FILES:
        raise _too_many(f"{MOST_FILES:,} files: send an archive of them")
    return items


def _too_many(what: str) -> PydanticCustomError:
    return PydanticCustomError("too_many", "there are more than {what}", {"what": what})


_FILES: Final = ("file", "input_file")
COUNTED: Final = BeforeValidator(_counted)
"""Marks a field whose messages are counted."""
