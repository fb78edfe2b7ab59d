"""The REPL: one namespace that lives from block to block, and the loop that runs them."""

import builtins
import contextlib
import io
import json
import mmap
import os
import signal
import sys
import time
import types
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NoReturn

import msgspec

from sandbox_worker.repl.adapted import begin_with
from sandbox_worker.repl.channel import Channel, ConnectionClosed
from sandbox_worker.repl.classes import class_name, is_a
from sandbox_worker.repl.crossing import Crossing, crossing, crossing_of, written_out
from sandbox_worker.repl.displays import Displays, at_end, display
from sandbox_worker.repl.execution import Executor, Outcome
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.printer import Printer
from sandbox_worker.repl.queries import Queries
from sandbox_worker.wire import names
from sandbox_worker.wire.bell import BELL, INTERRUPTED_AT, pending_bytes
from sandbox_worker.wire.control import OUT_OF_MEMORY
from sandbox_worker.wire.errors import FrameTooLarge, ValueInvalid
from sandbox_worker.wire.headtail import OutputBounds
from sandbox_worker.wire.messages import Environment, Execute, Output, Provide, Ready, Result, Stream
from sandbox_worker.wire.values import decode

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_FIRST_CONTEXT = names.numbered(names.CONTEXT, 0)


class Repl:
    """Runs blocks for the orchestrator at the other end of `channel`.

    Args:
        contexts: Name → value: what the REPL holds from the start.
        reserve: Closed while model code runs.
        bounds: Of what is sent of what one block prints to one stream.
        variables: What code finds, and may overwrite for good.
        bell: Memory in which init shows that it has read what was written to the descriptors, and which block it has
            interrupted, see `wire.bell`.
    """

    def __init__(
        self,
        contexts: dict[str, Any],
        channel: Channel,
        interrupts: Interrupts,
        reserve: Reserve,
        bounds: OutputBounds,
        bell: bytes | mmap.mmap,
        variables: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._reserve = reserve
        self._pid = os.getpid()
        self._bell = bell
        self._block = 0
        self._final: str | None = None
        self._final_value = Crossing()
        self._displays = Displays(channel)
        self._queries = queries = Queries(channel, self._flush)
        self._printers = [
            Printer("stdout", bounds, self._print, interrupts.held),
            Printer("stderr", bounds, self._print, interrupts.held),
        ]
        self._stdin = open(os.devnull)  # noqa: SIM115 - it lives as long as the process
        self._answer: dict[str, Any] = _fresh_answer()
        self._provided: dict[str, Any] = {
            "__name__": "__main__",
            "__builtins__": builtins,
            **contexts,
            **({_FIRST_CONTEXT: contexts[names.CONTEXT]} if names.CONTEXT in contexts else {}),
            names.LLM_QUERY: queries.llm_query,
            names.LLM_QUERY_BATCHED: queries.llm_query_batched,
            names.LLM_BATCH: queries.llm_batch,
            names.RLM_QUERY: queries.rlm_query,
            names.RLM_QUERY_BATCHED: queries.rlm_query_batched,
            names.BUDGET: queries.budget,
            names.FINAL: self._submit,
            names.FINAL_VAR: self._submit_variable,
            names.SUBMIT: self._submit_fields,
            names.SHOW_VARS: self._show_vars,
        }
        # A real module: pickle and multiprocessing look up what a block defined in `sys.modules["__main__"]`.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        self._namespace: dict[str, Any] = main.__dict__
        self._namespace.update(variables)
        self._executor = Executor(self._namespace, self._printers[1].write, reserve)
        # What the module `site` gives to other prompts. Its own `exit` closes stdin, for good.
        vars(builtins).update(exit=sys.exit, quit=sys.exit, help=_help, display=display)

    def serve(self) -> NoReturn:
        """Say ready, then run one block after the other until the orchestrator hangs up."""
        try:
            self.say_ready()
            while True:
                self.run_next()
        except ConnectionClosed:
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)

    def say_ready(self) -> None:
        self._channel.send(self._channel.encode(Ready()))

    def run_next(self) -> None:
        """Wait for a block, run it and send its result."""
        self._channel.send_result(self._run(*self._channel.next_block()))

    def _run(self, execute: Execute, given: list[Environment | Provide]) -> bytes:
        """Run one block and return the frame of its result."""
        self._block = execute.block
        self._final = None
        self._final_value = value = Crossing()
        self._interrupts.install()
        self._restore_streams(execute.stdin)
        for printer in self._printers:
            printer.begin_block()
        self._displays.begin_block(execute.block)
        self._provided |= {name: self._queries.tool(name) for name in execute.tools}
        refused = self._take_given(given)
        self._restore_names()
        (rung,) = BELL.unpack_from(self._bell)
        try:
            with self._interrupts.armed():
                if BELL.unpack_from(self._bell, INTERRUPTED_AT) == (execute.block,):
                    raise KeyboardInterrupt  # the signal came before its block
                outcome = refused or self._executed(execute)
                self._show_what_is_open(outcome)
                value = self._asked_for(execute, outcome)
                self._flush_replaced()
        except KeyboardInterrupt:  # it hit between the model's code and ours
            outcome = Outcome("interrupted", "KeyboardInterrupt")
        self._reserve.open()  # an interrupt may have come before
        # Anything else means that model code has broken our own: then this process ends, and a fresh one is forked.
        if os.getpid() != self._pid:
            os._exit(0)  # model code forked, and this is the child: it may not answer for its parent
        for timer in TIMERS:
            signal.setitimer(timer, 0)  # one that went off in a later block would hit it, or between two end the REPL
        for printer in self._printers:
            printer.end_block()
        self._displays.end_block()
        result = Result(
            block=self._block,
            status=outcome.status,
            error=None if outcome.error is None else written_out(outcome.error),
            exit_code=outcome.exit_code,
            final_answer=self._final,
            descriptor_output=self._was_written(rung),
            value=value.encoded,
            value_problem=value.problem,
            final_value=self._final_value.encoded,
            final_value_problem=self._final_value.problem,
            displays_omitted=self._displays.omitted,
        )
        return self._frame_of(result)

    def _executed(self, execute: Execute) -> Outcome:
        if execute.names:
            return Outcome("ok")
        outcome = self._executor.run(execute.block, execute.code, execute.wants_value)
        return self._take_answer_dict() or outcome

    def _show_what_is_open(self, outcome: Outcome) -> None:
        """Show what the block has left open, unless it has to end now."""
        if at_end and outcome.status != "interrupted":
            self._reserve.shut()
            complain = self._printers[1].write
            for show in at_end:
                try:
                    show(complain)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 - model code may have put anything there
                    complain(f"what the block left open cannot be shown: {class_name(error)}\n")

    def _asked_for(self, execute: Execute, outcome: Outcome) -> Crossing:
        """The values that the orchestrator wants of this block."""
        if outcome.status != "ok" or not (execute.names or (execute.wants_value and outcome.value is not None)):
            return Crossing()
        self._reserve.shut()  # a value that needs all memory leaves what the result needs
        if execute.names:
            return crossing_of(execute.names, self._namespace)
        return crossing(outcome.value, "the value")

    def _frame_of(self, result: Result) -> bytes:
        """The result as a frame. What cannot be part of it is left out: a value, or with an error the final answer."""
        try:
            return self._channel.encode(result)
        except (FrameTooLarge, MemoryError) as reason:
            why = _too_large(reason)
        for name in ("final_value", "value"):
            if getattr(result, name) is not msgspec.UNSET:
                problem = {f"{name}_problem": f"the {name.replace('_', ' ')} is {why}"}
                result = msgspec.structs.replace(result, **{name: msgspec.UNSET}, **problem)
                try:
                    return self._channel.encode(result)
                except (FrameTooLarge, MemoryError) as reason:
                    why = _too_large(reason)
        error = f"the final answer is {why}"
        return self._channel.encode(msgspec.structs.replace(result, status="error", error=error, final_answer=None))

    def _was_written(self, rung: int) -> bool:
        """Whether something was written to descriptor 1 or 2: it is still there, or init has read since it rang."""
        try:
            return bool(pending_bytes(1) or pending_bytes(2)) or BELL.unpack_from(self._bell) != (rung,)
        except OSError:  # model code has put something else there
            return True

    # -- output ------------------------------------------------------------------------------------------------------

    def _print(self, stream: Stream, text: str) -> None:
        self._channel.send(self._channel.encode(Output(block=self._block, stream=stream, text=text)))

    def _flush(self) -> None:
        for printer in self._printers:
            printer.send_waiting()

    def _flush_replaced(self) -> None:
        """Have what model code put in the place of stdout hand on what it holds: it may be a wrapper around it."""
        for stream in (sys.stdout, sys.stderr):
            if not isinstance(stream, Printer):
                with contextlib.suppress(Exception):  # it may be anything, and need not have a `flush`
                    stream.flush()

    def _restore_streams(self, stdin: str | None) -> None:
        if self._stdin.closed:
            self._stdin = open(os.devnull)  # noqa: SIM115 - as above
        sys.stdin = self._stdin if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
        sys.stdout, sys.stderr = self._printers
        # Model code that has redirected stdout often ends it with `sys.stdout = sys.__stdout__`.
        sys.__stdout__, sys.__stderr__ = self._printers  # type: ignore[misc, assignment]

    # -- the names that we provide -----------------------------------------------------------------------------------

    def _take_given(self, given: "list[Provide | Environment]") -> Outcome | None:
        """Take what code is to find. A value that cannot be had here is the block's error: it is not run."""
        refused = None
        for each in given:
            if isinstance(each, Environment):
                _enter(each)
                continue
            try:
                self._provided[each.name] = decode(bytes(each.value))
            except ValueInvalid as invalid:
                refused = Outcome("error", f"the value {each.name} cannot be had here: {invalid}")
            else:
                if each.name == names.CONTEXT:
                    self._provided[_FIRST_CONTEXT] = self._provided[names.CONTEXT]
        return refused

    def _restore_names(self) -> None:
        """Put back what a block may have overwritten: `context = "oops"` must not break the run."""
        self._namespace.update(self._provided)
        self._restore_answer()

    def _restore_answer(self) -> None:
        """Make `answer` a dict again. What a block assigned to that name becomes its content: nothing is lost."""
        value = self._namespace.get(names.ANSWER)
        if type(value) is dict:
            return
        self._namespace[names.ANSWER] = _fresh_answer()
        if value is None:
            return
        if is_a(value, dict):  # of a class of the model's, whose methods may do anything: they are called once
            self._namespace[names.ANSWER] = dict(value)
            return
        self._namespace[names.ANSWER]["content"] = value
        if self._final is None:
            self._printers[1].write('`answer` is the dict that submits: your value is now in answer["content"]\n')

    def _take_answer_dict(self) -> Outcome | None:
        """`answer["ready"] = True` submits `answer["content"]`, in whatever order and way the two were filled."""
        try:
            self._submit_answer_dict()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - what stands in `answer` is the model's, its `__str__` may raise
            self._namespace[names.ANSWER] = _fresh_answer()  # or each later block would end like this one
            return Outcome("error", f"the answer cannot be read: {class_name(error)}")
        return None

    def _submit_answer_dict(self) -> None:
        self._restore_answer()
        answer = self._namespace[names.ANSWER]
        if self._final is None and answer.get("ready"):
            content = answer.get("content")
            if content is not None and content != "":
                self._submit(content)
                answer["ready"] = False
            else:
                self._printers[1].write(
                    'answer["ready"] is set, but answer["content"] is empty: nothing was submitted\n'
                )

    def _submit(self, value: Any = None) -> None:
        """End the run: `value` is the answer."""
        if type(value) is dict and value.keys() == _fresh_answer().keys():
            value = value["content"]  # FINAL(answer) means what is in it
        answer = value if is_a(value, str) else _text(value)
        str.encode(answer)  # a lone surrogate is an error where the answer is submitted
        self._final_value = Crossing() if answer is value else crossing(value, "the final answer")
        self._final = answer

    def _submit_variable(self, name: str) -> None:
        """End the run: the value of the variable called `name` is the answer."""
        if not is_a(name, str):  # FINAL_VAR(result) for FINAL_VAR("result"): what is meant is clear
            self._submit(name)
            return
        key = name.strip().strip("\"'`")
        if key not in self._namespace:
            known = ", ".join(self._show_vars()) or "none yet"
            raise NameError(f"FINAL_VAR: there is no variable {key!r}; variables: {known}")
        self._submit(self._namespace[key])

    def _submit_fields(self, *values: Any, **fields: Any) -> None:
        """End the run: one value, or named fields as a JSON object."""
        if fields:
            self._submit(dict(zip((f"field_{i}" for i in range(len(values))), values, strict=False)) | fields)
        else:
            self._submit(values[0] if len(values) == 1 else list(values))

    def _show_vars(self) -> dict[str, str]:
        """Name → type of the variables that exist."""
        own = {names.ANSWER, names.LAST_VALUE, *self._provided}
        # Not looked up by name: a key may be of a class of the model's, which compares itself as it likes.
        found = [(name, value) for name, value in list(self._namespace.items()) if type(name) is str]
        return {
            name: class_name(value)
            for name, value in sorted(found, key=itemgetter(0))
            if name not in own and not name.startswith("__")
        }


def _too_large(error: Exception) -> str:
    if isinstance(error, FrameTooLarge):
        return f"too large: {error}"
    return "too large: there is no memory left for sending it"


def _enter(environment: Environment) -> None:
    """Begin with variables and a seed that were given to this REPL alone."""
    os.environ.update(environment.variables)
    if "TZ" in environment.variables:
        time.tzset()
    if environment.seed is not None:
        begin_with(environment.seed)


def _fresh_answer() -> dict[str, Any]:
    return {"content": "", "ready": False}


def _help(*request: object) -> None:
    """Show the documentation of an object."""
    import pydoc  # most REPLs never need it

    pydoc.help(*request)


def _text(value: Any) -> str:
    if is_a(value, dict, list):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            pass  # not JSON: shown as Python shows it
    return str(value)
