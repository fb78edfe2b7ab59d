"""The REPL: one namespace for all blocks, the contexts it is given later, and the loop that runs blocks."""

import builtins
import contextlib
import io
import mmap
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NoReturn

import msgspec

from sandbox_worker import RELEASE
from sandbox_worker.loading.context import ContextBroken, Undecoded, load_into
from sandbox_worker.repl.adaptation import begin_with
from sandbox_worker.repl.changes import Changes
from sandbox_worker.repl.channel import FORKED, LOST, Channel, ConnectionClosed, Given
from sandbox_worker.repl.checkpoint import HandedDescriptors, make_checkpoint
from sandbox_worker.repl.displays import Displays, at_end, display
from sandbox_worker.repl.execution import BlockOutcome, Executor, Raised
from sandbox_worker.repl.handles import Handles
from sandbox_worker.repl.helpers import HELPERS
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.objects import Crossing, class_name, crossing, crossing_of, written_out
from sandbox_worker.repl.printer import Printer
from sandbox_worker.repl.queries import Queries
from sandbox_worker.repl.submission import Submission
from sandbox_worker.wire import names
from sandbox_worker.wire.bounds import HeadTail, OutputBounds
from sandbox_worker.wire.control import OUT_OF_MEMORY
from sandbox_worker.wire.descriptors import A_CONTEXT, BELL, INTERRUPTED_AT, pending_bytes
from sandbox_worker.wire.errors import FrameTooLarge, ValueInvalid
from sandbox_worker.wire.messages import (
    MAX_AGAIN_BYTES,
    Attach,
    Environment,
    Execute,
    Output,
    Provide,
    Read,
    Ready,
    Result,
    Stream,
    Values,
    VariableFact,
)
from sandbox_worker.wire.values import decode_context

NO_INPUT = open(0, closefd=False)  # noqa: SIM115 - stays open as long as the process lives
"""`sys.stdin` of blocks without input: descriptor 0, /dev/null in a worker. It is made in the fork server: each REPL
that made one would copy twenty pages."""


class AskedInput(io.RawIOBase):
    """Bytes of `sys.stdin`, each piece asked for when code reads it.

    Args:
        more: Function that returns the next piece; an empty one at the end.
    """

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or self._more()
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


AROUND_VALUES = 1 << 10
"""Bytes of a message beside the values in it."""
SHORT = OutputBounds(max_output_bytes=1 << 16)
"""Bounds of each text that a block without echo has instead of output, where its result is too large for a frame."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_FIRST_CONTEXT = names.numbered(names.CONTEXT, 0)


class Repl:
    """REPL that runs blocks for the orchestrator.

    Args:
        contexts: Name → value, for the contexts that exist from the start.
        channel: Connection to the orchestrator.
        interrupts: State of SIGINT.
        reserve: Memory that is closed while model code runs.
        bounds: Bounds of the output of one block to one stream.
        bell: Memory shared with init, which counts reads of output and names the block to interrupt (`descriptors`).
        variables: Name → value, for further variables that code finds, and may overwrite for good.
        undecoded: Parts of `contexts` that the first block must decode.
        mapping_works: Whether texts of later contexts can be mapped. Otherwise they are copied.
        become_hub: Makes this process a hub, see `init/hub.py`; None if it cannot be forked.
    """

    _has_scaffold = True
    _block = 0

    def __init__(
        self,
        contexts: dict[str, Any],
        channel: Channel,
        interrupts: Interrupts,
        reserve: Reserve,
        bounds: OutputBounds,
        bell: bytes | mmap.mmap,
        variables: Mapping[str, Any] = types.MappingProxyType({}),
        undecoded: Sequence[Undecoded] = (),
        mapping_works: bool = True,
        become_hub: Callable[[HandedDescriptors], mmap.mmap | None] | None = None,
    ) -> None:
        self._channel = channel
        channel.read_variables = self._read
        self._interrupts = interrupts
        self._reserve, self._mapping_works, self._become_hub = reserve, mapping_works, become_hub
        self._contexts, self._undecoded = contexts, [*undecoded]
        self._bell, self._bounds = bell, bounds
        self._displays = Displays(channel)
        self._queries = queries = Queries(channel, self._flush, lambda: self._contexts)
        printing = bounds, self._print, interrupts.held, reserve.helped, self._push
        self._printers = [Printer("stdout", *printing), Printer("stderr", *printing)]
        self._stdin = NO_INPUT
        # Use a real module: pickle and multiprocessing look up definitions of blocks in `sys.modules["__main__"]`.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        self._namespace: dict[str, Any] = main.__dict__
        self._submission = submission = Submission(
            self._namespace, self._printers[1].write, self._show_vars, queries.check_fields
        )
        self._submit = submission.submit
        self._tools: dict[str, Callable[..., Any]] = {}
        self._given: dict[str, str | bytes] = {}
        self._made_before = variables
        self._provided: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": builtins,
            names.CONTEXT: None,  # unless there is a context
            **contexts,
            _FIRST_CONTEXT: contexts.get(names.CONTEXT),
            names.LLM_QUERY: queries.llm_query,
            names.LLM_QUERY_BATCHED: queries.llm_query_batched,
            names.LLM_BATCH: queries.llm_batch,
            names.RLM_QUERY: queries.rlm_query,
            names.RLM_QUERY_BATCHED: queries.rlm_query_batched,
            names.RLM_START: Handles(channel, queries).rlm_start,
            names.BUDGET: queries.budget,
            names.FINAL: submission.final,
            names.FINAL_VAR: submission.final_var,
            names.SUBMIT: self._submit,
            names.SHOW_VARS: self._show_vars,
        }
        self._namespace.update(HELPERS)
        self._namespace.update(variables)
        self._executor = Executor(self._namespace, self._printers[1].write, reserve)
        # The fork server runs without the module `site`, which defines these names. Its `exit` would close stdin.
        vars(builtins).update(exit=sys.exit, quit=sys.exit, help=_help, display=display)

    def serve(self) -> NoReturn:
        """Send `Ready`, then run one block after another until the orchestrator closes the connection."""
        try:
            self.say_ready()
            while True:
                self.run_next()
        except ConnectionClosed:
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)

    def say_ready(self) -> None:
        """Send `Ready`."""
        self._channel.send(self._channel.encode(Ready(RELEASE)))

    def run_next(self) -> None:
        """Wait for a block, run it and send its result."""
        self._channel.send_result(self._run(*self._channel.next_block()))

    def _run(self, execute: Execute, given: list[Given]) -> bytes:
        """Run one block and return the frame of its result."""
        self._block = execute.block
        value = Crossing()
        self._interrupts.install()
        self._restore_streams(execute)
        for printer in self._printers:
            printer.begin_block()
        self._displays.begin_block(execute.block)
        if execute.tools is not None:
            self._offer(execute.tools)
        refused = self._take_given(given)
        if (execute.checkpoint or execute.becomes_hub) and (begun := self._copied(execute)) is not None:
            return begun
        self._namespace.update(self._provided)  # restores names such as `context`, which a block may have reassigned
        if not self._has_scaffold:
            self._lend_submit(execute.submit is not None)
        self._submission.begin(execute.submit)
        (rung,) = BELL.unpack_from(self._bell)
        changes = self._changes() if execute.tells_variables and refused is None else None
        variables: list[VariableFact] = []
        try:
            with self._interrupts.armed():
                if BELL.unpack_from(self._bell, INTERRUPTED_AT) == (execute.block,):
                    raise KeyboardInterrupt  # the signal came before its block was armed, see `interrupts`
                outcome = refused or self._executed(execute)
                variables = [] if changes is None else self._changed(changes)
                self._show_what_is_open(outcome)
                value = self._asked_for(execute, outcome)
                self._flush_replaced()
        except KeyboardInterrupt:  # the signal came while our own code ran around the model code
            outcome = BlockOutcome("interrupted", "KeyboardInterrupt")
        # Any other exception means that model code has broken ours: this process ends, and init forks a fresh REPL.
        self._reserve.open()  # an interrupt may have skipped this
        if os.getpid() != self._channel.owner:
            os._exit(0)  # model code forked, and this is the child: it must not answer for its parent
        for timer in TIMERS:
            signal.setitimer(timer, 0)  # its signal would hit a later block, or end the REPL between two blocks
        for printer in self._printers:
            printer.end_block()
        self._displays.end_block()
        result = Result(
            block=self._block,
            status=outcome.status,
            error=None if outcome.error is None else written_out(outcome.error),
            exit_code=outcome.exit_code,
            final_answer=self._submission.text,
            descriptor_output=self._was_written(rung),
            value=value.encoded,
            value_problem=value.problem,
            final_value=self._submission.value.encoded,
            final_value_problem=self._submission.value.problem,
            draft=self._submission.draft and written_out(self._submission.draft),
            displays_omitted=self._displays.omitted,
            variables=variables,
            **({} if execute.echo else self._unprinted(outcome)),
        )
        return self._frame_of(result)

    def _copied(self, execute: Execute) -> bytes | None:
        """Make a checkpoint, or become a hub. In a copy that goes on as a REPL on a fresh connection, return the frame
        that says ready, in place of the result of a block that another process has begun; else None."""
        lost = LOST
        if execute.becomes_hub and self._become_hub is not None:
            lost, bell = FORKED, self._become_hub(self._handed)
            if bell is None:
                self._now_of_this_process()
                return None
            if isinstance(self._bell, mmap.mmap):
                self._bell.close()  # it is another REPL's, which must not hear of this one
            self._bell = bell
        elif not make_checkpoint(self._handed, execute.checkpoint):
            return None
        self._now_of_this_process()
        self._channel.begin_anew(lost)
        return self._channel.encode(Ready(RELEASE))

    @cached_property
    def _handed(self) -> HandedDescriptors:
        """Receiver of what init hands over. Made when it is needed: most REPLs are handed nothing."""
        return HandedDescriptors()

    def _now_of_this_process(self) -> None:
        """Take this process, which our code has forked, for the REPL."""
        self._channel.owner = os.getpid()
        for printer in self._printers:
            printer.owner = self._channel.owner

    def _unprinted(self, outcome: BlockOutcome) -> dict[str, Any]:
        """Return the fields of a result that a block without echo has instead of output."""
        raised = {} if outcome.raised is None else outcome.raised._asdict()
        texts = {mime: self._cut(text) for mime, text in outcome.forms.texts.items()}
        return {"texts": texts, "pictures": outcome.forms.pictures} | {n: self._cut(text) for n, text in raised.items()}

    def _cut(self, text: str) -> str:
        """Return a text within the bounds of a stream, in which it is not printed."""
        return written_out(_within(self._bounds, text))

    def _executed(self, execute: Execute) -> BlockOutcome:
        if execute.names is not None:
            return BlockOutcome("ok")
        outcome = self._executor.run(execute.block, execute.code, execute.wants_value, execute.echo)
        problem = self._submission.take_answer()
        return outcome if problem is None else BlockOutcome("error", problem)

    def _show_what_is_open(self, outcome: BlockOutcome) -> None:
        """Show figures that the block has left open, unless it was interrupted."""
        if at_end and outcome.status != "interrupted":
            self._reserve.shut()
            complain = self._printers[1].write
            for show in at_end:
                try:
                    show(complain)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 - model code may have replaced any function in `at_end`
                    complain(f"figures that the block left open cannot be shown: {class_name(error)}\n")

    def _asked_for(self, execute: Execute, outcome: BlockOutcome) -> Crossing:
        """Return the values that the orchestrator asked for, encoded."""
        reads = execute.names is not None
        if outcome.status != "ok" or not (reads or (execute.wants_value and outcome.value is not None)):
            return Crossing()
        self._reserve.shut()  # encoding a large value may use all memory but the reserve, which the result needs
        if execute.names is not None:
            return self._crossing_of(execute.names)
        return crossing(outcome.value, "the value")

    def _crossing_of(self, wanted: Sequence[str]) -> Crossing:
        """Return variables, encoded: those of these names, or else all public ones that code has made."""
        public = wanted or [name for name, _ in self._variables() if name.isidentifier() and not name.startswith("_")]
        return crossing_of(public, self._namespace, self._channel.most_bytes(Values) - AROUND_VALUES)

    def _read(self, read: Read) -> bytes:
        """Return the frame of the answer to a `Read`."""
        found = self._crossing_of(read.names)
        return self._channel.encode(Values(read.block, read.number, found.encoded, found.problem))

    def _frame_of(self, result: Result) -> bytes:
        """Return the result as a frame. If it is too large, leave out values first, and the final answer last."""
        try:
            return self._channel.encode(result)
        except (FrameTooLarge, MemoryError) as reason:
            why = _too_large(reason)
        less: list[dict[str, Any]] = [
            {name: msgspec.UNSET, f"{name}_problem": f"the {name.replace('_', ' ')} is {why}"}
            for name in ("final_value", "value")
            if getattr(result, name) is not msgspec.UNSET
        ]
        plain: dict[str, str] = {mime: text for mime, text in result.texts.items() if mime == "text/plain"}
        shorter = {name: _within(SHORT, text) for name in Raised._fields if (text := getattr(result, name)) is not None}
        for changes in (
            *less,
            {"draft": None, "variables": [], "texts": plain, "pictures": {}},
            {"texts": {mime: _within(SHORT, text) for mime, text in plain.items()}, **shorter},
        ):
            result = msgspec.structs.replace(result, **changes)
            try:
                return self._channel.encode(result)
            except (FrameTooLarge, MemoryError) as reason:
                why = _too_large(reason)
        if result.final_answer is None:
            return self._channel.encode(msgspec.structs.replace(result, error=f"the error is {why}"))
        error = f"the final answer is {why}"
        return self._channel.encode(msgspec.structs.replace(result, status="error", error=error, final_answer=None))

    def _was_written(self, rung: int) -> bool:
        """Whether descriptor 1 or 2 was written to: a pipe holds bytes, or the bell has rung since the block began."""
        try:
            return bool(pending_bytes(1) or pending_bytes(2)) or BELL.unpack_from(self._bell) != (rung,)
        except OSError:  # model code has replaced one of the descriptors by a file that is no pipe
            return True

    # -- output ------------------------------------------------------------------------------------------------------

    def _print(self, stream: Stream, text: str) -> None:
        try:
            frame = self._channel.encode(Output(block=self._block, stream=stream, text=text))
        except FrameTooLarge:
            middle = len(text) // 2
            self._print(stream, text[:middle])
            self._print(stream, text[middle:])
        else:
            self._channel.send_output(frame)

    def _push(self) -> None:
        self._channel.push(Output(block=self._block, stream="stdout", text=""))

    def _flush(self) -> None:
        for printer in self._printers:
            printer.send_waiting()

    def _flush_replaced(self) -> None:
        """Flush streams that model code put in the place of stdout and stderr: they may wrap ours, and hold text."""
        for stream in (sys.stdout, sys.stderr):
            if not isinstance(stream, Printer):
                with contextlib.suppress(Exception):  # the object may be of any class, also without a `flush`
                    stream.flush()

    def _restore_streams(self, execute: Execute) -> None:
        if self._stdin.closed:
            self._stdin = open(os.devnull)  # noqa: SIM115 - stays open as long as the process lives
        if execute.asks_stdin:
            sys.stdin = io.TextIOWrapper(io.BufferedReader(AskedInput(self._queries.more_input)), "utf-8")
        elif execute.stdin is not None:
            sys.stdin = io.TextIOWrapper(io.BytesIO(execute.stdin.encode()), "utf-8")
        else:
            sys.stdin = self._stdin
        sys.stdout, sys.stderr = self._printers
        # Model code that has redirected stdout often restores it with `sys.stdout = sys.__stdout__`.
        sys.__stdout__, sys.__stderr__ = self._printers  # type: ignore[misc, assignment]

    # -- provided names ----------------------------------------------------------------------------------------------

    def _attached(self, attach: Attach) -> Any:
        """Return a later context, whose memfds are the next ones that init has handed over.

        Raises:
            ContextBroken: A memfd is missing, or a piece cannot be loaded.
        """
        loaded: dict[str, Any] = {}
        for piece in attach.pieces:
            fd = self._handed.take(A_CONTEXT)
            if fd is None:  # model code has received it itself
                raise ContextBroken("its memfd is missing")
            try:
                self._reserve.lend(piece.form.written_bytes if self._mapping_works else piece.form.mapped_bytes)
                load_into(loaded, "", fd, piece, self._mapping_works, decode_context)
            finally:
                os.close(fd)
        return loaded[""]

    def _decode_contexts(self) -> BlockOutcome | None:
        """Decode the contexts that init has mapped. If one fails, then each block ends with its error."""
        try:
            while self._undecoded:
                self._undecoded[-1].decode(decode_context)
                self._undecoded.pop()
        except ContextBroken as why:
            return BlockOutcome("error", f"the context cannot be loaded: {why}")
        self._provided[names.CONTEXT] = self._contexts[names.CONTEXT]
        if self._has_scaffold:
            self._provided[_FIRST_CONTEXT] = self._contexts[names.CONTEXT]
        return None

    def _take_given(self, given: list[Given]) -> BlockOutcome | None:
        """Take the variables for code. If one cannot be loaded, then the block does not run and ends with an error."""
        refused = self._decode_contexts() if self._undecoded else None
        for each in given:
            if isinstance(each, Environment):
                _enter(each)
                if not each.scaffold:
                    self._remove_scaffold()
                continue
            try:
                value = self._attached(each) if isinstance(each, Attach) else self._provided_value(each)
            except (ValueInvalid, ContextBroken) as why:
                what = "context" if isinstance(each, Attach) else "value"
                refused = BlockOutcome("error", f"the {what} {each.name} cannot be loaded: {why}")
                continue
            if isinstance(each, Attach) or each.name == names.CONTEXT:
                self._contexts[each.name] = value
            if isinstance(each, Attach) or each.is_restored:
                self._provided[each.name] = value
            else:
                self._provided.pop(each.name, None)
                self._namespace[each.name] = value
            if each.name == names.CONTEXT and self._has_scaffold:
                self._provided[_FIRST_CONTEXT] = value
        return refused

    def _provided_value(self, provide: Provide) -> Any:
        """Return a value from the orchestrator. A long text is kept: it may be given again without its content."""
        if isinstance(provide.value, msgspec.UnsetType):
            if (kept := self._given.get(provide.name)) is None:
                raise ContextBroken("it could not be loaded when it was given first")
            return kept
        self._given.pop(provide.name, None)  # also if this one cannot be loaded
        value = decode_context(bytes(provide.value))
        if type(value) in (str, bytes) and len(value) > MAX_AGAIN_BYTES:
            self._given[provide.name] = value
        return value

    def _remove_scaffold(self) -> None:
        """Leave code the names that the caller gave, and no others. No block has run before."""
        self._has_scaffold = self._submission.has_answer = False
        self._executor.last_values = vars(builtins)  # as at a prompt of Python's own: no name of code's is taken
        for name in [name for name in self._namespace if not name.startswith("__")]:
            del self._namespace[name]
        self._namespace.update(self._made_before)
        kept = {"__name__": "__main__", "__builtins__": builtins}
        self._provided = {**kept, **self._contexts, **self._tools}

    def _lend_submit(self, is_wanted: bool) -> None:
        """Let code without a scaffold find `SUBMIT` in a block that shall submit, and in no other one."""
        if is_wanted:
            self._namespace[names.SUBMIT] = self._submit
        elif self._namespace.get(names.SUBMIT) is self._submit:
            del self._namespace[names.SUBMIT]

    def _offer(self, tools: list[str]) -> None:
        """Let code find these tools and no others. A variable of code with the name of a removed tool stays."""
        for name in self._tools.keys() - tools:
            tool = self._tools.pop(name)
            self._provided.pop(name, None)
            if self._namespace.get(name) is tool:
                del self._namespace[name]
        self._tools |= {name: self._queries.tool(name) for name in tools if name not in self._tools}
        self._provided |= self._tools

    def _changes(self) -> Changes | None:
        """Return the variables before a block; None if there is not enough memory."""
        try:
            return Changes(self._variables())
        except MemoryError:
            return None

    def _changed(self, changes: Changes) -> list[VariableFact]:
        try:
            return changes.made(self._variables(), [] if (code := self._executor.compiled) is None else [code])
        except MemoryError:
            return []

    def _show_vars(self) -> dict[str, str]:
        """Return name → type of the existing variables."""
        return {name: class_name(value) for name, value in self._variables()}

    def _variables(self) -> list[tuple[str, Any]]:
        """Return name and value of the variables that code itself made, ordered by name."""
        own = {*self._provided, *((names.ANSWER, names.LAST_VALUE) if self._has_scaffold else ())}
        # Take names and values together. A lookup by name may run `__eq__` of a key whose class is model code's.
        found = [(name, value) for name, value in list(self._namespace.items()) if type(name) is str]
        return [
            (name, value)
            for name, value in sorted(found, key=itemgetter(0))
            if name not in own
            and not name.startswith("__")
            and value is not HELPERS.get(name)
            and value is not self._submit
        ]


def _within(bounds: OutputBounds, text: str) -> str:
    kept = HeadTail(bounds, "")
    return kept.add(text) + kept.finish()


def _too_large(error: Exception) -> str:
    if isinstance(error, FrameTooLarge):
        return f"too large: {error}"
    return "too large: there is no memory left for sending it"


def _enter(environment: Environment) -> None:
    """Set the environment variables and the seed that this REPL alone was given."""
    os.environ.update(environment.variables)
    if "TZ" in environment.variables:
        time.tzset()
    if environment.seed is not None:
        begin_with(environment.seed)


def _help(*request: object) -> None:
    """Show the documentation of an object."""
    import pydoc  # imported here: most REPLs never need it

    pydoc.help(*request)
