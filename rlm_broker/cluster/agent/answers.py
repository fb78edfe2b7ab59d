"""Answers of a wanted type: the orchestrator, which has the type, judges them."""

from typing import Any, Self

from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.messages import Judge, Judged
from rlm_broker.errors import OutputInvalid


class RemoteType:
    """Type of the answer of one run, as a node knows it. It is an `AnswerType`.

    Attributes:
        schema: JSON Schema of the type, as text.
    """

    def __init__(self, schema: str, exchange: Exchange) -> None:
        self.schema = schema
        self._exchange = exchange

    def again(self) -> Self:
        """Return the same type: the orchestrator counts what the model was told."""
        return self

    async def judged(self, answer: str, max_retries: int) -> tuple[str | None, Any]:
        """Have the orchestrator judge an answer. It keeps the value, and its own limit of retries holds.

        Returns:
            A message for the model, or None if the answer is taken; and None in place of the value.

        Raises:
            OutputInvalid: The model was told often enough.
            LinkLost: The orchestrator cannot be asked any more.
        """
        del max_retries
        exchange = self._exchange
        verdict = await exchange.asked(Judge(exchange.run, exchange.number(), answer), Judged)
        if verdict.is_final:
            invalid = OutputInvalid("", answer)
            invalid.args = (verdict.problem or str(invalid),)
            raise invalid
        return verdict.problem, None
