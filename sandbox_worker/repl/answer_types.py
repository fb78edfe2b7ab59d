"""Answers of a type: the model is asked with a schema, the answer is validated here, and a wrong one is asked again."""

import json
from collections.abc import Callable
from typing import Any

from sandbox_worker.repl.objects import class_name
from sandbox_worker.wire.prompts import MessagePart, Prompt, TextPart, are_messages
from sandbox_worker.wire.text_json import unfenced

TYPED_ATTEMPTS = 3
"""Maximum attempts for each prompt; after the last one the answer is an error text."""
SHOWN_CHARS = 500
"""Maximum characters of a wrong answer, and of its fault, that the next attempt shows the model; the rest is cut."""


def typed_answers(
    name: str, prompts: list[Prompt], output_type: Any, ask: Callable[[list[Prompt]], list[str]]
) -> list[Any]:
    """Return one value for each prompt, or a text that starts with `Error:`.

    Args:
        name: Name of the function that model code called.
        prompts: Prompts without the schema.
        output_type: JSON schema (a dict), or pydantic model.
        ask: Function that returns the answers to prompts, as texts. Prompts whose answers failed are asked again, all
            in one call.

    Raises:
        TypeError: `output_type` is neither a dict nor a pydantic model.
        ValueError: `output_type` is a dict that is not a JSON schema.
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
                answers[place] = value_of(unfenced(text))
            except Exception as error:  # noqa: BLE001 - a validator of model code may raise any class
                problem = (str(error) or class_name(error))[:SHOWN_CHARS]
                answers[place] = f"Error: the answer is not of the output_type: {problem}"
                told = f"{wanted}\n\nYou answered: {text[:SHOWN_CHARS]}\nThat is wrong: {problem}"
                again[place] = _with(prompts[place], told)
        asked = again
        if not asked:
            break
    return answers


def _with(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt with more text after it."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{text}"
    return [*prompt, MessagePart("user", text) if are_messages(prompt) else TextPart(text)]


def _schema_of(name: str, output_type: Any) -> tuple[str, Callable[[str], Any]]:
    """Return the schema as JSON, and a function that makes a value of a reply or raises an exception.

    Validation happens in the REPL, not in the orchestrator: a schema of model code may keep a validator busy without
    end, as with a regular expression.
    """
    if hasattr(output_type, "model_json_schema") and hasattr(output_type, "model_validate_json"):
        return json.dumps(output_type.model_json_schema()), output_type.model_validate_json
    if not isinstance(output_type, dict):
        raise TypeError(f"{name}() argument 'output_type' must be a JSON schema (a dict) or a pydantic model")
    import jsonschema  # imported here: most REPLs never need it

    kind = jsonschema.validators.validator_for(output_type, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(output_type)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{name}() argument 'output_type' is not a JSON schema: {error.message}") from None
    validator = kind(output_type)

    def value_of(text: str) -> Any:
        value = json.loads(text)
        for error in validator.iter_errors(value):
            raise ValueError(error.message)
        return value

    return json.dumps(output_type), value_of
