"""What one run tree may use. Values only: what has been spent is in `ledger`."""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from rlm_broker.errors import ConfigurationError
from rlm_broker.units import accepted, amount
from rlm_broker.validation import suggestion
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.messages import MAX_PROMPTS

BLOCKS_EACH_TURN = 5
MOST = 1 << 50
"""Bytes that no machine has: more than these would be too many for the kernel's own numbers."""
FEWEST_TURNS = 3
MOST_CHARS = 200
"""Of a wrong value in a sentence."""
MOST_DIGITS = 18
"""Of a whole number as text: Python reads only so many, and no limit means more."""


def _short(value: object) -> str:
    """Return a value as text, cut where it is longer than any limit."""
    if isinstance(value, int) and value.bit_length() > MOST_CHARS:
        return "a number of too many digits"
    text = str(value)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."


class _Bounds(BaseModel):
    """Bounds of something, checked when they are made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise this package's error. The context of the validation may say of a name where its value came from."""
        sources = info.context or {}
        written = given if isinstance(given, dict) else {}
        for name, value in written.items():
            if name not in cls.model_fields:
                raise ConfigurationError(f"there is no limit {name!r}{suggestion(str(name), cls.model_fields)}")
            if isinstance(value, bool):
                raise ConfigurationError(f"limit {name} = {_short(value)}{sources.get(name, '')}: give a number")
        try:
            return validate({name: amount(name, value) for name, value in written.items()} if written else given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "(all)"
            value = written[name] if isinstance(written.get(name), str) else first["input"]
            is_unread = first["type"] in ("int_parsing", "float_parsing")
            why = (accepted(name) if is_unread else None) or first["msg"].lower()
            raise ConfigurationError(f"limit {name} = {_short(value)}{sources.get(name, '')}: {why}") from None


class RunLimits(_Bounds):
    """Bounds of one run and of everything below it. None means no bound.

    Of a dict, as from a file, `model_validate` also takes text with a unit where a name ends in `_bytes` or `_s`:
    {"run_timeout_s": "1h30m"}; see `units`.

    Raises:
        ConfigurationError: There is no limit of a name, or it cannot have the value.
    """

    max_depth: NonNegativeInt = 1
    """Levels that have a REPL: 0 is a plain completion, 1 only the root. A child query below them is a completion."""
    max_iterations: PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = 30
    """Turns of one run. Children get fewer, see `iterations`; or one number for each depth."""
    max_blocks: PositiveInt | None = None
    """Code blocks of one run; past it code is not run. Left out: 5 times the root's turns."""
    max_llm_calls: PositiveInt | None = 10_000
    """Language model calls of the whole tree."""
    max_tokens: PositiveInt | None = None
    """Input and output tokens of the whole tree. Estimated, three characters each, of a model that counts none."""
    max_budget_usd: PositiveFloat | None = None
    """US dollars of the whole tree. It needs models whose price is known."""
    max_consecutive_errors: PositiveInt | None = None
    """Turns of one run in a row in which a block failed."""
    max_children_total: NonNegativeInt | None = 100
    """Child runs of the whole tree, at any depth."""
    max_children_per_batch: PositiveInt | None = None
    """Child runs of one query; the prompts beyond are refused, slot by slot."""
    max_batch_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 4_096
    """Prompts in one batch; a larger one is refused slot by slot."""
    max_concurrent_calls: PositiveInt = 16
    """Language model calls of the tree at the same time."""
    max_concurrent_children: PositiveInt = 4
    """Children at one depth of the tree at the same time. Each depth has its own places: parents that wait hold none
    that their children need."""
    max_completion_tokens: PositiveInt | None = None
    """Output tokens of one call; None leaves it to the provider."""
    max_result_chars: PositiveInt | None = None
    """Of what a call or a child returns to the code that asked; a cut is named."""
    compaction_threshold: Annotated[float, Field(gt=0, le=1)] | None = 0.85
    """Share of the model's context window that a request of a run's loop may fill. Beyond it older outputs are cut, and
    then the conversation is summarised. A window that is not known counts as 128,000 tokens. None is never."""
    max_output_retries: NonNegativeInt = 2
    """Further turns for an answer that is not of the type that was asked for."""

    # -- time
    run_timeout_s: PositiveFloat | None = 3_600.0
    """One whole run, everything below it included."""
    child_timeout_s: PositiveFloat | None = 600.0
    """One child run; never longer than what is left of its parent's time."""
    iteration_timeout_s: PositiveFloat | None = None
    """One turn: its call and its blocks."""
    tool_timeout_s: PositiveFloat = 60.0
    """One call of a tool."""
    call_timeout_s: PositiveFloat = 120.0
    """One language model call."""

    # -- what the model is shown
    max_observation_chars: PositiveInt = 20_000
    """Told to the model of what the blocks of one reply printed, all together."""

    @model_validator(mode="wrap")
    @classmethod
    def _default_blocks(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Derive `max_blocks` from the turns where it is not given. It does not count as set then."""
        if isinstance(given, dict) and "max_blocks" not in given:
            turns = given.get("max_iterations", cls.model_fields["max_iterations"].default)
            first = turns[0] if isinstance(turns, list | tuple) and turns else turns
            if isinstance(first, str) and first.isdecimal() and len(first) <= MOST_DIGITS:
                first = int(first)
            if isinstance(first, int) and first > 0:
                made = validate({**given, "max_blocks": BLOCKS_EACH_TURN * first})
                made.model_fields_set.discard("max_blocks")
                return made
        return validate(given)

    def iterations(self, depth: int) -> int:
        """Turns of a run at `depth`: fewer the deeper it is, but at least three, and never more than the root's."""
        if isinstance(self.max_iterations, tuple):
            return self.max_iterations[min(depth, len(self.max_iterations) - 1)]
        return min(self.max_iterations, max(FEWEST_TURNS, self.max_iterations // (depth + 1)))


class ReplLimits(_Bounds):
    """Bounds of one REPL. None means no bound.

    Raises:
        ConfigurationError: There is no limit of a name, or it cannot have the value.
    """

    memory_bytes: Annotated[int, Field(ge=1 << 20, le=MOST)] = 2 << 30
    """Memory of all processes of a REPL together, beyond the shared context; also the address space of each."""
    cpu_s: PositiveFloat | None = None
    """CPU time of one block, all its threads and processes together."""
    max_processes: Annotated[int, Field(ge=1, le=1 << 22)] = 64
    """Processes and threads of one REPL."""
    scratch_bytes: Annotated[int, Field(ge=1 << 12, le=MOST)] = 256 << 20
    """Size of the private scratch folder, which is also the largest file."""
    max_scratch_files: Annotated[int, Field(ge=1, le=1 << 31)] = 8_192
    """Files and folders in the scratch folder: each costs about a kilobyte of the kernel's memory."""
    max_open_files: Annotated[int, Field(ge=16, le=1 << 20)] = 256
    """Descriptors of one process."""
    max_programs: PositiveInt = 16
    """Programs of `repl.run` at the same time; one more is refused."""
    later_context_bytes: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Contexts that one REPL is given by `repl.add_context` while it lives: they are mapped, and their address space
    comes on top of that of `memory_bytes`. 0: it can be given none."""
    max_repl_restarts: NonNegativeInt = 5
    """Fresh REPLs after a kill, in one run."""

    # -- time
    block_timeout_s: PositiveFloat = 60.0
    """Compute time of one code block, then SIGINT. The clock stops while the REPL waits for a reply."""
    block_wall_timeout_s: PositiveFloat = 3_600.0
    """One code block, waiting for replies included, then SIGINT."""
    interrupt_grace_s: PositiveFloat = 1.0
    """After SIGINT, how long until SIGKILL."""
    start_timeout_s: PositiveFloat = 30.0
    """A worker's start, its context loaded and its REPL ready."""

    # -- output and messages
    max_output_bytes: Annotated[int, Field(ge=100, le=MOST)] = 1 << 20
    """Kept of what one block prints to one stream: its head and its tail."""
    max_output_lines: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Lines, each ended by a newline, kept of what one block prints to one stream, and as many of what it writes to
    descriptor 1 or 2: head and tail, as far as `max_output_bytes` leaves them; a cut is named."""
    max_frame_bytes: Annotated[int, Field(ge=1 << 12, le=(1 << 32) - 1)] = 64 << 20
    """Largest message that either side of a connection accepts."""
    max_queries_in_flight: PositiveInt = 256
    """Open queries of one REPL. At this number the handler takes no more from it. Each takes a thread of model code, so
    that `max_processes` is reached before, unless it was raised."""

    def repl_bounds(self) -> ReplBounds:
        """Return the limits of one REPL, as its worker is told them: those whose names are fields of `ReplBounds`."""
        return ReplBounds(**{name: getattr(self, name) for name in ReplBounds.__struct_fields__})


class Limits(ReplLimits, RunLimits):
    """Bounds of one run tree, and of each REPL in it: `RunLimits` and `ReplLimits` in one. None means no bound.

    Raises:
        ConfigurationError: There is no limit of a name, or it cannot have the value.
    """


def with_set(base: RunLimits | ReplLimits, limits: RunLimits | ReplLimits) -> Limits:
    """Return the fields of `base` with those in their place that were set when `limits` was made."""
    fields = {**base.model_dump(), **limits.model_dump(include=limits.model_fields_set)}
    if "max_blocks" not in base.model_fields_set | limits.model_fields_set:
        fields.pop("max_blocks", None)  # it follows the turns, also where they are changed
    return Limits(**fields)
