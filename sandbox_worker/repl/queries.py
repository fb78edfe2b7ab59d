"""What model code may call: each call becomes a `Query` and waits for its `Reply`."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from sandbox_worker.repl.channel import ONLY_HERE, CannotAsk, Channel
from sandbox_worker.repl.classes import class_name, is_a
from sandbox_worker.wire.errors import FrameTooLarge, ValueInvalid, ValueRefused
from sandbox_worker.wire.messages import MAX_PROMPTS, Query, Slot, Want
from sandbox_worker.wire.prompts import Prompt
from sandbox_worker.wire.values import decode, encode

TYPED_ATTEMPTS = 3
SHOWN_CHARS = 500


class ToolError(RuntimeError):
    """A tool of the orchestrator's failed; the text says where and why."""


class Queries:
    """The functions `llm_query`, `rlm_query` and their batched forms of one REPL.

    A call that fails returns a text that starts with `Error:`, and never raises for it: model code reads it like any
    other answer. Wrong arguments raise a TypeError, as with any function.
    """

    def __init__(self, channel: Channel, flush_output: Callable[[], None]) -> None:
        self._channel = channel
        self._flush_output = flush_output

    def __reduce__(self) -> NoReturn:
        """Raises: CannotAsk. A process pool pickles the functions that it is given."""
        raise CannotAsk(ONLY_HERE)

    def llm_query(
        self,
        prompt: str | list[Any],
        model: str | None = None,
        max_completion_tokens: int | None = None,
        system: str | None = None,
        output_type: Any = None,
    ) -> Any:
        """One plain completion of `prompt`.

        Args:
            prompt: Text, or a list of content parts, as `{"type": "text", "text": ...}` and `{"type": "image_url",
                "image_url": {"url": "data:image/png;base64,..."}}`.
            output_type: A JSON schema (a dict), or a pydantic model. Then the value is returned and not its text; or,
                when the model could not be made to give one, a text that starts with `Error:`.
        """
        if output_type is None:
            return self._ask("llm", "llm_query", [prompt], model, max_completion_tokens, system)[0]
        if not isinstance(prompt, str):
            raise TypeError("llm_query() with an output_type needs text as its prompt")
        schema, value_of = _typed("llm_query", output_type)
        wanted = f"{prompt}\n\nAnswer with a JSON value of this schema, and nothing else: {schema}"
        asked, problem = wanted, ""
        for _ in range(TYPED_ATTEMPTS):
            text = self._ask("llm", "llm_query", [asked], model, max_completion_tokens, system)[0]
            if text.startswith("Error: "):
                return text
            try:
                return value_of(_unfenced(text))
            except Exception as error:  # noqa: BLE001 - the schema may make its validator do anything
                problem = (str(error) or class_name(error))[:SHOWN_CHARS]
            asked = f"{wanted}\n\nYou answered: {text[:SHOWN_CHARS]}\nThat is wrong: {problem}"
        return f"Error: the answer is not of the output_type: {problem}"

    def llm_query_batched(
        self,
        prompts: Sequence[str | list[Any]],
        model: str | None = None,
        max_completion_tokens: int | None = None,
        system: str | None = None,
        max_concurrent: int | None = None,
        timeout_s: float | None = None,
        samples: bool = False,
    ) -> list[str]:
        """One plain completion for each prompt, at the same time; the texts in the order of the prompts.

        Args:
            prompts: Any number, each as that of `llm_query`. The same one twice is sent once, unless `samples` is true.
            timeout_s: Seconds for all together: what has no answer by then is an error in its place.
        """
        return self._ask(
            "llm",
            "llm_query_batched",
            prompts,
            model,
            max_completion_tokens,
            system,
            max_concurrent,
            timeout_s,
            bool(samples),
        )

    def llm_batch(self, prompts: Sequence[str | list[Any]], max_concurrent: int = 10) -> list[str]:
        """`llm_query_batched`, at most `max_concurrent` at a time."""
        return self.llm_query_batched(prompts, max_concurrent=max_concurrent)

    def budget(self) -> dict[str, Any]:
        """What this run may still use: name of the limit → what is left, None where there is no limit."""
        slot = self._channel.ask(Query(id="", want="budget", prompts=[""])).slots[0]
        if slot.error is not None:
            raise RuntimeError(slot.error)
        left: dict[str, Any] = json.loads(slot.text)
        return left

    def tool(self, name: str) -> Callable[..., Any]:
        """A function that calls the orchestrator's tool of that name, with values in and out.

        It raises TypeError for arguments that do not cross, and ToolError for whatever the tool raised.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = b'{"args":%s,"kwargs":%s}' % (encode(list(args), "args"), encode(kwargs, "kwargs"))
            except ValueRefused as refused:
                raise TypeError(f"{name}(): {refused}") from None
            self._flush_output()
            slot = self._channel.ask(Query(id="", want="tool", prompts=[arguments.decode()], tool=name)).slots[0]
            if slot.error is not None:
                raise ToolError(slot.error)
            try:
                return decode(slot.text.encode())
            except ValueInvalid as invalid:
                raise ToolError(f"{name}(): its result cannot be had here: {invalid}") from None

        call.__name__ = call.__qualname__ = name
        return call

    def check_fields(self, fields: dict[str, Any]) -> None:
        """Have the orchestrator check what a block submits. Raises: TypeError, with what is wrong."""
        try:
            encoded = encode(fields, "SUBMIT()").decode()
        except ValueRefused as refused:
            raise TypeError(str(refused)) from None
        self._flush_output()
        slot = self._channel.ask(Query(id="", want="submit", prompts=[encoded])).slots[0]
        if slot.error is not None:
            raise TypeError(f"SUBMIT(): {slot.error}")

    def rlm_query(self, prompt: str, model: str | None = None) -> str:
        """A child run with a REPL of its own: `prompt` is both its context and its task."""
        return self._ask("rlm", "rlm_query", [prompt], model)[0]

    def rlm_query_batched(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """One child run for each prompt, at the same time; their answers in the order of the prompts."""
        return self._ask("rlm", "rlm_query_batched", prompts, model)

    def _ask(
        self,
        want: Want,
        name: str,
        prompts: Sequence[str | list[Any]],
        model: str | None,
        max_completion_tokens: int | None = None,
        system: str | None = None,
        max_concurrent: int | None = None,
        timeout_s: float | None = None,
        samples: bool = False,
    ) -> list[str]:
        texts = _checked(name, prompts, takes_parts=want == "llm")
        for argument, value, kinds in (
            ("model", model, (str,)),
            ("max_completion_tokens", max_completion_tokens, (int,)),
            ("system", system, (str,)),
            ("max_concurrent", max_concurrent, (int,)),
            ("timeout_s", timeout_s, (int, float)),
        ):
            _check_type(name, argument, value, kinds)
        if not texts:
            return []
        if len(texts) > MAX_PROMPTS:
            return [f"Error: batch too large: {len(texts):,} prompts in one call, {MAX_PROMPTS:,} at most"] * len(texts)
        self._flush_output()  # what was printed before the question is seen before the wait
        query = Query(
            id="",  # the channel's business
            want=want,
            prompts=texts,
            model=model,
            system=system,
            max_completion_tokens=max_completion_tokens,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            samples=samples,
        )
        try:
            return [_rendered(slot) for slot in self._slots(query)]
        except UnicodeEncodeError as error:
            place = next((f"prompts[{n}]: " for n, text in enumerate(texts) if text is error.object), "")
            remedy = "text.encode('utf-8', 'replace').decode() has none"
            raise ValueError(f"{name}() needs text without lone surrogates: {place}{error}; {remedy}") from None

    def _slots(self, query: Query) -> list[Slot]:
        """Ask about all prompts; in parts, one after the other, where a message cannot hold them."""
        started = time.monotonic()
        try:
            return self._channel.ask(query).slots
        except FrameTooLarge as error:
            if len(query.prompts) == 1:
                return [Slot(error=f"the query is too large: {error}; send a smaller part of the context")]
        half = len(query.prompts) // 2
        first = self._slots(msgspec.structs.replace(query, prompts=query.prompts[:half]))
        left_s = None if query.timeout_s is None else max(0.001, query.timeout_s - (time.monotonic() - started))
        second = msgspec.structs.replace(query, prompts=query.prompts[half:], timeout_s=left_s)
        return [*first, *self._slots(second)]


def _rendered(slot: Slot) -> str:
    if slot.error is None:
        return slot.text
    return f"Error: {slot.error}\n{slot.text}" if slot.text else f"Error: {slot.error}"


def _checked(name: str, prompts: Sequence[str | list[Any]], *, takes_parts: bool) -> list[Prompt]:
    if isinstance(prompts, str):
        raise TypeError(f"{name}() takes a list of prompts, not one string")
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"{name}() takes a list of prompts, not a {class_name(prompts)}")
    checked: list[Prompt] = []
    given = list(prompts)
    for position, prompt in enumerate(given):
        which = "prompt" if len(given) == 1 else f"prompts[{position}]"
        if is_a(prompt, str):
            checked.append(prompt)
        elif takes_parts and is_a(prompt, list):
            try:
                checked.append(msgspec.convert(prompt, Prompt))
            except msgspec.ValidationError as error:
                raise TypeError(f"{name}() needs text or content parts: {which} is neither: {error}") from None
        else:
            raise TypeError(f"{name}() needs text: {which} is a {class_name(prompt)}; use str() or an f-string")
    return checked


def _check_type(name: str, argument: str, value: Any, kinds: tuple[type, ...]) -> None:
    if value is None:
        return
    if not is_a(value, *kinds) or type(value) is bool:
        wanted = kinds[0].__name__ if len(kinds) == 1 else "a number"
        raise TypeError(f"{name}() argument {argument!r} must be {wanted}, not {class_name(value)}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{name}() argument {argument!r} must be at least 1, not {value}")
    if isinstance(value, float) and not 0 < value < float("inf"):
        raise ValueError(f"{name}() argument {argument!r} must be a positive number, not {value}")


def _typed(name: str, output_type: Any) -> tuple[str, Callable[[str], Any]]:
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
