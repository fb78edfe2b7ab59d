"""The object `rlm` of a request: what OpenAI's interface has no words for. Clients send it as `extra_body`."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from rlm_broker.limits import RunLimits


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
