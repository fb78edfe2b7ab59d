"""Results of a block: its output, the fields it submits, the values it sends, and the end of its REPL.

Values of a REPL are untrusted: bounded, decoded, and replaced by a sentence where they are invalid.
"""

import asyncio
import codecs
import functools
import re
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError, ValueUnavailable
from rlm_broker.events.callback import Callback
from rlm_broker.results import Block, PostMortem, Sent, Unprinted, Variable, with_values
from rlm_broker.values.display import Display
from rlm_broker.values.names import require_field_names
from rlm_broker.values.text import as_json, jsonable
from rlm_broker.values.validation import Unfit
from sandbox_worker.wire import messages
from sandbox_worker.wire.bounds import WATCHED, HeadTail, OutputBounds
from sandbox_worker.wire.control import BROKEN, OUT_OF_MEMORY, Died, Exceeded, LastSeen, Written
from sandbox_worker.wire.errors import FrameTooLarge, ValueInvalid
from sandbox_worker.wire.messages import MAX_DRAFT_CHARS, EncodedValue, Output, Result, Stream, Submit, Values
from sandbox_worker.wire.mime import MimeType
from sandbox_worker.wire.values import MAX_DECODED_VALUES, decode

OnOutput = Callable[[Stream, str], None]
"""Called with each piece of output as it comes. An exception it raises is logged once for each block."""
OnDisplay = Callable[[Display], None]
"""Called with each display as it comes. An exception it raises is logged once for each block."""


class BlockOutput:
    """Collects one block's output and its `displays`, and passes both on as they come.

    The bounds hold for each of the two ways of a stream, the connection and the descriptor, also if the worker ignores
    them. The head and tail of a stream stay within both together. The session has bounded the displays.
    """

    def __init__(
        self, bounds: OutputBounds, on_output: OnOutput | None = None, on_display: OnDisplay | None = None
    ) -> None:
        self.displays: list[Display] = []
        self._on_output = None if on_output is None else Callback(on_output, "on_output")
        self._on_display = None if on_display is None else Callback(on_display, "on_display")
        self._bounds = bounds
        # Made with the first output: most blocks print to one stream, and write to no descriptor.
        self._streams: dict[Stream, tuple[HeadTail[str], list[str]]] = {}
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {}

    def printed(self, output: Output) -> None:
        """Add text that Python code printed."""
        self._add(output.stream, output.text)

    def shown(self, message: Output | messages.DisplayMessage) -> None:
        """Add text or a display that came over the connection."""
        if isinstance(message, Output):
            self.printed(message)
        else:
            display = Display(dict([*message.pictures.items(), *message.texts.items()]))
            self.displays.append(display)
            if self._on_display is not None:
                self._on_display(display)

    def written(self, written: Written) -> None:
        """Add bytes written to a descriptor, by C code or a program."""
        if written.stream not in self._decoders:
            self._decoders[written.stream] = codecs.getincrementaldecoder("utf-8")("replace")
        self._add(written.stream, self._decoders[written.stream].decode(written.data))

    def bounded(self, text: str) -> str:
        """Return a text that was not printed, within the bounds of a stream."""
        kept = HeadTail(self._bounds.both_ways(), "")
        return kept.add(text) + kept.finish()

    def finish(self) -> tuple[str, str]:
        """Return all of stdout and all of stderr, with the tails that were kept."""
        return self._whole("stdout"), self._whole("stderr")

    def _whole(self, stream: Stream) -> str:
        if stream not in self._streams:
            return ""
        kept, pieces = self._streams[stream]
        self._keep(stream, pieces, kept.finish())
        return "".join(pieces)

    def _add(self, stream: Stream, text: str) -> None:
        if stream not in self._streams:
            # The REPL's own code keeps to the bounds of each way. Only output that model code forges is cut here.
            self._streams[stream] = HeadTail(self._bounds.both_ways(), ""), []
        kept, pieces = self._streams[stream]
        self._keep(stream, pieces, kept.add(text))

    def _keep(self, stream: Stream, pieces: list[str], piece: str) -> None:
        if piece:
            pieces.append(piece)
            if self._on_output is not None:
                self._on_output(stream, piece)


_threads = DaemonThreads(16)


class SubmitFields:
    """The fields of one block's submission: `names` in order, and their checked `values`, None before.

    Args:
        types: Field → its type, as `WantedType` takes it. An empty mapping stands for one value of any type. `Any` has
            no validator: making one takes longer than a short block.

    Raises:
        ConfigurationError: A field is not a name, or its type cannot be validated.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        require_field_names(types)
        from rlm_broker.values.answer_types import WantedType

        self._types = {
            name: None if wanted is Any else WantedType(wanted, f"the field {name}", name)
            for name, wanted in types.items()
        }
        self.names = tuple(self._types)
        self.values: dict[str, Any] | None = None
        self._check: Future[Any] | None = None

    @classmethod
    def of(cls, submit: object) -> "SubmitFields | None":
        """Return the fields for the argument `submit`: True stands for one value of any type, and a mapping goes from
        field to type. For None or False, return None: the block does not end at a submission. Raise ConfigurationError
        for anything else."""
        if submit is None or submit is False:
            return None
        if submit is not True and not isinstance(submit, Mapping):
            kind = type(submit).__name__
            raise ConfigurationError(
                f"submit must be True or a dict from field to type, such as {{'answer': str}}, not {kind}"
            )
        if submit == {}:
            raise ConfigurationError("submit has no fields: give one, such as {'answer': str}, or True for any value")
        return cls({} if submit is True else submit)

    async def check(self, submitted: Submit) -> str | None:
        """Return what is wrong with the fields of a submission; None if they are right.

        Check in a thread, since a type may have a package imported. Each block uses one of these threads at most.
        """
        if self._check is not None and not self._check.done():
            return "another submission of this block is being checked"
        self._check = _threads.submit(partial(self._take, bytes(submitted.fields)))
        problem: str | None = await asyncio.wrap_future(self._check)
        return problem

    def _take(self, encoded: bytes) -> str | None:
        """Keep the values of the fields, or return what is wrong with them."""
        try:
            given = decode(encoded, MAX_DECODED_VALUES)
        except ValueInvalid as invalid:
            return f"the submission is invalid: {invalid}"
        if type(given) is not dict or given.keys() != self._types.keys():
            return f"give the fields {', '.join(self.names)}, each once; {_fields_of(given)}"
        try:
            checks = self._types.items()
            self.values = {name: given[name] if wanted is None else wanted.of(given[name]) for name, wanted in checks}
        except Unfit as unfit:
            return str(unfit)
        return None


def _fields_of(given: object) -> str:
    if type(given) is not dict:
        return "given was no dict of fields"
    return f"given were {', '.join(map(str, given)) or 'none'}"[:200]


MAX_PROBLEM_CHARS = 2_000
"""Characters of the sentence on why there is no value; a longer one is cut. The REPL's own code sends fewer."""


class SentValue:
    """One value, or the REPL's words on why there is none. The thread that first looks at it decodes it: no event loop
    waits for that."""

    def __init__(self, encoded: bytes, problem: str | None) -> None:
        self._encoded = encoded
        self._problem = problem

    @property
    def value(self) -> Any:
        """Value as Python has it; None if there is a problem."""
        return self._decoded[0]

    @property
    def problem(self) -> str | None:
        """Reason why there is no value; None if there is one."""
        return self._decoded[1]

    @functools.cached_property
    def _decoded(self) -> tuple[Any, str | None]:
        if self._problem is not None:
            return None, self._problem[:MAX_PROBLEM_CHARS]
        try:
            return decode(self._encoded, MAX_DECODED_VALUES), None
        except ValueInvalid as invalid:
            return None, f"the REPL sent an invalid value: {invalid}"


class CheckedValue(NamedTuple):
    """A value checked by the orchestrator."""

    value: Any
    problem: None = None


def sent_value(encoded: EncodedValue, problem: str | None) -> SentValue | None:
    """Return the value of a result, or None."""
    if isinstance(encoded, msgspec.UnsetType):
        return None if problem is None else SentValue(b"", problem)
    return SentValue(bytes(encoded), problem)


def read_block(read: Values) -> Block:
    """Return variables of a block that waits, as the block that reads variables at any other time has them."""
    return with_values(Block("", "ok"), sent_value(read.value, read.value_problem), None)


def variables_of(names: tuple[str, ...], block: Block) -> dict[str, Any]:
    """Return name → value of variables in a block that has read them, or the `ValueUnavailable` that says why not.

    The value in the block is a list of two dicts: name → value, and name → reason why there is no value.

    Args:
        names: Names of the variables; without names, all that the block has.

    Raises:
        ValueUnavailable: The block failed, or the REPL sent something else.
    """
    which = f"{', '.join(names) or 'no variable':.200} is not available"
    if block.status != "ok":
        raise ValueUnavailable(f"{which}: {block.error}")
    if block.value_problem is not None:
        raise ValueUnavailable(block.value_problem)
    match block.value:
        case [dict(values), dict(problems)]:
            told = {name: ValueUnavailable(str(why)[:MAX_PROBLEM_CHARS]) for name, why in problems.items()}
            found = {name: value for name, value in (told | values).items() if type(name) is str}
            if not names:
                return dict(sorted(found.items()))
            missing = ValueUnavailable(f"{which}: the REPL sent other values")
            return {name: found.get(name, missing) for name in names}
    raise ValueUnavailable(f"{which}: the REPL sent other values")


def values_of(names: tuple[str, ...], block: Block) -> Any:
    """Return values of `variables_of`: for one name its value, for several a tuple.

    Raises:
        ValueUnavailable: As for `variables_of`, or one of the values is not available.
    """
    found = variables_of(names, block)
    for value in found.values():
        if isinstance(value, ValueUnavailable):
            raise value
    return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)


_FRAME = re.compile(r'^  File "<block (\d+)>", line (\d+) in (\S{1,100})$', re.MULTILINE | re.ASCII)
_BY_SIGNAL: dict[int, str] = {
    signal.SIGABRT: " (C code gave up, for example because it got no memory)",
    signal.SIGSEGV: " (a crash in C code, or too deep a recursion)",
    signal.SIGXFSZ: " (it wrote a larger file than scratch_bytes allows)",
    signal.SIGSYS: " (a system call of a wrong architecture)",
}
_BY_EXIT_CODE: dict[int | None, str] = {
    OUT_OF_MEMORY: "it used up its memory (memory_bytes) to the point that its REPL could not go on",
    BROKEN: "it broke the REPL that it runs in",
}
"""Reason → sentence for exit codes of the REPL's own. Model code can end its process with these codes as well, and then
misleads only the model that wrote it."""


def reason_of_death(died: Died | Exceeded) -> str:
    """Return the reason why a REPL has ended, as one clause."""
    match died:
        case Exceeded(limit="block_timeout_s", used=used):
            return (
                f"it and what it had left running used {used:.4g} s CPU time, more than all CPUs have within its limit"
            )
        case Exceeded(limit=limit, used=used, allowed=allowed):
            _, divisor, unit = WATCHED[limit]
            return f"its processes used {used / divisor:.4g} {unit} together, {limit} = {allowed / divisor:.4g} {unit}"
        case Died(signal=int(number)):
            return f"its process was ended by {_signal_name(number)}{_BY_SIGNAL.get(number, '')}"
    return _BY_EXIT_CODE.get(died.exit_code, f"its process ended by itself with exit code {died.exit_code} (os._exit)")


def located(seen: LastSeen | None, block: int) -> PostMortem:
    """Return what init saw, if it did, with the line of the model's code in the block of this number. The stack is the
    REPL's word, and so untrusted."""
    seen = seen or LastSeen()
    lines = [line for line in seen.stack.splitlines() if "/sandbox_worker/" not in line]  # without the worker's frames
    stack = "\n".join(line[:200] for line in lines)
    frame = _FRAME.search(stack)
    where = ""
    if frame is not None:
        number, line, function = frame.groups()
        which = "the block" if int(number) == block else "an earlier block"
        where = f"It was at line {line} of {which}{'' if function == '<module>' else f', in {function}'}"
    return PostMortem(where, stack, seen.memory_bytes, seen.cpu_s, seen.processes, seen.threads)


def sentence_of_death(why: str, post_mortem: PostMortem) -> str:
    """Return the reason, the place and the resources in use, as sentences for the model."""
    parts = [why]
    if post_mortem.where:
        parts.append(post_mortem.where)
    if post_mortem.processes:
        mib = post_mortem.memory_bytes / (1 << 20)  # private memory alone: under 1 MiB for a small program
        memory = "less than 1 MiB" if mib < 1 else f"{mib:,.0f} MiB"
        parts.append(f"It used {memory} (processes: {post_mortem.processes:,}, threads: {post_mortem.threads:,})")
    return ". ".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


_NO_MEMORY = re.compile(r"MemoryError|.*(failed to map segment|annot allocate memory|std::bad_alloc)")
"""Errors of code that found no memory. C code says so in words of its own, as the loader of libraries does."""
MAX_ERROR_CHARS = 2_000
"""Characters of the sentence on how a block ended; a longer one is cut. The REPL's own code sends fewer."""


def _limit_of(result: Result, interrupted_by: str | None) -> str | None:
    """Return the name of the limit that interrupted a block, or that left its code without memory; else None."""
    if result.status == "interrupted":
        return interrupted_by
    ran_out = result.status == "error" and _NO_MEMORY.match(result.error or "") is not None
    return "memory_bytes" if ran_out else None


def _unprinted(result: Result, output: BlockOutput) -> Unprinted:
    forms: dict[MimeType, str | bytes] = dict([*result.pictures.items(), *result.texts.items()])
    if "text/plain" in result.texts:
        forms["text/plain"] = output.bounded(result.texts["text/plain"])
    told = (result.error_type, result.error_text, result.traceback)
    return Unprinted(Display(forms) if forms else None, *(text and output.bounded(text) for text in told))


class BlockSpec(msgspec.Struct):
    """One block to run. It makes the outcome of what the REPL says.

    Attributes:
        code: Its source; empty if it only reads variables, or becomes a hub.
        wanted: Its further input, and values for its result.
        output: Collects its output.
        answer: Answers its queries.
        timeout_s: Compute time in seconds until it is interrupted.
        wall_timeout_s: Wall time in seconds until then, waiting for replies included.
        fields: Fields to submit; None if there are none. With names, only their checked values count as submitted.
    """

    code: str
    wanted: Wanted
    output: BlockOutput
    answer: QueryHandler
    timeout_s: float
    wall_timeout_s: float
    fields: SubmitFields | None = None

    def ended(self, result: Result, limit: str | None, execution_time: float) -> Block:
        """Return the block, whose REPL said how it ended. Its values are decoded when they are first looked at. `limit`
        names the limit that interrupted it, or is None."""
        wanted, fields = self.wanted, self.fields
        stdout, stderr = self.output.finish()
        final_answer = result.final_answer
        final_value: Sent | None = sent_value(result.final_value, result.final_value_problem)
        if fields is not None and fields.names:
            if final_answer is not None:  # made anew of the checked values: the REPL's own text is untrusted
                final_answer = None if fields.values is None else as_json(jsonable(fields.values))
            final_value = CheckedValue(fields.values)
        block = Block(
            code=self.code,
            status=result.status,
            stdout=stdout,
            stderr=stderr,
            error=result.error and result.error[:MAX_ERROR_CHARS],
            exit_code=result.exit_code,
            final_answer=final_answer,
            draft=result.draft and result.draft[:MAX_DRAFT_CHARS],
            limit=None if result.status == "ok" else _limit_of(result, limit),
            execution_time=execution_time,
            displays=tuple(self.output.displays),
            displays_omitted=result.displays_omitted,
            variables=tuple(Variable(each.name, each.type, each.size) for each in result.variables if wanted.variables),
        )
        return with_values(
            block,
            sent_value(result.value, result.value_problem) if wanted.value or wanted.names is not None else None,
            None if final_answer is None else final_value,
            None if wanted.echo else _unprinted(result, self.output),
        )

    def unsent(self, error: Exception) -> Block:
        """Return the block, which was not sent: it is too long, or has a lone surrogate, as the compiler says."""
        if isinstance(error, FrameTooLarge):
            why = f"code and stdin are too long for a message: {error}; raise max_frame_bytes"
        else:
            why = f"UnicodeEncodeError: {error}"
        return Block(self.code, "error", error=why)

    def killed(self, why: str, seen: PostMortem, limit: str | None, execution_time: float, undone: int | None) -> Block:
        """Return the block, whose REPL was killed.

        Args:
            why: Reason of the kill, as one clause, and sentences on what has not come back.
            seen: State of the REPL just before, as init saw it.
            limit: Name of the limit that was reached, or None.
            undone: Number of blocks whose variables are lost with the REPL, this one included; None for all of them.
        """
        stdout, stderr = self.output.finish()
        return Block(
            self.code,
            "killed",
            stdout,
            stderr,
            why,
            execution_time=execution_time,
            limit=limit,
            post_mortem=seen,
            displays=tuple(self.output.displays),
            blocks_undone=undone,
        )
