"""Limits of one run tree and of its REPLs: the fields, their defaults and their checks.

These are values only. `run/ledger.py` counts what a tree has spent.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Never, Self

from msgspec import Meta

from rlm_broker.errors import ConfigurationError
from rlm_broker.values.fields import FINITE, Fields, NonNegativeInt, PositiveFloat, PositiveInt, whole
from rlm_broker.values.text import clip
from rlm_broker.values.units import amount
from rlm_broker.values.validation import quoted, suggestion
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.messages import MAX_PROMPTS

BLOCKS_EACH_TURN = 5
"""Default of `max_blocks`, per turn of the root run."""
MOST = 1 << 50
"""Largest limit in bytes: 1 PiB, more than any machine has. Far larger numbers would not fit into the kernel's 64-bit
fields."""
FEWEST_TURNS = 3
"""Minimum turns of a child run, if the root run has as many."""
MOST_CHARS = 200
"""Characters of a refused value in an error message. Longer text is cut and marked with "..."."""


def size(least: int, most: int = MOST) -> Meta:
    """Return the bounds of a number of bytes, and words on them."""
    text = "a size such as 64MB (K, M, G and T are powers of 1024)"
    return Meta(ge=least, le=most, description=f"bytes from {least} to {most}, or {text}")


SECONDS = "a finite number of seconds above 0, or a time such as 90s, 1h30m or 250ms"
Seconds = Annotated[float, Meta(gt=0, le=FINITE, description=SECONDS)]
TurnsByDepth = Annotated[tuple[PositiveInt, ...], Meta(min_length=1, description="one for each depth")]

_ELSEWHERE = {
    "max_budget_usd": "max_budget max_cost budget",
    "run_timeout_s": "max_timeout timeout timeout_s timeout_seconds",
    "iteration_timeout_s": "iteration_timeout_seconds",
    "child_timeout_s": "per_child_timeout_s",
    "max_consecutive_errors": "max_errors",
    "max_iterations": "max_iters max_steps max_turns",
    "max_depth": "depth",
    "max_observation_chars": "max_output_chars",
    "max_result_chars": "result_truncation_limit",
    "max_concurrent_children": "max_concurrent_subcalls",
    "max_concurrent_calls": "concurrency max_workers max_batch_workers",
    "max_blocks": "env_max_iterations_multiplier",
    "memory_bytes": "memory",
    "compaction_threshold": "compaction compaction_threshold_pct history_processor",
}
MEANT: Final = MappingProxyType({name: limit for limit, names in _ELSEWHERE.items() for name in names.split()})
"""Name of a limit in other systems → its name here."""


class _Bounds(Fields):
    """A frozen set of limits, checked when it is made."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Self:
        """Return the limits in a dict, such as a table of a settings file.

        Text with a unit is accepted for each name that ends in `_bytes` or `_s`: `{"run_timeout_s": "1h30m"}`.

        Args:
            given: Values by the names of limits.
            sources: Words on where a value comes from, by the name of its limit. A sentence on a wrong value has them.

        Raises:
            ConfigurationError: A name is not a limit's, or a value is not allowed for its limit.
        """
        return super().from_dict(given, sources)

    def _fill(self, given: Any, source: Any) -> None:
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"limits = {_short(given)}: give values by the names of limits")
        for name in given:
            if name not in self.fields:
                meant = MEANT.get(str(name))
                why = f"; did you mean {meant}?" if meant in self.fields else suggestion(str(name), self.fields)
                raise ConfigurationError(f"there is no limit {quoted(str(name))}{why}")
        read = {name: amount(name, _trimmed(value)) for name, value in given.items()}
        super()._fill(read, (given, source or {}))

    def _refuse(self, mistakes: Mapping[str, str], source: Any) -> Never:
        written, sources = source
        name, advice = next(iter(mistakes.items()))
        raise ConfigurationError(f"limit {name} = {_short(written[name])}{sources.get(name, '')}: {advice}")


def _trimmed(value: object) -> object:
    """Return the text of a number as msgspec reads it, without spaces around and underscores within."""
    return value.strip().replace("_", "") if isinstance(value, str) else value


def _short(value: object) -> str:
    """Return a value as text, cut after `MOST_CHARS` characters."""
    if isinstance(value, list | dict) and value:  # it may have any number of long numbers
        return f"a {type(value).__name__}"
    try:
        return clip(str(value), MOST_CHARS)
    except ValueError:  # `str` refuses numbers of more than 4,300 digits
        return "a number of too many digits"


class RunLimits(_Bounds):
    """Limits of one run and of everything below it. None means no limit.

    `from_dict` takes a dict, such as a table of a settings file.

    Example:
        ```python
        print(rlm.completion("a", "How many?", limits=RunLimits(max_iterations=5, max_budget_usd=0.1)).response)  # 2
        ```

    Raises:
        ConfigurationError: A name is not a limit's, or a value is not allowed for its limit.
    """

    max_depth: NonNegativeInt = 1
    """Maximum levels with a REPL; a child query below them is answered by a plain completion.

    0 makes the run itself a plain completion. 1 gives a REPL to the root run alone.
    """
    max_iterations: PositiveInt | TurnsByDepth = 30
    """Maximum turns of one run; after the last turn the model is asked once more for its best answer.

    A single number is for the root run, and `iterations` derives fewer turns for its children. A tuple has one number
    for each depth, and its last number holds for all deeper runs. The completion's `limit` is then "max_iterations".
    """
    max_blocks: PositiveInt | None = None
    """Maximum code blocks of one run; beyond it no code is run, and the model is asked for its best answer.

    If it is not given, it is 5 times the turns of the root run. The completion's `limit` is then "max_blocks".
    """
    max_llm_calls: PositiveInt | None = 10_000
    """Maximum language model calls of the whole tree; a further call fails with `LimitReached`.

    A call that is retried counts once. If code in a REPL makes the call, the code gets the error as its answer.
    """
    max_tokens: PositiveInt | None = None
    """Maximum tokens of the whole tree, input and output; once they are spent, each call fails with `LimitReached`.

    Each call sets aside in advance what it may need, so concurrent calls overshoot by no more than one would. For a
    model that counts no tokens, three characters count as one token.
    """
    max_budget_usd: PositiveFloat | None = None
    """Maximum cost of the whole tree in US dollars; once it is spent, a further call fails with `LimitReached`.

    The price of each model must be known, or the run fails with `ConfigurationError`.
    """
    max_consecutive_errors: PositiveInt | None = None
    """Turns in a row with a failed block at which one run ends with `LimitReached`."""
    max_children_total: NonNegativeInt | None = 100
    """Maximum child runs of the whole tree, at any depth; a further child query fails with an error in its slot."""
    max_children_per_batch: PositiveInt | None = None
    """Maximum child runs of one query; each prompt beyond it gets an error in its slot."""
    max_batch_prompts: Annotated[int, whole(1, MAX_PROMPTS)] = 4_096
    """Maximum prompts in one batch; each prompt of a larger batch gets an error in its slot."""
    max_concurrent_calls: PositiveInt = 16
    """Maximum language model calls of the tree at the same time; further calls wait."""
    max_concurrent_children: PositiveInt = 4
    """Maximum child runs at one depth of the tree at the same time; further ones wait.

    Each depth has places of its own. With a common pool, waiting parents would hold the places that their children
    need. As many children are kept for further tasks at each depth, beside those; a further one is an error.
    """
    max_completion_tokens: PositiveInt | None = None
    """Maximum output tokens of one call, sent with each request; None leaves the number to the provider."""
    max_result_chars: PositiveInt | None = None
    """Maximum characters that a call or a child returns to the code that asked; longer text is cut and marked."""
    compaction_threshold: Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")] | None = 0.85
    """Share of the model's context window that a request of a run's loop may fill; None means no compaction.

    Beyond it older outputs are cut. If the request is still too long, the model summarises the conversation. A window
    that is not known counts as 128,000 tokens.
    """
    max_output_retries: NonNegativeInt = 2
    """Further turns for an answer that is not of the wanted type; after these the run fails with `OutputInvalid`."""

    # -- time
    run_timeout_s: Seconds | None = 3_600.0
    """Seconds of one whole run, with the reading of its context and all below it; then it ends with `LimitReached`."""
    child_timeout_s: Seconds | None = 600.0
    """Seconds of one child run; then its query gets an error. A child never outlives its parent's own time limit."""
    iteration_timeout_s: Seconds | None = None
    """Seconds of one turn, with its call and its blocks; then the run ends with `LimitReached`."""
    tool_timeout_s: Seconds = 60.0
    """Seconds of one tool call; then the code that called the tool gets an error."""
    call_timeout_s: Seconds = 120.0
    """Seconds of one language model call with its retries; then it fails. The wait for its turn does not count."""

    # -- what the model is shown
    max_observation_chars: PositiveInt = 20_000
    """Maximum characters shown to the model of what all blocks of one reply printed; longer output is cut and marked.

    For a model with a small context window the number is lower.
    """

    def _fill(self, given: Any, source: Any) -> None:
        """Derive `max_blocks` from the turns if it is not given."""
        super()._fill(given, source)
        if "max_blocks" not in self.given:
            self.__dict__["max_blocks"] = BLOCKS_EACH_TURN * self.iterations(0)

    def iterations(self, depth: int) -> int:
        """Return the maximum turns of a run at `depth`.

        The number falls with the depth, but not below three unless the root run itself has fewer.

        Examples:
            >>> RunLimits(max_iterations=30).iterations(1)
            15
        """
        if isinstance(self.max_iterations, tuple):
            return self.max_iterations[min(depth, len(self.max_iterations) - 1)]
        return min(self.max_iterations, max(FEWEST_TURNS, self.max_iterations // (depth + 1)))


class ReplLimits(_Bounds):
    """Limits of one REPL, with all processes that its code starts. None means no limit.

    Example:
        ```python
        with Sandbox(ReplLimits(memory_bytes=512 << 20, block_timeout_s=5)) as sandbox, sandbox.repl() as repl:
            print(repl.execute("x = bytes(1 << 30)").error)  # MemoryError
        ```

    Raises:
        ConfigurationError: A name is not a limit's, or a value is not allowed for its limit.
    """

    memory_bytes: Annotated[int, size(1 << 20)] = 2 << 30
    """Maximum memory in bytes of all processes of a REPL together; beyond it the REPL is killed.

    Written private memory counts; the shared context and mapped files do not. A process alone gets a `MemoryError` in
    place of the kill, and the block's `limit` is `memory_bytes`.
    """
    cpu_s: Seconds | None = None
    """Maximum CPU seconds of one block, summed over all threads and processes; beyond it the REPL is killed."""
    max_processes: Annotated[int, whole(1, 1 << 22)] = 64
    """Maximum processes and threads of one REPL; beyond it, starting one fails or the REPL is killed."""
    scratch_bytes: Annotated[int, size(1 << 12)] = 256 << 20
    """Maximum bytes of the private scratch folder, and of one file; beyond it, a write fails or the REPL is killed."""
    max_scratch_files: Annotated[int, whole(1, 1 << 31)] = 8_192
    """Maximum files and folders in the scratch folder; beyond it, creating one fails or the REPL is killed.

    Each costs about 1 KB of kernel memory, which `scratch_bytes` does not count.
    """
    max_open_files: Annotated[int, whole(16, 1 << 20)] = 256
    """Maximum open file descriptors of one process; beyond it, opening a file fails with EMFILE."""
    max_programs: PositiveInt = 16
    """Maximum programs of `repl.run` at the same time; a further one is refused."""
    later_context_bytes: Annotated[int, size(0)] = 0
    """Bytes of contexts that one REPL can be given by `repl.add_context` while it lives; more is refused.

    These contexts are mapped, and come on top of `memory_bytes`. With 0 the REPL can be
    given none.
    """
    max_repl_restarts: NonNegativeInt = 5
    """Maximum fresh REPLs after kills in one run; at the next block the run ends with `LimitReached`.

    A REPL that goes on from a checkpoint does not count.
    """

    checkpoint: Annotated[Literal["auto", "each", "never"], Meta(description="auto, each or never")] = "auto"
    """When a `strict` REPL keeps a frozen copy of its variables, from which it goes on after a kill.

    With "never" it keeps none. With "auto" it makes one before a block if a kill would lose twenty times the seconds
    that the copy costs; with "each" before every block. The copy's private memory counts towards `memory_bytes`. None
    is made of variables that take more than half of it, nor while threads of an earlier block run.
    """

    keep_checkpoints: Annotated[int, whole(1, 64)] = 1
    """Maximum checkpoints of one REPL, which `repl.rollback` can go back to; beyond it the oldest one is ended.

    The oldest ones also end when a block needs their memory, or when all would take more than half of `memory_bytes`.
    """

    max_replay_s: Annotated[float, Meta(ge=0, le=FINITE, description=f"0, or {SECONDS}")] = 30.0
    """Seconds in which a fresh REPL runs the recorded blocks of a killed one again; with 0 there is no record.

    Blocks that computed longer than that together are not run again. See `SandboxedRepl.record`.
    """

    # -- time
    block_timeout_s: Seconds = 60.0
    """Seconds of computing in one block, then SIGINT; the clock stops while the REPL waits for a reply."""
    block_wall_timeout_s: Seconds = 3_600.0
    """Seconds of one block with its waits for replies, then SIGINT."""
    interrupt_grace_s: Seconds = 1.0
    """Seconds between SIGINT and SIGKILL, for a block that does not end when it is interrupted."""
    start_timeout_s: Seconds = 30.0
    """Seconds for a worker's start, until its REPL is ready with the context loaded; then the start fails."""

    # -- output and messages
    max_output_bytes: Annotated[int, size(100)] = 1 << 20
    """Maximum bytes of output kept per block and stream; longer output keeps its beginning and its end, half each.

    Text that Python code prints is counted in characters. A note says how much was cut.
    """
    max_output_lines: Annotated[int, whole(1, MOST)] | None = None
    """Maximum lines kept per block and stream; longer output keeps its beginning and its end, half each.

    A line ends with a newline. Text that Python code prints and bytes written to descriptor 1 or 2 are counted
    apart. A note says how much was cut. `max_output_bytes` holds as well.
    """
    max_frame_bytes: Annotated[int, size(1 << 12, (1 << 32) - 1)] = 64 << 20
    """Maximum bytes of one message on a REPL's connection, in both directions; a larger one is refused.

    A value for the REPL that is larger raises `ValueTooLarge`.
    """
    max_queries_in_flight: PositiveInt = 256
    """Maximum open queries of one REPL; at this number the handler reads no further one until one is answered.

    Each open query occupies a thread of model code, so `max_processes` is reached first, unless it was raised. As many
    children of `rlm_start` may be open beside them; a further one fails with an error.
    """

    def repl_bounds(self) -> ReplBounds:
        """Return the limits for workers: the fields of `ReplBounds`."""
        return ReplBounds(**{name: getattr(self, name) for name in ReplBounds.__struct_fields__})


class BatchLimits(_Bounds):
    """Limits of a whole batch, over all processes that have worked on it. None means no limit.

    A limit that is reached ends the batch with `LimitReached`. Calls under way then have 20 seconds to end,
    and their answers are kept in the journal. Under a higher limit the batch goes on with the items that are left.

    Example:
        ```python
        limits = BatchLimits(max_budget_usd=20, timeout_s=3_600)
        results = list(rlm.batch(items, limits=limits))
        ```

    Raises:
        ConfigurationError: A name is not a limit's, or a value is not allowed for its limit.
    """

    max_budget_usd: PositiveFloat | None = None
    """Maximum cost in US dollars. The price of each model must be known."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens, input and output."""
    timeout_s: Seconds | None = None
    """Seconds that processes have worked on it, all together."""


class Limits(ReplLimits, RunLimits):
    """Limits of one run tree and of each REPL in it: `RunLimits` and `ReplLimits` in one. None means no limit.

    Examples:
        >>> Limits(max_budget_usd=0.5, run_timeout_s=60).max_depth
        1
        >>> Limits.from_dict({"memory_bytes": "512MB"}).memory_bytes
        536870912

    Raises:
        ConfigurationError: A name is not a limit's, or a value is not allowed for its limit.
    """


def with_set(base: RunLimits | ReplLimits, limits: RunLimits | ReplLimits) -> Limits:
    """Return `base` with the set fields of `limits` in place of its own."""
    names = base.given | limits.given
    fields = {name: getattr(limits if name in limits.given else base, name) for name in names}
    return Limits(**fields)
