"""Answers of a type: asked for with a schema, validated here, and asked for again where they are not of it."""

import json
from collections.abc import Callable
from typing import Any

from sandbox_worker.repl.classes import class_name
from sandbox_worker.wire.prompts import MessagePart, Prompt, TextPart, are_messages

TYPED_ATTEMPTS = 3
"""How often each prompt is asked, at most."""
SHOWN_CHARS = 500
"""Characters of a wrong answer that the model is shown again, and of what is wrong with it."""


def typed_answers(
    name: str, prompts: list[Prompt], output_type: Any, ask: Callable[[list[Prompt]], list[str]]
) -> list[Any]:
    """Return one value for each prompt, or a text that starts with `Error:`.

    Args:
        name: Of the function that model code called.
        ask: Returns the answers to prompts, as texts. What failed validation is asked again, all in one call.

    Raises:
        TypeError, ValueError: The type is none.
    """
    schema, value_of = _schema_of(name, output_type)
    wanted = f"Answer with a JSON value of this schema, and nothing else: {schema}"
    answers: list[Any] = [None] * len(prompts)
    asked = {place: _with(prompt, wanted) for place, prompt in enumerate(prompts)}
    for _ in range(TYPED_ATTEMPTS):
        again: dict[int, Prompt] = {}
        for place, text in zip(asked, ask([*asked.values()]), strict=True):
            if text.startswith("Error: "):
                answers[place] = text
                continue
            try:
                answers[place] = value_of(_unfenced(text))
            except Exception as error:  # noqa: BLE001 - the schema may make its validator do anything
                problem = (str(error) or class_name(error))[:SHOWN_CHARS]
                answers[place] = f"Error: the answer is not of the output_type: {problem}"
                told = f"{wanted}\n\nYou answered: {text[:SHOWN_CHARS]}\nThat is wrong: {problem}"
                again[place] = _with(prompts[place], told)
        asked = again
        if not asked:
            break
    return answers


def _with(prompt: Prompt, text: str) -> Prompt:
    """The prompt with more text after it."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{text}"
    return [*prompt, MessagePart("user", text) if are_messages(prompt) else TextPart(text)]


def _schema_of(name: str, output_type: Any) -> tuple[str, Callable[[str], Any]]:
    """The schema as JSON, and what makes a value of a reply or raises a ValueError.

    All of it happens here and not at the orchestrator: a schema of model code's own may keep a validator busy for ever.
    """
    if hasattr(output_type, "model_json_schema") and hasattr(output_type, "model_validate_json"):
        return json.dumps(output_type.model_json_schema()), output_type.model_validate_json
    if not isinstance(output_type, dict):
        raise TypeError(f"{name}() argument 'output_type' must be a JSON schema (a dict) or a pydantic model")
    import jsonschema  # most REPLs never need it

    kind = jsonschema.validators.validator_for(output_type, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(output_type)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{name}() argument 'output_type' is no JSON schema: {error.message}") from None
    validator = kind(output_type)

    def value_of(text: str) -> Any:
        value = json.loads(text)
        for error in validator.iter_errors(value):
            raise ValueError(error.message)
        return value

    return json.dumps(output_type), value_of


def _unfenced(text: str) -> str:
    """JSON as models like to hand it over: in a fence of its own."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.partition("\n")[2].removesuffix("```").strip()
    return text
