"""Answers of a type: of any that pydantic can validate, or that a JSON Schema describes."""

from typing import Any

import rlm_broker.run.prompts.messages as prompts
from rlm_broker.concurrency.threads import aside
from rlm_broker.errors import OutputInvalid
from rlm_broker.values.validation import Unfit
from sandbox_worker.wire.counts import MAX_VALUES, has_more_values_than
from sandbox_worker.wire.text_json import unfenced


class OutputType:
    """Type that the answers of runs must have.

    Args:
        wanted: A pydantic model, or any other type that `pydantic.TypeAdapter` takes; or a JSON Schema, as a dict.

    Attributes:
        schema: JSON Schema of the type, as text.

    Raises:
        ConfigurationError: pydantic cannot validate the type, or no JSON Schema can describe it.
    """

    def __init__(self, wanted: Any) -> None:
        from rlm_broker.values.answer_types import WantedType

        self._type = WantedType(wanted, "output_type", "the answer")
        self.schema = self._type.json_schema()

    async def judged(self, answer: str, retries_left: int) -> tuple[str | None, Any]:
        """Judge an answer as `judge` does, in a thread if its schema is not trusted.

        Raises:
            OutputInvalid: As for `judge`.
        """
        if (schema := self._type.schema) is not None and schema.is_bounded:
            return await aside(lambda: self.judge(answer, retries_left), schema.whose)
        return self.judge(answer, retries_left)

    def judge(self, answer: str, retries_left: int) -> tuple[str | None, Any]:
        """Return None and the value of an answer; or a message for the model that says what is wrong, and None.

        Raises:
            OutputInvalid: The answer is wrong, and the model may not be corrected any more.
        """
        text = unfenced(answer)
        if has_more_values_than(MAX_VALUES, text.encode(errors="replace")):
            problem = f"the answer holds more than {MAX_VALUES:,} values: answer with fewer"
        else:
            try:
                return None, self._type.of_json(text)
            except Unfit as unfit:
                problem = str(unfit)
        try:
            return None, self._type.of(answer)  # if text is wanted, the answer need not be a JSON string
        except Unfit:
            pass
        if not retries_left:
            raise OutputInvalid(problem, answer)
        return prompts.wrong_type(answer, problem, self.schema), None
