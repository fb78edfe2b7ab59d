"""Random openings and closings: objects on each kind of loop, whose callers are cut off at any moment.

A sequence draws an object, the loop that it lives on, its caller, a cut, the phase in which the cut comes, and whether
the loop is busy. Afterwards the object is closed, and may be opened again if it never was; no process, descriptor,
task, thread or folder is left. A second Ctrl+C on the caller's own loop may leave what the end of the process ends.
"""

import asyncio
import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from rlm_broker import RLM, Sandbox
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import RlmBrokerError
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import place
from rlm_broker.sandbox.template import Template
from scripts.faults import leftovers
from scripts.faults.cell import Report, Scene

OPENING, OPEN, WORKING, CLOSING = PHASES = ("opening", "open", "working", "closing")
CANCEL, EACH_AWAIT, SCOPE, CTRL_C, TWO_CTRL_C, ERROR = CUTS = (
    "cancel",
    "cancel at each await",
    "cancel by anyio",
    "Ctrl+C",
    "Ctrl+C twice",
    "an exception",
)
HERE, OTHER, BACKGROUND = HOMES = ("this loop", "another loop", "the background loop")
THINGS: Final = ("repl", "repl", "repl", "repl", "template", "sandbox", "rlm")
LONGEST_TURNS, LONGEST_S = 200, 0.03
"""Latest moment of a cut in a phase, in turns of the loop and in seconds: about what an opening takes."""
LONGEST_SEQUENCE_S = 100.0
"""Seconds until a sequence counts as hanging. On a busy machine one takes some seconds."""
BUSY_S = 0.002
POOLS: Final = ("asyncio_", "rlm-broker-call-")
"""Beginnings of the names of threads that wait for further work."""
ONE_LOOP: Final = ("repl", "template")
"""Objects that live on the loop of their sandbox for good."""
SHOWN = 3
Thing = SandboxedRepl | Template | Sandbox | RLM


class Planned(Exception):
    """The error that the body of a `with` raises."""


@dataclass(frozen=True)
class Life:
    """One sequence.

    Attributes:
        thing: The object that is opened.
        home: The loop that it lives on.
        is_threads: Whether the caller is a thread, and not a coroutine.
        cut: How the caller is cut off.
        phase: When.
        turns: Turns of the loop until then, from the beginning of the phase.
        delay_s: The same in seconds, for a signal.
        is_busy: Whether the object's loop has other work.
    """

    thing: str
    home: str
    is_threads: bool
    cut: str
    phase: str
    turns: int
    delay_s: float
    is_busy: bool

    @staticmethod
    def drawn(seed: int) -> "Life":
        """Draw a sequence. The same seed draws the same one."""
        chance = random.Random(seed)
        home = chance.choice(HOMES)
        is_threads = home != HERE and chance.random() < 0.4
        return Life(
            chance.choice(THINGS),
            home,
            is_threads,
            chance.choice((CTRL_C, TWO_CTRL_C, ERROR) if is_threads else CUTS),
            chance.choice(PHASES),
            int(LONGEST_TURNS ** chance.random()),
            chance.random() * LONGEST_S,
            chance.random() < 0.4,
        )


def random_sequences(number: int, seed: int = 0) -> Scene:
    """Play sequences, one after the other, and report those that leave something."""

    def scene(_folder: Path) -> Report:
        wrong = []
        with _Homes() as homes:
            for each in range(seed, seed + number):
                life = Life.drawn(each)
                with _ends(life):
                    if left := homes.play(life):
                        wrong.append(f"{life}: {', '.join(left)}")
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        return Report(f"{number} sequences, {len(wrong)} of them wrong", not wrong, left=[*wrong[:SHOWN], *more])

    return scene


@contextlib.contextmanager
def _ends(life: Life) -> Iterator[None]:
    """End this process if a sequence does not end: its stacks and its name are the end of what it says.

    CPython drops a KeyboardInterrupt that comes within a finalizer. The block would sleep on until the cell counts as
    hanging.
    """

    def give_up() -> None:
        faulthandler.dump_traceback(all_threads=True)
        print(f"{life} does not end", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = threading.Timer(LONGEST_SEQUENCE_S, give_up)
    watchdog.name = "watchdog"
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()


class _Homes:
    """Open sandboxes on the background loop and on another one, for all sequences."""

    def __enter__(self) -> "_Homes":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._other = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._other.run_forever, daemon=True)
        self._thread.start()
        self._refs = {OTHER: EventLoopRef(self._other), BACKGROUND: EventLoopRef.background()}
        self._opened = contextlib.ExitStack()
        self._sandboxes = {
            home: self._opened.enter_context(place(Sandbox(warm=0), ref)) for home, ref in self._refs.items()
        }
        for sandbox in self._sandboxes.values():
            with sandbox.repl() as repl:
                repl.execute("1")
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._other.call_soon_threadsafe(self._other.stop)
        self._thread.join()
        self._other.close()

    def play(self, life: Life) -> Sequence[str]:
        """Play one sequence, and return what is wrong afterwards."""
        before = self._counts()
        made: list[Thing] = []
        cut = _Cut(life)

        def make(sandbox: Sandbox | None, ref: EventLoopRef | None) -> Thing:
            made.append(_made(life, sandbox, ref))
            return made[0]

        with self._busy(self._refs[life.home]) if life.is_busy and life.home != HERE else contextlib.nullcontext():
            try:
                try:
                    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError, Planned, RlmBrokerError):
                        if life.is_threads:
                            _threads_life(life, cut, make(self._sandboxes[life.home], self._refs[life.home]))
                        else:
                            asyncio.run(self._coroutines_life(life, cut, make))
                    cut.hold()
                except KeyboardInterrupt:  # the first one, after its sequence, or the second one
                    cut.hold()
            except KeyboardInterrupt:
                cut.hold()
            cut.end()
        if life.home == HERE and life.cut == TWO_CTRL_C:
            # `asyncio.run` raises the second one inside the code that runs then, maybe that of the clean-up, and closes
            # the loop. What is left ends with this process, which the engine looks at.
            return []
        wrong = leftovers.after_a_while(lambda: ["is open"] if made and made[0].is_open else [])
        if made and not wrong:
            wrong = _opened_again(made[0], life)
        return wrong or leftovers.after_a_while(lambda: _differences(before, self._counts()))

    def _counts(self) -> Counter[str]:
        tasks = [task for ref in self._refs.values() for task in asyncio.all_tasks(ref._loop)]
        threads = [each.name for each in threading.enumerate() if not each.name.startswith(POOLS)]
        folders = [f"folder {each.name}" for each in Path(tempfile.gettempdir()).iterdir()]
        counts = Counter([*folders, *(f"thread {name}" for name in threads)])
        counts["process"], counts["task"] = len(leftovers.below()), len(tasks)
        return counts + leftovers.descriptors()

    async def _coroutines_life(
        self, life: Life, cut: "_Cut", make: Callable[[Sandbox | None, EventLoopRef | None], Thing]
    ) -> None:
        async with contextlib.AsyncExitStack() as own:
            if life.home != HERE:
                thing = make(self._sandboxes[life.home], self._refs[life.home])
            elif life.thing in ("sandbox", "rlm"):
                thing = make(None, None)
            else:
                thing = make(await own.enter_async_context(Sandbox(warm=0)), None)
            if life.is_busy and life.home == HERE:
                own.enter_context(self._busy(EventLoopRef.here()))
            if life.cut in (CTRL_C, TWO_CTRL_C):  # asyncio.run cancels its main task
                await _coroutine(life, cut, thing)
            else:
                await _cut_off(_coroutine(life, cut, thing), cut, by_scope=life.cut == SCOPE)

    @contextlib.contextmanager
    def _busy(self, ref: EventLoopRef) -> Iterator[None]:
        """Have the loop compute in each of its turns."""
        ended = threading.Event()

        def burn() -> None:
            until = time.perf_counter() + BUSY_S
            while time.perf_counter() < until:
                pass
            if not ended.is_set():
                ref._loop.call_soon(burn)

        ref.call_soon(burn)
        try:
            yield
        finally:
            ended.set()


class _Cut:
    """Cuts off the caller of one sequence, once its phase has come."""

    def __init__(self, life: Life) -> None:
        self.target: anyio.CancelScope | asyncio.Task[None] | None = None
        self._life = life
        self._sender: threading.Thread | None = None

    def at(self, phase: str) -> None:
        """Say that a phase begins."""
        if phase != self._life.phase or self._life.cut == ERROR:
            return
        if self._life.cut in (CTRL_C, TWO_CTRL_C):
            self._sender = threading.Thread(target=self._send, name="sender")
            self._sender.start()
        else:
            self._in_turns(self._life.turns)

    def hold(self) -> None:
        """Hold back signals that are still to come."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def end(self) -> None:
        """Wait until all signals were sent, and drop those that were held back."""
        if self._sender is not None:
            self._sender.join()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _send(self) -> None:
        for _ in range(2 if self._life.cut == TWO_CTRL_C else 1):
            time.sleep(self._life.delay_s)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _in_turns(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._in_turns, turns - 1)
        elif isinstance(self.target, anyio.CancelScope):
            self.target.cancel()
        elif self.target is not None and not self.target.done():
            self.target.cancel()
            if self._life.cut == EACH_AWAIT:
                loop.call_soon(self._in_turns, 0)


def _made(life: Life, sandbox: Sandbox | None, ref: EventLoopRef | None) -> Thing:
    fails = life.cut == ERROR and life.phase == OPENING
    if life.thing == "sandbox":
        return place(Sandbox(warm=0), ref)
    if life.thing == "rlm" or sandbox is None:
        return RLM("offline", sandbox=sandbox)
    if life.thing == "template":
        return sandbox.template("context", setup="1 / 0" if fails else "x = 1")
    return sandbox.repl(Path("/no/such/file") if fails else "context")


def _repl(thing: Thing) -> SandboxedRepl | contextlib.nullcontext[SandboxedRepl]:
    """Return a REPL of the object, which may be one."""
    if isinstance(thing, SandboxedRepl):
        return contextlib.nullcontext(thing)
    return (thing.sandbox if isinstance(thing, RLM) else thing).repl()


async def _cut_off(body: Coroutine[Any, Any, None], cut: _Cut, *, by_scope: bool) -> None:
    """Run what is cut off, in a scope of anyio or in a task of its own."""
    if by_scope:
        with anyio.CancelScope() as cut.target:
            await body
        return
    task = cut.target = asyncio.create_task(body)
    await asyncio.gather(task, return_exceptions=True)


async def _coroutine(life: Life, cut: _Cut, thing: Thing) -> None:
    cut.at(OPENING)
    async with thing:
        cut.at(OPEN)
        async with _repl(thing) as repl:
            cut.at(WORKING)
            await repl.aexecute(_code(life))
        cut.at(CLOSING)


def _threads_life(life: Life, cut: _Cut, thing: Thing) -> None:
    cut.at(OPENING)
    with thing:
        cut.at(OPEN)
        with _repl(thing) as repl:
            cut.at(WORKING)
            repl.execute(_code(life))
        cut.at(CLOSING)


def _code(life: Life) -> str:
    """Return a block that runs until the cut, if that comes then."""
    if life.cut == ERROR and life.phase != OPENING:
        raise Planned
    return "import time; time.sleep(1000)" if life.phase == WORKING else "1"


def _opened_again(thing: Thing, life: Life) -> list[str]:
    """Open an object again that may be: one whose REPL never was open, and all others."""
    if (isinstance(thing, SandboxedRepl) and thing.is_closed) or (life.home == HERE and life.thing in ONE_LOOP):
        return []
    is_wrong = life.cut == ERROR and life.phase == OPENING and life.thing in ONE_LOOP
    try:
        with thing:
            return []
    except RlmBrokerError as error:
        return [] if is_wrong else [f"cannot be opened again: {error}"]


def _differences(before: Counter[str], after: Counter[str]) -> list[str]:
    return [f"{count} {key}" for key, count in (after - before).items()]
