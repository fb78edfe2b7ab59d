"""Answers of a type: any that pydantic can validate, or that a JSON Schema describes."""

from typing import Any

import rlm_broker.prompts.messages as prompts
from rlm_broker.errors import OutputInvalid
from rlm_broker.json_schema import Unfit
from rlm_broker.wanted_type import WantedType
from sandbox_worker.wire.counting import MAX_VALUES, has_more_values_than


class OutputType:
    """What a run's answer has to be. For one run: it counts how often the model was told.

    Args:
        wanted: A pydantic model, or whatever else `pydantic.TypeAdapter` takes; or a JSON Schema, as a dict.

    Raises:
        ConfigurationError: pydantic cannot validate it, or no JSON can describe it.
    """

    def __init__(self, wanted: Any) -> None:
        self._retries = 0
        self._type = WantedType(wanted, "output_type", "the answer")
        self._schema = self._type.json_schema()

    def task(self, question: str | None) -> str:
        """The question, and what its answer has to be."""
        return prompts.typed_task(question, self._schema)

    def judge(self, answer: str, max_retries: int) -> tuple[str | None, Any]:
        """What to tell the model of an answer, or None and the value.

        Raises:
            OutputInvalid: It is wrong, and the model was told `max_retries` times.
        """
        text = _unfenced(answer)
        if has_more_values_than(MAX_VALUES, text.encode(errors="replace")):
            problem = f"the answer holds more than {MAX_VALUES:,} values: answer with fewer"
        else:
            try:
                return None, self._type.of_json(text)
            except Unfit as unfit:
                problem = str(unfit)
        try:
            return None, self._type.of(answer)  # text that is no JSON, where text is wanted
        except Unfit:
            pass
        if self._retries >= max_retries:
            raise OutputInvalid(problem, answer)
        self._retries += 1
        return prompts.wrong_type(answer, problem, self._schema), None


def _unfenced(answer: str) -> str:
    """JSON as models like to hand it over: in a fence of its own."""
    text = answer.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.partition("\n")[2].removesuffix("```").strip()
    return text
