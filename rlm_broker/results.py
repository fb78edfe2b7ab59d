"""What comes out of a run, a block or a call: frozen values that every room may hold."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlm_broker.display import Display
from rlm_broker.notebook.showing import Shown
from rlm_broker.shown import as_json, described, had, jsonable

Role = Literal["system", "user", "assistant"]
"""Who says a message of a conversation."""
BlockStatus = Literal["ok", "error", "exited", "interrupted", "killed"]
"""How a block ended, see `Block`."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `content` is text, or a list of content parts in the provider's own shape."""

    role: Role
    content: str | list[Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """What calls to one model used. Adding two of them is exact; a cost is known only if both are."""

    total_calls: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float | None = None
    """US dollars, or None where the price is not known."""
    stored_calls: int = 0
    """Of the calls, those answered from a cache or a recording: nothing was sent, and nothing paid."""

    def __add__(self, other: "Usage") -> "Usage":
        if self.total_calls == 0 or other.total_calls == 0:
            cost = other.total_cost if self.total_calls == 0 else self.total_cost
        elif self.total_cost is None or other.total_cost is None:
            cost = None
        else:
            cost = self.total_cost + other.total_cost
        return Usage(
            self.total_calls + other.total_calls,
            self.total_input_tokens + other.total_input_tokens,
            self.total_output_tokens + other.total_output_tokens,
            cost,
            self.stored_calls + other.stored_calls,
        )

    def to_dict(self) -> dict[str, Any]:
        """The field's shape: `total_cost` only where it is known; `stored_calls` only where there are any."""
        cost: dict[str, Any] = {} if self.total_cost is None else {"total_cost": self.total_cost}
        stored = {"stored_calls": self.stored_calls} if self.stored_calls else {}
        return {
            "total_calls": self.total_calls,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            **cost,
            **stored,
        }


class Tally:
    """The sum of any number of usages. It grows in place: after each call, a new `Usage` would cost more than it."""

    __slots__ = ("_calls", "_cost", "_input_tokens", "_output_tokens", "_stored_calls")

    def __init__(self) -> None:
        self._calls = self._input_tokens = self._output_tokens = self._stored_calls = 0
        self._cost: float | None = None

    def add(self, usage: Usage) -> None:
        """The same as `Usage.__add__`."""
        if self._calls == 0:
            self._cost = usage.total_cost
        elif self._cost is not None and usage.total_calls:
            self._cost = None if usage.total_cost is None else self._cost + usage.total_cost
        self._calls += usage.total_calls
        self._input_tokens += usage.total_input_tokens
        self._output_tokens += usage.total_output_tokens
        self._stored_calls += usage.stored_calls

    @property
    def usage(self) -> Usage:
        """As it stands."""
        return Usage(self._calls, self._input_tokens, self._output_tokens, self._cost, self._stored_calls)


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """Usage by the name of the model that served."""

    model_usage_summaries: Mapping[str, Usage] = field(default_factory=dict)

    @property
    def total(self) -> Usage:
        """All models together."""
        tally = Tally()
        for usage in self.model_usage_summaries.values():
            tally.add(usage)
        return tally.usage

    @property
    def total_calls(self) -> int:
        """Calls of all models."""
        return self.total.total_calls

    @property
    def total_input_tokens(self) -> int:
        """Input tokens of all models."""
        return self.total.total_input_tokens

    @property
    def total_output_tokens(self) -> int:
        """Output tokens of all models."""
        return self.total.total_output_tokens

    @property
    def total_cost(self) -> float | None:
        """US dollars of all models, or None where a price is not known."""
        return self.total.total_cost

    def to_dict(self) -> dict[str, Any]:
        """The field's shape: `{"model_usage_summaries": {model: {...}}, "total_cost"?}`."""
        summary: dict[str, Any] = {
            "model_usage_summaries": {model: usage.to_dict() for model, usage in self.model_usage_summaries.items()}
        }
        if (cost := self.total.total_cost) is not None:
            summary["total_cost"] = cost
        return summary


@dataclass(frozen=True, slots=True)
class Call:
    """One language model call that was answered; in `LMHandler.batch_completion` also one that failed.

    Attributes:
        root_model: The model that served it.
        requested_model: The name that was asked for, where it differs.
        execution_time: Seconds.
        problem: Why there is no text: the provider sent none, or the call failed.
    """

    root_model: str
    response: str
    usage: Usage
    execution_time: float
    requested_model: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a folder in a REPL. A link is told of itself, and never of what it leads to."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What a killed REPL was doing and using, seen from outside as far as that was possible.

    Attributes:
        where: A sentence about the line that the block was on, or nothing.
        stack: All of it, newest frame first; the REPL's own word.
        memory_bytes, processes, threads: Of all its processes together.
        cpu_s: CPU time of the block, in seconds.
    """

    where: str
    stack: str
    memory_bytes: int
    cpu_s: float
    processes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of code in a REPL, by that code's own word.

    Attributes:
        name: At most 60 characters.
        type: Name of its class, cut to 60 characters.
        size: Length of a text, bytes or a built-in container, or the shape of an array or a table; None of all else.
    """

    name: str
    type: str
    size: int | tuple[int, ...] | None = None


class Sent(Protocol):
    """A value that code in a REPL has sent, which is decoded when it is first looked at."""

    @property
    def value(self) -> Any:
        """The value; None if there is a problem."""
        ...

    @property
    def problem(self) -> str | None:
        """Why there is no value: it does not cross, is too large, or is no value."""
        ...


class _WithValues(Shown):
    """What a block has beside its fields: values of any class, which no JSON form of a block could hold."""

    __slots__ = ("_final_value", "_value")
    _value: Sent | None
    _final_value: Sent | None


@dataclass(frozen=True, slots=True, repr=False)
class Block(_WithValues):
    """One executed code block and what came of it. Its `repr` is one line; a notebook shows a page.

    Attributes:
        status: `ok`, `error` (it raised), `exited` (`sys.exit`), `interrupted` (SIGINT; its variables are still
            there), `killed` (its processes are gone, and so are its variables).
        stdout: What it printed, at most `Limits.max_output_bytes`: head, a note of what was cut, tail.
        error: One line that says why, unless `ok`.
        exit_code: For `exited`: what `sys.exit` was given, as a process would return it.
        final_answer: What the code submitted, or None.
        draft: Text in `answer["content"]` that the code has not submitted: its best answer so far. At most 65,536
            characters.
        execution_time: Seconds, waiting included.
        limit: Name of the limit that interrupted or killed it; None if it was none.
        post_mortem: For `killed`.
        displays: Pictures and tables that it showed, in this order: up to 32, of up to 4 MiB each and 16 MiB together,
            all as JSON. One that was killed has those that it showed before.
        displays_omitted: How many more it showed.
        variables: Where they were asked for, those that it has made or bound to another object, and containers whose
            length it has changed; by name, the first 40. None are known of one that was killed.
    """

    code: str
    status: BlockStatus
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    exit_code: int | None = None
    final_answer: str | None = None
    execution_time: float = 0.0
    limit: str | None = None
    post_mortem: PostMortem | None = None
    draft: str | None = None
    displays: tuple[Display, ...] = ()
    displays_omitted: int = 0
    variables: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        with_values(self, None, None)

    def __repr__(self) -> str:
        named = ("code", "status", "stdout", "stderr", "error", "limit", "exit_code", "final_answer", "displays")
        fields = {name: getattr(self, name) for name in named}
        return f"Block({described(**{name: value for name, value in fields.items() if value not in (None, '', ())})})"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = tuple(getattr(self, each.name) for each in dataclasses.fields(self))
        return _block, (fields, self._value, self._final_value)

    @property
    def value(self) -> Any:
        """Value of the last statement, if it was asked for and that is an expression; else None."""
        return None if self._value is None else self._value.value

    @property
    def value_problem(self) -> str | None:
        """Why `value` is None although there is one, with the place in it."""
        return None if self._value is None else self._value.problem

    @property
    def final_value(self) -> Any:
        """What the code submitted, with its type, where `final_answer` is its text; None if it does not cross."""
        return self.final_answer if self._final_value is None else self._final_value.value

    @property
    def final_value_problem(self) -> str | None:
        """Why `final_value` is None although there is a `final_answer`, with the place in it."""
        return None if self._final_value is None else self._final_value.problem


def _block(fields: tuple[Any, ...], value: Sent | None, final_value: Sent | None) -> Block:
    """Return a block that was pickled."""
    return with_values(Block(*fields), value, final_value)


def with_values(block: Block, value: Sent | None, final_value: Sent | None) -> Block:
    """Give a block the values that its REPL has sent. `dataclasses.replace` leaves them out."""
    object.__setattr__(block, "_value", value)
    object.__setattr__(block, "_final_value", final_value)
    return block


def without_displays(block: Block, omitted: int = 0) -> Block:
    """Return the block without what it showed; as many displays more count as omitted."""
    if not block.displays:
        return block
    bare = dataclasses.replace(block, displays=(), displays_omitted=block.displays_omitted + omitted)
    return with_values(bare, block._value, block._final_value)


@dataclass(frozen=True, slots=True, repr=False)
class Iteration:
    """One turn of a run: what the model said, and what its code did. Its `repr` is one line."""

    number: int
    reply: str
    blocks: tuple[Block, ...] = ()

    def __repr__(self) -> str:
        statuses = [block.status for block in self.blocks]
        return f"Iteration({described(number=self.number, reply=self.reply)}, blocks={statuses})"


@dataclass(frozen=True, slots=True)
class ChildTrace:
    """One child run. Previews are the first 80 characters; there is none where there was no text."""

    depth: int
    duration_s: float
    prompt_preview: str
    result_preview: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Isolation:
    """What was really enforced, as the worker reported it before any model code ran."""

    level: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Completion(Shown):
    """What a run returns. Its `repr` is one line, a notebook shows a page, and `to_dict` has all of it.

    Attributes:
        response: The answer; None if the run ended without any.
        iterations: Turns taken.
        execution_time: Seconds.
        usage_summary, usage_by_depth: Of this run and all below it; depth 0 is the root's own loop.
        limit: Name of the limit at which the model was asked for its best answer so far, which `response` then is; None
            if it answered by itself.
        is_stopped: Whether `Run.stop` ended the run; `response` is the best answer that it had by then.
        parsed: The answer as a value of the `output_type` that was asked for.
        trajectory: The turns of this run.
        child_traces: Its child runs.
        messages: The conversation with the root model.
        prompt: The context, if it was given as a text of at most 65,536 characters; None if it was longer, or no text.
        root_prompt: The question, as it was given.
    """

    response: str | None
    root_model: str
    depth: int
    iterations: int
    execution_time: float
    usage_summary: UsageSummary
    usage_by_depth: Mapping[int, Usage] = field(default_factory=dict)
    parsed: Any = None
    limit: str | None = None
    is_stopped: bool = False
    isolation: Isolation | None = None
    messages: tuple[ChatMessage, ...] = ()
    trajectory: tuple[Iteration, ...] = ()
    child_traces: tuple[ChildTrace, ...] = ()
    prompt: str | None = None
    root_prompt: str | None = None

    def __repr__(self) -> str:
        limit = {"limit": self.limit} if self.limit else {"is_stopped": True} if self.is_stopped else {}
        return f"Completion({described(response=self.response, root_model=self.root_model, **had(self), **limit)})"

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON has, under the names of the fields.

        Usage has the field's shape, see `Usage.to_dict`. Of `parsed`, pydantic models, dataclasses and Structs become
        dicts, and what JSON has no form for becomes text. Numbers that JSON has not are None.
        """
        shown = {each.name: jsonable(getattr(self, each.name)) for each in dataclasses.fields(self)}
        shown["usage_summary"] = self.usage_summary.to_dict()
        shown["usage_by_depth"] = {str(depth): usage.to_dict() for depth, usage in self.usage_by_depth.items()}
        return shown

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return as_json(self.to_dict())
