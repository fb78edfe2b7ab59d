"""The table: which fault comes in which phases, and what it may cost."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.faults import commands, life_cycles, processes, providers, records, resources, user_code
from scripts.faults.cell import (
    ANSWER,
    BATCH,
    BLOCK,
    DEEP,
    IDLE,
    PHASES,
    QUERY,
    RESULT,
    STARTING,
    VARIABLES,
    WORKING,
    Cell,
    Losses,
    Phase,
    Report,
    Scene,
)
from scripts.faults.descriptors import FREE, few_descriptors
from scripts.faults.stage import Stage, Strike
from scripts.faults.user_code import Act, nothing, raises

REPL_LOST = frozenset({VARIABLES, RESULT})
RESULT_LOST = frozenset({RESULT})
NO_ANSWER = frozenset({ANSWER})
ANYTHING = frozenset({ANSWER, VARIABLES, RESULT})
SEED = 13


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        strike: Injects it when the run is in its phase.
        prepare: Sets the stage before the run begins.
        may_lose: What it costs by its nature, by phase.
        must_tell: Words that the caller must be told.
        quick: Phases of the short form.
        dies, stops, needs: See `Cell`.
    """

    name: str
    strike: Strike = nothing
    phases: Sequence[Phase] = PHASES
    prepare: Callable[[Stage], None] = nothing
    may_lose: Losses = field(default_factory=dict)
    must_tell: str = ""
    quick: Sequence[Phase] = ()
    dies: int | None = None
    stops: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Other:
    """A row of the table that needs no run in a phase."""

    name: str
    scene: Scene
    phase: Phase = "-"
    is_quick: bool = False
    leaves_folder: bool = False


def each(phases: Sequence[Phase], losses: frozenset[str]) -> Losses:
    """The same losses in each of these phases."""
    return dict.fromkeys(phases, losses)


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ASKING: Sequence[Phase] = (QUERY, DEEP)
CALLING: Sequence[Phase] = (IDLE, QUERY, BATCH, DEEP)
OVER_HTTP: Sequence[Phase] = (IDLE, QUERY, BATCH)
CALL_LOST: Losses = {IDLE: NO_ANSWER, QUERY: RESULT_LOST, BATCH: RESULT_LOST, DEEP: RESULT_LOST}
ASKED_LOST: Losses = each(ASKING, RESULT_LOST)
ANYTHING_LOST: Losses = each(PHASES, ANYTHING)


def client(name: str, act: Act, quick: Sequence[Phase] = (), phases: Sequence[Phase] = CALLING) -> Fault:
    """A faulty client."""
    return Fault(f"client {name}", phases=phases, prepare=user_code.client(act), may_lose=CALL_LOST, quick=quick)


def tool(name: str, act: Act) -> Fault:
    """A faulty tool."""
    return Fault(f"tool {name}", phases=ASKING, prepare=user_code.tool(act), may_lose=ASKED_LOST)


def callback(name: str, act: Act, quick: Sequence[Phase] = ()) -> Fault:
    """A faulty callback."""
    return Fault(f"callback {name}", prepare=user_code.callback(act), quick=quick)


def provider(name: str, how: providers.Misbehave, quick: Sequence[Phase] = ()) -> Fault:
    """A faulty provider."""
    prepare = providers.misbehaves(how)
    return Fault(f"provider {name}", phases=OVER_HTTP, prepare=prepare, may_lose=CALL_LOST, quick=quick)


PROCESSES: Sequence[Fault] = (
    Fault(
        "SIGKILL of the fork server",
        processes.signalled(processes.fork_servers, KILL),
        may_lose=each(WORKING, REPL_LOST),
        quick=(STARTING, DEEP),
    ),
    Fault("SIGKILL of init", processes.signalled(processes.inits, KILL), may_lose=each(WORKING, REPL_LOST)),
    Fault(
        "SIGKILL of the REPL",
        processes.signalled(processes.repls, KILL),
        may_lose=each(WORKING, REPL_LOST),
        quick=(BATCH,),
    ),
    Fault(
        "SIGSTOP of the fork server", processes.signalled(processes.fork_servers, STOP), may_lose={STARTING: NO_ANSWER}
    ),
    Fault("SIGSTOP of init", processes.signalled(processes.inits, STOP), may_lose=each(WORKING, REPL_LOST)),
    Fault("SIGSTOP of the REPL", processes.signalled(processes.repls, STOP), may_lose=each(WORKING, REPL_LOST)),
    Fault("SIGKILL of the orchestrator", processes.to_ourselves(KILL), dies=KILL, quick=(DEEP,)),
    Fault("SIGKILL beside a forked process", processes.killed_beside(os.fork), dies=KILL, quick=(BLOCK,)),
    Fault("SIGKILL beside a process that C code forked", processes.killed_beside(ctypes.PyDLL(None).fork), dies=KILL),
    Fault("SIGTERM of the orchestrator", processes.to_ourselves(signal.SIGTERM), dies=signal.SIGTERM),
    Fault("SIGHUP of the orchestrator", processes.to_ourselves(signal.SIGHUP), dies=signal.SIGHUP),
    Fault("SIGSTOP of the orchestrator", processes.to_ourselves(STOP), stops=True),
    Fault("Ctrl+C", processes.to_ourselves(signal.SIGINT), may_lose=each(PHASES, NO_ANSWER), quick=(BLOCK,)),
    Fault("a fork after opening", commands.forked, quick=(IDLE,)),
    Fault("a forked process that lives on", commands.forked_and_alive),
)

RESOURCES: Sequence[Fault] = (
    Fault("EMFILE", resources.no_descriptor, may_lose={STARTING: NO_ANSWER}, quick=(DEEP,)),
    Fault(
        "EMFILE before a child starts",
        resources.no_descriptor,
        (IDLE,),
        lambda stage: setattr(stage, "code", "got = rlm_query('child')"),
        {IDLE: RESULT_LOST},
    ),
    Fault("ENOMEM of the orchestrator", resources.no_memory, may_lose=ANYTHING_LOST),
    Fault("no thread can be started", resources.no_thread, may_lose={STARTING: NO_ANSWER}),
    Fault(
        "no fork server can be started",
        phases=(STARTING,),
        prepare=resources.no_process,
        may_lose={STARTING: NO_ANSWER},
        must_tell="Resource temporarily unavailable",
    ),
    Fault(
        "failing forks of the fork server",
        resources.no_fork,
        (IDLE,),
        lambda stage: resources.become_ordinary(stage, "got = rlm_query('child')"),
        {IDLE: RESULT_LOST},
        needs=resources.NEEDS_A_USER,
    ),
    Fault(
        "ENOSPC of the trace",
        resources.full_disk,
        (STARTING, BATCH, DEEP),  # in the others, as below
        resources.trace_on_small_disk,
        must_tell="No space left",
        quick=(BATCH,),
        needs=resources.NEEDS_ROOT,
    ),
    Fault(
        "ENOSPC of the recording",
        resources.full_disk,
        (IDLE, BATCH),  # in the others, the few lines still fit into what their last page has left
        resources.recording_on_small_disk,
        must_tell="is not whole",
        needs=resources.NEEDS_ROOT,
    ),
    Fault(
        "ENOSPC of the cache", resources.full_disk, WORKING, resources.cache_on_small_disk, needs=resources.NEEDS_ROOT
    ),
    Fault(
        "ENOSPC of the temporary folder",
        phases=(STARTING,),
        prepare=resources.temporary_on_small_disk,
        may_lose={STARTING: NO_ANSWER},
        must_tell="No space left",
        needs=resources.NEEDS_ROOT,
    ),
    Fault("EPIPE of the trace", resources.close_the_pipe, WORKING, resources.trace_to_pipe, must_tell="Broken pipe"),
    Fault("connections cut", resources.cut_connections, may_lose=each(WORKING, REPL_LOST)),
    Fault("clock a year ahead", resources.clock_jumps(resources.YEAR_S)),
    Fault("clock a year back", resources.clock_jumps(-resources.YEAR_S), quick=(QUERY,)),
    Fault("a blocked loop", resources.block_the_loop),
)

USER_CODE: Sequence[Fault] = (
    client("raises SystemExit", raises(lambda: SystemExit(3)), quick=(DEEP,)),
    client("raises KeyboardInterrupt", raises(KeyboardInterrupt)),
    client("raises CancelledError", raises(asyncio.CancelledError)),
    client("raises MemoryError", raises(MemoryError)),
    # Not in a turn of the run: its task is the caller's own, and cancelling that is what cancels a run.
    client("cancels itself", user_code.cancels_itself, phases=(QUERY, BATCH, DEEP)),
    client("never returns", user_code.never),
    client("ignores cancellation", user_code.deaf),
    client("returns a number", lambda: 7),
    client("returns an object", object),
    tool("raises SystemExit", raises(lambda: SystemExit(3))),
    tool("raises KeyboardInterrupt", raises(KeyboardInterrupt)),
    tool("never returns", user_code.hangs),
    tool("ignores cancellation", user_code.deaf),
    tool("returns an object", object),
    tool("returns what contains itself", user_code.circular),
    tool("returns 80 MB", lambda: "x" * (80 << 20)),
    callback("raises SystemExit", raises(lambda: SystemExit(3)), quick=(BATCH,)),
    callback("raises KeyboardInterrupt", raises(KeyboardInterrupt)),
    callback("raises CancelledError", raises(asyncio.CancelledError)),
    callback("raises BrokenPipeError", raises(BrokenPipeError)),
)

PROVIDERS: Sequence[Fault] = (
    provider("resets", providers.reset, quick=(BATCH,)),
    provider("stalls", providers.stall),
    provider("sends body without end", providers.endless),
    provider("sends headers without end", providers.endless_head),
    provider("sends half JSON", providers.replies(200, providers.completion("answered")[:60])),
    provider("sends a gzip bomb", providers.replies(200, providers.bomb, content_encoding="gzip")),
    provider("sends other kinds", providers.replies(200, providers.NOT_TEXT)),
    provider("sends a page of 20 MB with its error", providers.replies(500, b"<html>" + b"x" * (20 << 20))),
    provider("sends elsewhere", providers.replies(307, location="http://169.254.169.254/latest/meta-data")),
    *(
        provider(f"says Retry-After: {value}", providers.replies(429, providers.SLOW_DOWN, retry_after=value))
        for value in ("1e300", "-5", "nan", "99999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT", "soon")
    ),
)

OTHERS: Sequence[Other] = (
    *(
        Other(f"EMFILE with {FREE.start} to {FREE.stop - 1} free numbers at {level}", few_descriptors(level))
        for level in ("strict", "standard")
    ),
    Other("trace truncated at every byte", records.truncated(records.traced, records.open_trace, 1)),
    Other("recording truncated at every byte", records.truncated(records.recorded, records.open_recording, 1)),
    Other("cache truncated at every byte", records.truncated(records.cached, records.open_cache, 1)),
    Other("trace truncated", records.truncated(records.traced, records.open_trace, 97), is_quick=True),
    Other("recording truncated", records.truncated(records.recorded, records.open_recording, 197), is_quick=True),
    Other("cache truncated", records.truncated(records.cached, records.open_cache, 997), is_quick=True),
    Other("two processes trace to one file", records.both(records.write_trace, records.look_at_trace)),
    Other(
        "two processes record to one file",
        records.both(records.write_recording, records.look_at_recording),
        is_quick=True,
    ),
    Other("two processes keep replies in one file", records.both(records.write_cache, records.look_at_cache)),
    Other("SIGTERM of ask at 34 random moments", commands.stormy(signal.SIGTERM, 34, SEED)),
    Other("SIGHUP of ask at 33 random moments", commands.stormy(signal.SIGHUP, 33, SEED + 1)),
    Other("Ctrl+C of ask at 33 random moments", commands.stormy(signal.SIGINT, 33, SEED + 2)),
    Other("stdout of ask closed", commands.closed_stdout),
    *(
        Other(
            f"100 openings and closings cut off, from {seed}",
            life_cycles.random_sequences(100, seed),
            is_quick=not seed,
            leaves_folder=True,
        )
        for seed in range(0, 1_100, 100)  # one cell of 1,100 would take too long on a busy machine
    ),
    *(
        Other("interpreter exits with everything open", commands.left_open(phase), phase, is_quick=phase == DEEP)
        for phase in PHASES
    ),
)


def cells() -> Iterator[Cell]:
    """Every fault in every phase in which it can come."""
    for fault in (*PROCESSES, *RESOURCES, *USER_CODE, *PROVIDERS):
        for phase in fault.phases:
            yield Cell(
                fault.name,
                phase,
                partial(_scene, fault, phase),
                fault.may_lose.get(phase, frozenset()),
                dies=fault.dies,
                stops=fault.stops,
                is_quick=phase in fault.quick,
                needs=fault.needs,
            )
    for other in OTHERS:
        yield Cell(
            other.name,
            other.phase,
            other.scene,
            leaves_folder=other.leaves_folder or other.phase == STARTING,  # an interpreter that exits then
            is_quick=other.is_quick,
        )


def _scene(fault: Fault, phase: Phase, folder: Path) -> Report:
    stage = Stage(phase, folder)
    fault.prepare(stage)
    if phase == STARTING and fault.strike is nothing:  # it is there before any process could show that one starts
        stage.arrived.set()
    report = stage.play(fault.strike)
    if fault.must_tell and fault.must_tell not in report.told:
        report.is_sensible = False
    return report
