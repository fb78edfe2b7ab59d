"""Functions of model code that ask the orchestrator: each call sends a `Query` and waits for its `Reply`."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec

from sandbox_worker.repl.channel import ONLY_HERE, CannotAsk, Channel
from sandbox_worker.repl.child_contexts import ChildContexts, ContextNotGiven, remove_leftovers
from sandbox_worker.repl.objects import class_name, is_a
from sandbox_worker.wire.errors import FrameTooLarge, MessageInvalid, QueryTooLarge, ValueInvalid, ValueRefused
from sandbox_worker.wire.messages import MAX_PROMPTS, MAX_RESULT_BYTES, Query, Slot, Submit, Want
from sandbox_worker.wire.prompts import ChildContext, MessagePart, Prompt, TextPart, are_messages
from sandbox_worker.wire.text_json import decodable, unfenced
from sandbox_worker.wire.values import MAX_DECODED_VALUES, decode, encode

T = TypeVar("T")
SHORTEST_S = 0.001
"""Minimum of a remaining time limit in seconds, since a query's `timeout_s` must be positive."""
_KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "max_completion_tokens": (int,),
    "system": (str,),
    "max_concurrent": (int,),
    "timeout_s": (int, float),
}
"""Argument → the types it may have, beside None."""


MODEL_CHARS = 500
"""Characters of the longest name of a model. A longer text is a context by position, as other functions have it."""


class ToolError(RuntimeError):
    """A tool of the orchestrator failed. The text names the tool and the reason."""


class ChildrenCall(NamedTuple):
    """Arguments of a call that asks children, beside their tasks.

    Attributes:
        name: Name of the function that model code called.
        contexts: One context for each task, or None.
    """

    name: str
    model: str | None
    contexts: list[Any] | None
    repl: bool | None
    output_type: Any
    samples: bool = False


class Queries:
    """The functions `llm_query`, `rlm_query`, their batched forms, and tools of one REPL.

    If a query fails, then the function returns a text that starts with `Error:` instead of raising: model code reads it
    like any other answer. Wrong arguments raise TypeError or ValueError, as with any function.

    Args:
        channel: Connection to the orchestrator.
        flush_output: Function that sends text printed before.
        own_contexts: Function that returns the contexts of this REPL, by name.
    """

    def __init__(
        self,
        channel: Channel,
        flush_output: Callable[[], None],
        own_contexts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._channel = channel
        self._flush_output = flush_output
        self._own_contexts = own_contexts
        self._folder = os.getcwd()  # noqa: PTH109 - the scratch folder, now: model code may change the current one
        self._is_tidy = False

    def __reduce__(self) -> NoReturn:
        """Refuse pickling, by which a process pool would pass these functions to another process.

        Raises:
            CannotAsk: Always.
        """
        raise CannotAsk(ONLY_HERE)

    def llm_query(
        self,
        prompt: str | list[Any],
        model: str | None = None,
        max_completion_tokens: int | None = None,
        system: str | None = None,
        output_type: Any = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Any:
        """Ask a model for one plain completion of `prompt`, and return its text.

        Args:
            prompt: Text; or a list of chat messages, as `{"role": "user", "content": ...}`; or a list of content parts,
                as `{"type": "text", "text": ...}` and `{"type": "image_url", "image_url": {"url":
                "data:image/png;base64,..."}}`. The content of a message may be such a list as well.
            model: Name of the model; None for the default.
            max_completion_tokens: Maximum tokens of the answer. `max_tokens` is another name of it.
            system: System prompt, for a prompt without a system message.
            output_type: A JSON schema (a dict), or a pydantic model. Then the value is returned instead of its text;
                or, if no answer was valid, a text that starts with `Error:`.
            temperature: Sampling temperature from 0 to 2.
        """
        asked: dict[str, Any] = {
            "model": model,
            "max_completion_tokens": _either("llm_query", max_completion_tokens, max_tokens),
            "system": system,
            "temperature": temperature,
        }
        if output_type is None:
            return self._ask("llm_query", [prompt], asked)[0]
        return self._ask_typed("llm_query", [prompt], output_type, asked)[0]

    def llm_query_batched(
        self,
        prompts: Sequence[str | list[Any]],
        model: str | None = None,
        max_completion_tokens: int | None = None,
        system: str | None = None,
        max_concurrent: int | None = None,
        timeout_s: float | None = None,
        samples: bool = False,
        *,
        output_type: Any = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Any]:
        """Ask for one plain completion of each prompt, at the same time; return the texts in the order of the prompts.

        Other arguments apply to each prompt, as in `llm_query`.

        Args:
            prompts: Any number of prompts. Equal prompts are sent once, unless `samples` is true.
            max_concurrent: Maximum prompts answered at the same time.
            timeout_s: Seconds for all prompts together. A prompt without an answer by then gets an error text.
            samples: Whether equal prompts get an answer each.
            output_type: As in `llm_query`. The list then has values, and texts that start with `Error:`.
        """
        asked: dict[str, Any] = {
            "model": model,
            "max_completion_tokens": _either("llm_query_batched", max_completion_tokens, max_tokens),
            "system": system,
            "max_concurrent": max_concurrent,
            "timeout_s": timeout_s,
            "samples": bool(samples),
            "temperature": temperature,
        }
        if output_type is None:
            return self._ask("llm_query_batched", prompts, asked)
        return self._ask_typed("llm_query_batched", prompts, output_type, asked)

    def llm_batch(self, prompts: Sequence[str | list[Any]], max_concurrent: int = 10, **options: Any) -> list[Any]:
        """Call `llm_query_batched` with these options."""
        return self.llm_query_batched(prompts, max_concurrent=max_concurrent, **options)

    def budget(self) -> dict[str, Any]:
        """Return the remaining means of this run: name of a limit → amount left, None without a limit."""
        slot = self._channel.ask(Query(id="", want="budget", prompts=[""])).slots[0]
        if slot.error is not None:
            raise RuntimeError(slot.error)
        left: dict[str, Any] = json.loads(slot.text)
        return left

    def tool(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the orchestrator's tool of that name.

        The function raises TypeError for arguments that cannot cross, and ToolError if the tool raised an exception.
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
                return decode(decodable(slot.text.encode()))
            except ValueInvalid as invalid:
                raise ToolError(f"{name}(): its result cannot be decoded: {invalid}") from None

        call.__name__ = call.__qualname__ = name
        return call

    def check_fields(self, fields: dict[str, Any]) -> None:
        """Have the orchestrator check the fields that a block submits.

        Raises:
            TypeError: A field cannot cross, or the orchestrator refuses it. The message says why.
        """
        try:
            encoded = encode(fields, "SUBMIT()", most_values=MAX_DECODED_VALUES, most_bytes=MAX_RESULT_BYTES)
        except ValueRefused as refused:
            raise TypeError(str(refused)) from None
        self._flush_output()
        try:
            slot = self._channel.ask(Submit("", msgspec.Raw(encoded))).slots[0]
        except FrameTooLarge as error:
            raise TypeError(
                f"SUBMIT(): the fields take {error.frame_bytes:,} bytes, more than {error.limit_bytes:,}"
            ) from None
        if slot.error is not None:
            raise TypeError(f"SUBMIT(): {slot.error}")

    def rlm_query(
        self,
        task: str,
        model: str | None = None,
        *,
        context: Any = ...,
        repl: bool | None = None,
        output_type: Any = None,
    ) -> Any:
        """Start a child run with a REPL of its own, and return its answer.

        Args:
            task: Task of the child, of any length.
            model: Name of the child's model; None for the default.
            context: Text, or a value of JSON's types, which the child finds as `context`. By default it is the task.
            repl: False asks for a plain completion of context and task; True for a REPL, if the child may have one.
            output_type: As in `llm_query`: the value is returned. After a wrong answer one more child is started.
        """
        given = None if context is ... else [context]
        return self._children([task], ChildrenCall("rlm_query", model, given, repl, output_type))[0]

    def rlm_query_batched(
        self,
        tasks: Sequence[str],
        model: str | None = None,
        *,
        contexts: Sequence[Any] | None = None,
        samples: bool = False,
        repl: bool | None = None,
        output_type: Any = None,
    ) -> list[Any]:
        """Start one child run for each task, at the same time; return their answers in the order of the tasks.

        Args:
            tasks: Tasks of the children. Equal tasks with equal contexts are done once, unless `samples` is true.
            contexts: One context for each task, as in `rlm_query`.
            output_type: As in `rlm_query`. The list then has values, and texts that start with `Error:`.
        """
        name = "rlm_query_batched"
        if is_a(contexts, str, bytes, dict) or not isinstance(contexts, Iterable | None):
            raise TypeError(f"{name}() takes a list of contexts, not a {class_name(contexts)}")
        given = None if contexts is None else list(contexts)
        return self._children(tasks, ChildrenCall(name, model, given, repl, output_type, bool(samples)))

    def more_input(self) -> bytes:
        """Ask for the next bytes of stdin; none at its end. A prompt that was printed before is shown meanwhile.

        Raises:
            OSError: The orchestrator cannot read them.
        """
        self._flush_output()
        (slot,) = self._channel.ask(Query(id="", want="stdin", prompts=[""])).slots
        if slot.error is not None:
            raise OSError(slot.error)
        return slot.text.encode("latin-1")

    def _children(self, tasks: Sequence[str], call: ChildrenCall) -> list[Any]:
        """Return the answers of children as texts, or as values of a type."""
        checked = _checked(call.name, tasks, None, takes_parts=False)
        _require_pairs(call.name, checked, call.contexts)

        def ask(again: Mapping[int, Prompt]) -> list[str]:
            if len(again) > MAX_PROMPTS:
                return _too_many(again)
            given = None if call.contexts is None else [call.contexts[place] for place in again]
            with contextlib.ExitStack() as held:
                try:
                    query = self.children_query([*again.values()], call._replace(contexts=given), held)
                except ContextNotGiven as problem:
                    return [f"Error: {problem}"] * len(again)
                return self._answers(call.name, query)

        if call.output_type is None:
            return ask(dict(enumerate(checked)))
        return typed_answers(call.name, checked, call.output_type, ask, CHILD_ATTEMPTS)

    def children_query(self, tasks: Sequence[Prompt], call: ChildrenCall, held: contextlib.ExitStack) -> Query:
        """Return the query for children. `held` has the files of their contexts.

        Raises:
            ContextNotGiven: A file could not be written.
        """
        _check_type(call.name, "repl", call.repl, (bool,))
        texts = cast("Sequence[str]", tasks)
        if not self._is_tidy:
            self._is_tidy = True
            remove_leftovers(self._folder)
        handed = held.enter_context(ChildContexts(self._own_contexts, self._folder))
        if call.contexts is not None:
            given: Sequence[ChildContext | None] = handed.given(call.name, call.contexts)
        else:
            texts, given = handed.tasks(texts)
        asked = {"model": call.model, "samples": call.samples, "contexts": given, "repl": call.repl}
        return self._query("rlm", call.name, texts, asked)

    def _ask(self, name: str, prompts: Sequence[str | list[Any]], asked: dict[str, Any]) -> list[str]:
        """Ask models for the function `name`, and return the answers. `asked` are further fields of the query."""
        return self._answers(name, self._query("llm", name, prompts, asked))

    def _query(self, want: Want, name: str, prompts: Sequence[str | list[Any]], asked: dict[str, Any]) -> Query:
        texts = _checked(name, prompts, asked.get("system"), takes_parts=want == "llm")
        for argument, kinds in _KINDS.items():
            _check_type(name, argument, asked.get(argument), kinds)
        _check_temperature(name, asked.get("temperature"))
        if len(model := asked.get("model") or "") > MODEL_CHARS or "\n" in model:
            raise TypeError(f"{name}() argument 'model' is no name: put data into the prompt, or give it as context=")
        return Query(id="", want=want, prompts=texts, **asked)  # the channel sets the id

    def _answers(self, name: str, query: Query) -> list[str]:
        if not query.prompts:
            return []
        if len(query.prompts) > MAX_PROMPTS:
            return _too_many(query.prompts)
        return [rendered(slot) for slot in self.sent(name, query, self._slots)]

    def sent(self, name: str, query: Query, send: Callable[[Query], T]) -> T:
        """Send a query for the function `name`."""
        self._flush_output()  # shows text printed before the query, which may wait for long
        try:
            return send(query)
        except UnicodeEncodeError as error:
            place = next((f"prompts[{n}]: " for n, text in enumerate(query.prompts) if text is error.object), "")
            remedy = "text.encode('utf-8', 'replace').decode() has none"
            raise ValueError(f"{name}() needs text without lone surrogates: {place}{error}; {remedy}") from None

    def _ask_typed(
        self, name: str, prompts: Sequence[str | list[Any]], output_type: Any, asked: dict[str, Any]
    ) -> list[Any]:
        """Ask for values of a type. The time limit holds for all attempts together."""
        checked = _checked(name, prompts, asked["system"], takes_parts=True)
        _check_type(name, "timeout_s", timeout_s := asked.get("timeout_s"), _KINDS["timeout_s"])
        started = time.monotonic()

        def ask(again: Mapping[int, Prompt]) -> list[str]:
            left_s = None if timeout_s is None else max(SHORTEST_S, timeout_s - (time.monotonic() - started))
            return self._ask(name, [*again.values()], asked if left_s is None else {**asked, "timeout_s": left_s})

        return typed_answers(name, checked, output_type, ask)

    def _slots(self, query: Query) -> list[Slot]:
        """Return the slots of all prompts. If a message cannot hold them, ask for one half after the other."""
        started = time.monotonic()
        try:
            return self._channel.ask(query).slots
        except FrameTooLarge as error:
            if len(query.prompts) == 1:
                return [Slot(error=str(QueryTooLarge(query.id, error.frame_bytes, error.limit_bytes)))]
        half = len(query.prompts) // 2
        parts = query.contexts
        first = self._slots(msgspec.structs.replace(query, prompts=query.prompts[:half], contexts=parts[:half]))
        left_s = None if query.timeout_s is None else max(SHORTEST_S, query.timeout_s - (time.monotonic() - started))
        second = msgspec.structs.replace(query, prompts=query.prompts[half:], contexts=parts[half:], timeout_s=left_s)
        return [*first, *self._slots(second)]


def check_task(name: str, task: Any) -> None:
    """Raise TypeError, for the function `name` of model code, if a task is not text."""
    _checked(name, [task], None, takes_parts=False)


def _require_pairs(name: str, tasks: Sequence[Any], contexts: Sequence[Any] | None) -> None:
    if contexts is not None and len(contexts) != len(tasks):
        raise ValueError(f"{name}() has {len(tasks):,} tasks and {len(contexts):,} contexts: give one for each")


def _too_many(prompts: Sized) -> list[str]:
    return [f"Error: batch too large: {len(prompts):,} prompts in one call, {MAX_PROMPTS:,} at most"] * len(prompts)


def rendered(slot: Slot) -> str:
    if slot.note is not None:
        print(slot.note, file=sys.stderr)
    if slot.error is None:
        return slot.text
    return f"Error: {slot.error}\n{slot.text}" if slot.text else f"Error: {slot.error}"


def _checked(
    name: str, prompts: Sequence[str | list[Any]], system: str | None = None, *, takes_parts: bool
) -> list[Prompt]:
    if isinstance(prompts, str):
        raise TypeError(f"{name}() takes a list of prompts, not one string")
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"{name}() takes a list of prompts, not a {class_name(prompts)}")
    checked: list[Prompt] = []
    given = list(prompts)
    what = "prompt" if takes_parts else "task"
    for position, prompt in enumerate(given):
        which = what if len(given) == 1 else f"{what}s[{position}]"
        if is_a(prompt, str):
            checked.append(prompt)
        elif takes_parts and is_a(prompt, list):
            checked.append(_checked_parts(name, which, prompt, system))
        else:
            written = "its result()" if class_name(prompt) == "Child" else "str() or an f-string"
            raise TypeError(f"{name}() needs text: {which} is a {class_name(prompt)}; use {written}")
    return checked


def _checked_parts(name: str, which: str, prompt: list[Any], system: str | None) -> Prompt:
    """Return a prompt of content parts or chat messages as its wire types, where a message has a tag as parts have."""
    try:
        parts = msgspec.convert([{"type": "message", **each} if _is_message(each) else each for each in prompt], Prompt)
        assert isinstance(parts, list)
        has_messages = are_messages(parts)
    except (msgspec.ValidationError, MessageInvalid) as error:
        kinds = "text, content parts or chat messages"
        raise TypeError(f"{name}() needs {kinds}: {which} is none of them: {error}") from None
    if system and has_messages and any(isinstance(each, MessagePart) and each.role == "system" for each in parts):
        raise TypeError(f"{name}() takes either system= or a system message, not both: {which} has one")
    return parts


def _is_message(value: Any) -> bool:
    return is_a(value, dict) and "role" in value and "type" not in value


def _either(name: str, max_completion_tokens: int | None, max_tokens: int | None) -> int | None:
    if max_tokens is None:
        return max_completion_tokens
    if max_completion_tokens is not None:
        raise TypeError(f"{name}() takes either max_tokens= or max_completion_tokens=, not both: they are the same")
    _check_type(name, "max_tokens", max_tokens, (int,))
    return max_tokens


def _check_temperature(name: str, value: Any) -> None:
    if value is None:
        return
    if not is_a(value, int, float) or type(value) is bool:
        raise TypeError(f"{name}() argument 'temperature' must be a number, not {class_name(value)}")
    if not 0 <= value <= 2:
        raise ValueError(f"{name}() argument 'temperature' must be from 0 to 2, not {value}")


def _check_type(name: str, argument: str, value: Any, kinds: tuple[type, ...]) -> None:
    if value is None:
        return
    if not is_a(value, *kinds) or (type(value) is bool and bool not in kinds):
        wanted = kinds[0].__name__ if len(kinds) == 1 else "a number"
        raise TypeError(f"{name}() argument {argument!r} must be {wanted}, not {class_name(value)}")
    if isinstance(value, int) and value < 1 and type(value) is not bool:
        raise ValueError(f"{name}() argument {argument!r} must be at least 1, not {value}")
    if isinstance(value, float) and not 0 < value < float("inf"):
        raise ValueError(f"{name}() argument {argument!r} must be a positive number, not {value}")


# -- answers of a type: asked with a schema, validated here, and asked again if they are wrong -------------------------

TYPED_ATTEMPTS, CHILD_ATTEMPTS = 3, 2
"""Maximum attempts for each prompt of `llm_query`, and of a child; after the last one the answer is an error text."""
SHOWN_CHARS = 500
"""Maximum characters of a wrong answer, and of its fault, that the next attempt shows the model; the rest is cut."""


def typed_answers(
    name: str,
    prompts: list[Prompt],
    output_type: Any,
    ask: Callable[[Mapping[int, Prompt]], list[str]],
    attempts: int = TYPED_ATTEMPTS,
) -> list[Any]:
    """Return one value for each prompt, or a text that starts with `Error:`.

    Args:
        name: Name of the function that model code called.
        prompts: Prompts without the schema.
        output_type: JSON schema (a dict), or pydantic model.
        ask: Function that returns the answers to prompts by their places, as texts. Prompts whose answers failed are
            asked again, all in one call.
        attempts: Maximum attempts for each prompt.

    Raises:
        TypeError: `output_type` is neither a dict nor a pydantic model.
        ValueError: `output_type` is a dict that is not a JSON schema.
    """
    wanted = AnswerSchema(name, output_type)
    answers: list[Any] = [None] * len(prompts)
    asked = {place: wanted.asked(prompt) for place, prompt in enumerate(prompts)}
    for _ in range(attempts):
        again: dict[int, Prompt] = {}
        for place, text in zip(asked, ask(asked), strict=True):
            answers[place], corrected = wanted.judged(prompts[place], text)
            if corrected is not None:
                again[place] = corrected
        asked = again
        if not asked:
            break
    return answers


class AnswerSchema:
    """Type of the answers that model code wants. It makes prompts, and judges answers.

    Args:
        name: Name of the function that model code called.
        output_type: JSON schema (a dict), or pydantic model.

    Raises:
        TypeError, ValueError: As for `typed_answers`.
    """

    def __init__(self, name: str, output_type: Any) -> None:
        schema, self._value_of = _schema_of(name, output_type)
        self._words = f"Answer with a JSON value of this schema, and nothing else: {schema}"

    def asked(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the type."""
        return _with(prompt, self._words)

    def judged(self, prompt: Prompt, text: str) -> tuple[Any, Prompt | None]:
        """Return the value of an answer and None; or, if it is wrong, an error text and the prompt to ask again."""
        if text.startswith("Error: "):
            return text, None
        try:
            return self._value_of(unfenced(text)), None
        except Exception as error:  # noqa: BLE001 - a validator of model code may raise any class
            problem = (str(error) or class_name(error))[:SHOWN_CHARS]
            told = f"{self._words}\n\nYou answered: {text[:SHOWN_CHARS]}\nThat is wrong: {problem}"
            return f"Error: the answer is not of the output_type: {problem}", _with(prompt, told)


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
