"""Results of runs, blocks and calls: frozen values for every package here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol

from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.display import Display, Presentable
from rlm_broker.values.text import as_json, described, jsonable, summary_fields

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # checkers know it without its package

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

Role = Literal["system", "user", "assistant"]
"""Author of a message in a conversation."""
BlockStatus = Literal["ok", "error", "exited", "interrupted", "killed"]
"""Outcome of a block; see `Block.status`."""
NAMES_TOLD: Final = 10
"""Names in a remark on what is left out of a context. The others are counted."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `content` is text, or a list of content parts in the provider's own shape.

    Example:
        ```python
        LMRequest((ChatMessage("system", "Be brief."), ChatMessage("user", "Is Rome a city?")))
        ```
    """

    role: Role
    content: str | list[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One answered language model call. `LMHandler.batch_completion` also returns failed calls.

    Example:
        ```python
        call = handler.batch_completion(["Say a word."])[0]
        print(call.problem or call.response)  # an answer
        ```

    Attributes:
        root_model: Name of the serving model.
        requested_model: Requested name, if it differs from `root_model`, else None.
        execution_time: Duration in seconds.
        problem: Reason why `response` is empty: the provider sent no text, or the call failed. None if there is text.
        extra: Token ids and log probabilities, as in `LMReply.extra`.
    """

    root_model: str
    response: str
    usage: Usage
    execution_time: float
    requested_model: str | None = None
    problem: str | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a folder in a REPL. A symbolic link is described itself, never its target.

    Example:
        ```python
        repl.files.write("data.csv", b"a,b")
        print(repl.files.list())  # [FileEntry(name='data.csv', kind='file', size_bytes=3)]
        ```
    """

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PostMortem:
    """Activity and usage of a killed REPL, as far as they could be seen from outside.

    Example:
        ```python
        block = repl.execute("import os; os._exit(3)")
        print(block.status, block.post_mortem)  # killed ...
        ```

    Attributes:
        where: Sentence about the line that the block was executing; empty if the line is unknown.
        stack: Whole stack, newest frame first. The REPL reported it, so it is not trusted.
        memory_bytes, processes, threads: Totals of all its processes.
        cpu_s: CPU time of the block in seconds.
    """

    where: str
    stack: str
    memory_bytes: int
    cpu_s: float
    processes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of code in a REPL. The REPL reported it, so it is not trusted.

    Example:
        ```python
        block = repl.execute("words = context.split()", variables=True)
        print(block.variables)  # (Variable(name='words', type='list', size=2),)
        ```

    Attributes:
        name: At most 60 characters.
        type: Name of its class, cut to 60 characters.
        size: Length of a text, bytes or a built-in container, or the shape of an array or table; None for other types.
    """

    name: str
    type: str
    size: int | tuple[int, ...] | None = None


class Sent(Protocol):
    """A value from code in a REPL. It is decoded when it is first read."""

    @property
    def value(self) -> Any:
        """Decoded value; None if there is a problem."""
        ...

    @property
    def problem(self) -> str | None:
        """Reason why there is no value: it cannot be transferred, is too large or malformed; None if there is one."""
        ...


class Unprinted(NamedTuple):
    """Texts of a block that were not printed, see `execute(echo=False)`. `Block` has properties of these names."""

    result: Display | None = None
    error_type: str | None = None
    error_text: str | None = None
    traceback: str | None = None


class _WithValues(Presentable):
    """Values of a block outside of its dataclass fields: they are of any class, and may have no JSON form."""

    __slots__ = ("_final_value", "_unprinted", "_value")
    _value: Sent | None
    _final_value: Sent | None
    _unprinted: Unprinted


@dataclass(frozen=True, slots=True, repr=False)
class Block(_WithValues):
    """One executed code block and its outcome. Its `repr` is one line; a notebook shows a page.

    Example:
        ```python
        block = repl.execute("print(len(context))")
        print(block.status, block.stdout)  # ok 9
        ```

    Attributes:
        code: Source text of the block.
        status: `ok`, `error` (it raised), `exited` (`sys.exit`), `interrupted` (SIGINT; its variables still exist), or
            `killed` (its processes are gone; see `blocks_undone` for its variables).
        stdout, stderr: Printed text, each at most `Limits.max_output_bytes`: head, a note on what was cut, tail.
        error: One line with the reason, unless `ok`.
        exit_code: For `exited`, the argument of `sys.exit` as a process's exit status.
        final_answer: Submitted answer, or None.
        draft: Text in `answer["content"]` before a submission, the best answer so far; at most 65,536 characters.
        execution_time: Seconds, with waits for replies.
        limit: Name of the limit that interrupted or killed it, or None; `memory_bytes` if it failed for want of memory.
        post_mortem: Usage of the killed REPL, for `killed` alone.
        displays: Its pictures and tables, in order: up to 32, each up to 4 MiB and together 16 MiB, counted as JSON. A
            killed block keeps its earlier ones.
        displays_omitted: Number of further displays, which were dropped.
        variables: If asked for, the first 40 by name of the variables that it created, rebound or changed in length.
            Empty for a killed block.
        blocks_undone: For a killed block after which variables came back, by a checkpoint or a replay: the number of
            blocks whose variables are lost, this one included. With 1, all are as before it. None if all are lost.
        calls_remembered: For a killed or interrupted block of a run, the number of its answered calls and of those
            in the runs below.
            The same calls of a later block get the same answers, once each, and cost nothing.
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
    blocks_undone: int | None = None
    calls_remembered: int = 0

    def __post_init__(self) -> None:
        with_values(self, None, None)

    def __repr__(self) -> str:
        named = ("code", "status", "stdout", "stderr", "error", "limit", "exit_code", "final_answer", "displays")
        fields = {name: getattr(self, name) for name in named}
        return f"Block({described(**{name: value for name, value in fields.items() if value not in (None, '', ())})})"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that JSON has, under their own names; bytes of displays are base64.

        Example:
            ```python
            repl.execute("print(1)").to_dict()["stdout"]  # '1\\n'
            ```
        """
        return {each.name: jsonable(getattr(self, each.name)) for each in dataclasses.fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        fields = tuple(getattr(self, each.name) for each in dataclasses.fields(self))
        return _block, (fields, self._value, self._final_value, self._unprinted)

    @property
    def result(self) -> Display | None:
        """Forms of the last statement's value, if it is an expression and `echo` was false; else None. The text is
        `result.data["text/plain"]`, at most `Limits.max_output_bytes` as all texts here."""
        return self._unprinted.result

    @property
    def error_type(self) -> str | None:
        """Name of the class of what the code raised, `SystemExit` included, if `echo` was false; else None."""
        return self._unprinted.error_type

    @property
    def error_text(self) -> str | None:
        """Whole text of what the code raised, if `echo` was false; else None."""
        return self._unprinted.error_text

    @property
    def traceback(self) -> str | None:
        """Traceback of what the code raised, if `echo` was false; else None, and it is in `stderr`."""
        return self._unprinted.traceback

    @property
    def value(self) -> Any:
        """Value of the last statement, if it was asked for and the statement is an expression; else None."""
        return None if self._value is None else self._value.value

    @property
    def value_problem(self) -> str | None:
        """Reason why `value` is None although the expression has a value, with the place in it; else None."""
        return None if self._value is None else self._value.problem

    @property
    def final_value(self) -> Any:
        """Submitted answer with its type; None if it cannot be transferred. `final_answer` is its text."""
        return self.final_answer if self._final_value is None else self._final_value.value

    @property
    def final_value_problem(self) -> str | None:
        """Reason why `final_value` is None although there is a `final_answer`, with the place in it; else None."""
        return None if self._final_value is None else self._final_value.problem


def _block(
    fields: tuple[Any, ...], value: Sent | None, final_value: Sent | None, unprinted: Unprinted | None = None
) -> Block:
    """Return a block from its pickled parts."""
    return with_values(Block(*fields), value, final_value, unprinted)


_ALL_PRINTED = Unprinted()


def with_values(
    block: Block, value: Sent | None, final_value: Sent | None, unprinted: Unprinted | None = None
) -> Block:
    """Attach the values from the REPL, and return the block. `dataclasses.replace` drops them."""
    object.__setattr__(block, "_value", value)
    object.__setattr__(block, "_final_value", final_value)
    object.__setattr__(block, "_unprinted", unprinted or _ALL_PRINTED)
    return block


def without_displays(block: Block, omitted: int = 0) -> Block:
    """Return the block without its displays, and with `omitted` more in `displays_omitted`."""
    if not block.displays:
        return block
    bare = dataclasses.replace(block, displays=(), displays_omitted=block.displays_omitted + omitted)
    return with_values(bare, block._value, block._final_value, block._unprinted)


@dataclass(frozen=True, slots=True, repr=False)
class Iteration:
    """One turn of a run: its number from 1, the model's whole reply, and its executed blocks in order.

    `extra` has the token ids and log probabilities of the reply, as in `LMReply.extra`.

    Example:
        ```python
        for turn in rlm.completion("a", "How many?").trajectory:
            print(turn.number, [block.status for block in turn.blocks])  # 1 ['ok']
        ```
    """

    number: int
    reply: str
    blocks: tuple[Block, ...] = ()
    extra: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        statuses = [block.status for block in self.blocks]
        return f"Iteration({described(number=self.number, reply=self.reply)}, blocks={statuses})"


@dataclass(frozen=True, slots=True)
class ChildTrace:
    """One child run: depth, seconds, and previews of its prompt and result, of at most 80 characters each.

    `result_preview` is None if the child failed, and `error` then says why. `messages` is its whole conversation, and
    `trajectory` its turns; both are empty for a child that did not begin.

    Example:
        ```python
        for child in rlm.completion("a", "How many?").child_traces:
            print(child.depth, child.duration_s, child.error or child.result_preview)
        ```
    """

    depth: int
    duration_s: float
    prompt_preview: str
    result_preview: str | None = None
    error: str | None = None
    messages: tuple[ChatMessage, ...] = field(default=(), repr=False)
    trajectory: tuple[Iteration, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation level and the names of its layers, as the worker reported them before any model code ran.

    Example:
        ```python
        print(repl.isolation.level, repl.isolation.layers)
        ```
    """

    level: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """Facts about a context that need no reading.

    Example:
        ```python
        with store("some text") as context:
            print(context.info.type_name, context.info.total_chars)  # str 9
        ```

    Attributes:
        type_name: Type of the worker's Python value: `str`, `dict`, `list`, `DataFrame`, `ndarray`, ...
        total_chars: Characters of a text, or of all texts in a dict or list of texts alone; otherwise bytes of the
            context as it is stored.
        parts: Name and length of the first 100 files, keys of a dict, or items of a list (by index). A
            name has at most 200 characters. The length is in characters for a text, in bytes of its JSON
            for any other value.
        parts_total: Number of all parts.
        skipped: Number of files, folders or entries of archives left out, by reason.
        replaced_bytes, replaced_parts: Number of undecodable bytes that became U+FFFD, and of the texts with any.
        made_of: Class of an object that becomes a dict, for example a dataclass; empty for any other value.
        shape: Shape of a table or an array; empty for any other value.
        skipped_names: Reason -> the names of the first 20 entries left out for it.
        kinds: Kind of file -> number of the texts that were read from such files: `html`, `ipynb`, `pdf`, `picture`,
            ... Plain texts are not counted.
    """

    type_name: str
    total_chars: int
    parts: tuple[tuple[str, int], ...] = ()
    parts_total: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    replaced_bytes: int = 0
    replaced_parts: int = 0
    made_of: str = ""
    shape: tuple[int, ...] = ()
    skipped_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict)

    def headline(self) -> str:
        """Return what the context is, as words that follow "is".

        Example:
            ```python
            with store("some text") as context:
                print(context.info.headline())  # a str with 9 characters in all
            ```
        """
        if self.shape:
            return f"a {self.type_name} of shape {self.shape}"
        made_of = f" made of an object of class {self.made_of}," if self.made_of else ""
        return f"a {self.type_name}{made_of} with {self.total_chars:,} characters in all"

    def remarks(self, *, with_names: bool = False) -> list[str]:
        """Return how the context differs from the user's data, one line each: what was left out, and what was
        replaced. `with_names` adds the first `NAMES_TOLD` names of what was left out for a reason.

        Example:
            ```python
            with store(Path("logs")) as context:
                print(context.info.remarks(with_names=True))  # []
            ```
        """
        lines = []
        for reason, count in self.skipped.items():
            line = f"left out: {count:,} ({reason})"
            if with_names and (names := self.skipped_names.get(reason, ())[:NAMES_TOLD]):
                more = (f"{count - len(names):,} more",) if len(names) < count else ()
                line += f": {', '.join((*names, *more))}"
            lines.append(line)
        if self.replaced_bytes:
            where = f", in {self.replaced_parts:,} texts" if self.replaced_parts > 1 else ""
            lines.append(f"replaced by U+FFFD: {self.replaced_bytes:,} (bytes that cannot be decoded{where})")
        return lines


@dataclass(frozen=True, slots=True, repr=False)
class Completion(Presentable, Generic[T]):
    """Outcome of a run. Its `repr` is one line, a notebook shows a page, and `to_dict` returns all of it.

    Example:
        ```python
        completion = rlm.completion("a", "How many?")
        print(completion.response, completion.iterations)  # 2 1
        print(completion.usage_summary.total_calls)  # 1
        ```

    Attributes:
        response: Answer as text; None if the run ended without one.
        root_model: Name of the run's model.
        depth: Depth of the run; 0 is a root run.
        iterations: Number of turns taken.
        execution_time: Duration in seconds.
        usage_summary, usage_by_depth: Usage of this run and everything below it. Depth 0 is the root's own loop.
        context: Facts about the context: its parts, and the names of files that were left out; None without one.
        limit: Name of the limit at which the model was asked for its best answer so far; None if it answered by itself.
        is_stopped: Whether `Run.stop` ended the run. `response` is then its best answer so far.
        parsed: Answer as a value of the wanted `output_type`: of `Order` in a `Completion[Order]`; None without a type.
        isolation: Enforced isolation; None if the run had no REPL.
        trajectory: Turns of this run.
        child_traces: Child runs of this run.
        messages: Conversation with the root model.
        prompt: Context, if it is text of at most 65,536 characters, else None.
        root_prompt: Question, as it was given.
        earlier_turns: Turns taken over from the run that it goes on from; `iterations` and `trajectory` have them, too.
            After `resume`, the usage has what that run had used.
    """

    response: str | None
    root_model: str
    depth: int
    iterations: int
    execution_time: float
    usage_summary: UsageSummary
    usage_by_depth: Mapping[int, Usage] = field(default_factory=dict)
    parsed: T = None  # type: ignore[assignment]
    limit: str | None = None
    is_stopped: bool = False
    isolation: Isolation | None = None
    messages: tuple[ChatMessage, ...] = ()
    trajectory: tuple[Iteration, ...] = ()
    child_traces: tuple[ChildTrace, ...] = ()
    prompt: str | None = None
    root_prompt: str | None = None
    context: ContextInfo | None = None
    earlier_turns: int = 0

    @property
    def answer(self) -> str:
        """The answer as text, as `response` is.

        Example:
            ```python
            print(rlm.completion("a", "How many?").answer.upper())  # 2
            ```

        Raises:
            ValueUnavailable: The run ended without an answer; the message says why.
        """
        if self.response is None:
            from rlm_broker.errors import ValueUnavailable

            why = "was stopped" if self.is_stopped else f"ended at the limit {self.limit}" if self.limit else "ended"
            raise ValueUnavailable(f"there is no answer: the run {why} without one")
        return self.response

    def __repr__(self) -> str:
        limit = {"limit": self.limit} if self.limit else {"is_stopped": True} if self.is_stopped else {}
        fields = {"response": self.response, "root_model": self.root_model, **summary_fields(self), **limit}
        return f"Completion({described(**fields)})"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values of JSON, under their own names.

        Usage has the shape of `Usage.to_dict`. In `parsed`, pydantic models, dataclasses and Structs become dicts.
        Values without a JSON form become text, and NaN and infinities become None.

        Example:
            ```python
            rlm.completion("a", "How many?").to_dict()["response"]  # '2'
            ```
        """
        shown = {each.name: jsonable(getattr(self, each.name)) for each in dataclasses.fields(self)}
        shown["usage_summary"] = self.usage_summary.to_dict()
        shown["usage_by_depth"] = {str(depth): usage.to_dict() for depth, usage in self.usage_by_depth.items()}
        return shown

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return as_json(self.to_dict())


@dataclass(frozen=True, slots=True)
class BestOf(Generic[T]):
    """Outcome of `RLM.best_of`: the chosen completion, beside those of the other runs.

    Example:
        ```python
        best = rlm.best_of(3, "a", "How many?")
        print(best.chosen.response, best.votes, len(best.runs))  # 2 3 3
        ```

    Attributes:
        chosen: The completion of the most frequent answer, or of the best score.
        runs: Completion or error of each run. Between runs that have shared a prefix, the first has paid for it.
        votes: Number of runs with an equal answer; 0 if none has an answer.
    """

    chosen: Completion[T]
    runs: tuple[Completion[T] | Exception, ...]
    votes: int

    @property
    def usage(self) -> Usage:
        """Usage of all runs together; a failed one's is what it had used."""
        usages = [each.usage_summary.total for each in self.runs if hasattr(each, "usage_summary")]
        return sum(usages, Usage())
