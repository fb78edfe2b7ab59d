"""Answers of a type: any that pydantic can validate, or that a JSON Schema describes."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic

import rlm_broker.run.prompts as prompts
from rlm_broker.errors import ConfigurationError, OutputInvalid
from rlm_broker.run.json_schema import JsonSchema
from rlm_broker.validation import complaints
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
        if isinstance(wanted, Mapping):
            schema = JsonSchema(wanted, "output_type")
            self._schema = schema.text
            self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
                Annotated[Any, pydantic.AfterValidator(_fitting(schema))]
            )
            return
        try:
            self._adapter = pydantic.TypeAdapter(wanted)
            self._schema = json.dumps(self._adapter.json_schema(), ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - it is the user\'s: pydantic may call anything of it
            raise ConfigurationError(f"output_type {wanted!r} cannot be asked for as JSON: {error}") from None

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
                return None, self._adapter.validate_json(text)
            except (TypeError, ValueError) as error:
                problem = _problem(error)
        try:
            return None, self._adapter.validate_python(answer)  # text that is no JSON, where text is wanted
        except (TypeError, ValueError):
            pass
        if self._retries >= max_retries:
            raise OutputInvalid(problem, answer)
        self._retries += 1
        return prompts.wrong_type(answer, problem, self._schema), None


def _fitting(schema: JsonSchema) -> Callable[[Any], Any]:
    def fitting(value: Any) -> Any:
        schema.require(value, "the answer")
        return value

    return fitting


def _problem(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):  # of a validator of the user's own
        return f"{type(error).__name__}: {error}"
    return complaints(error, "the answer")


def _unfenced(answer: str) -> str:
    """JSON as models like to hand it over: in a fence of its own."""
    text = answer.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.partition("\n")[2].removesuffix("```").strip()
    return text
