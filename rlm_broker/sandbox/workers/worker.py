"""A handle on a worker: start, interrupt, drain, stop, kill, without the REPL's own connection."""

import asyncio
import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rlm_broker.errors import ContextRefused, FileRefused, ForkRefused, SandboxFailed, WorkerDied, refused_by_machine
from rlm_broker.sandbox.workers.cgroups import MemoryGroup
from rlm_broker.sandbox.workers.held_process import ContextPieces, WorkerInit
from rlm_broker.sandbox.workers.levels import unavailable
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.wire import control
from sandbox_worker.wire.level import Level

PROGRAM_END_S = 30.0
"""Seconds until init has ended a program: init finds each of its processes, maybe hundreds of busy ones."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds until init counts as dead, and is killed. It has no other work; to end 64 processes takes it 0.1 s."""
NOT_FORKED = "this REPL cannot be forked"
_FORK_ERRORS = {
    errno.EAGAIN: "max_processes leaves no room for it, and each fork takes two processes",
    errno.E2BIG: "REPLs were forked at seven moments before this one, and Landlock keeps no more apart",
}
"""Error number of a fork → why there is none, as one clause."""
BEGINS_AGAIN_S = 0.1
"""Seconds after a `Begin` within which a further block needs none at once. Init samples all processes meanwhile, as it
does those of a block that sleeps. It counts the CPU time of all these blocks as that of one, which `timeout_s` of 0.1 s
allows on all CPUs."""
SEED_BYTES = 4
"""Bytes of a seed, as `Sandbox(seed=)` has."""

A = TypeVar("A", bound=control.Control)
_Said = tuple[control.Control, *tuple[int | None, ...]]
"""A message, with the descriptors beside it; None is none."""


class Worker:
    """One worker: what its init is asked, and what it says.

    Attributes:
        died: How the REPL ended by itself or at a limit; None while it lives, or if the orchestrator ended it.
        gone: Set when init is dead, and with it all processes of the worker.
        why_gone: Reason of an end that this process has not asked for, as one clause.
        layers: Layers of init and of the REPL, as they reported them before any model code ran.
        on_written, on_burned: Called with bytes written to the REPL's descriptors 1 and 2; with seconds of its CPU
            time.
        on_checkpointed: Called when the REPL has made a checkpoint.
        on_change: Called when `died` or `gone` changes.
        cpus: CPUs for all its processes.
        seed: Seed of the random numbers in each of its REPLs: the fork server's, or else one of its own.
        scratch: Its folder on the host, at a level without a root of its own; else empty.
    """

    def __init__(
        self,
        level: Level,
        init: WorkerInit,
        scratch: str = "",
        group: MemoryGroup | None = None,
        seed: int | None = None,
    ) -> None:
        self.died: control.Died | control.Exceeded | None = None
        self.gone = asyncio.Event()
        self.why_gone = "the sandbox's processes were ended from outside"
        self.layers: tuple[str, ...] = ()
        self.on_written: Callable[[control.Written], None] = _ignore
        self.on_burned: Callable[[float], None] = _ignore
        self.on_checkpointed: Callable[[control.Checkpointed], None] = _ignore
        self.on_change: Callable[[], None] = _ignore
        self.cpus = len(os.sched_getaffinity(0))
        self.scratch = scratch
        self.seed = int.from_bytes(os.urandom(SEED_BYTES)) if seed is None else seed
        self.group = group
        self._level = level
        self._answers: asyncio.Queue[control.FromInit | OSError | None] = asyncio.Queue()
        self._exchanging = asyncio.Lock()  # held until all answers of an exchange have come
        self._loop = asyncio.get_running_loop()
        self.init = init
        init.listener = self
        self._programs: dict[int, asyncio.Future[control.ProgramEnded | None]] = {}
        self._programs_started = 0
        self._begun_at = -math.inf

    async def launch(self, context: ContextPieces | None, connection_fd: int, timeout_s: float) -> None:
        """Wait until init is isolated, has loaded the context and forked a REPL that uses `connection_fd`. All requests
        for it are sent at once.

        Args:
            context: Pieces of the context, each with its descriptor; None for that of the fork server, if it has one.

        Raises:
            IsolationUnavailable: A layer could not be applied.
            ContextRefused: The context cannot be loaded.
            WorkerDied: Init ended instead.
        """
        if context:
            await self.init.bring(context)
        pieces: Sequence[tuple[int | None, ContextPiece | None]] = context or [(None, None)]
        messages: list[_Said] = [(control.Load(piece=piece), fd) for fd, piece in pieces]
        messages.append((control.Start(self.seed), connection_fd))
        kinds: list[type[control.Control]] = [*[control.Loaded] * len(pieces), control.Started]
        loaded, *_, started = await self._exchange(messages, *kinds, timeout_s=timeout_s)
        assert isinstance(loaded, control.Loaded)
        assert isinstance(started, control.Started)
        self.layers = tuple(dict.fromkeys([*loaded.layers, *started.layers]))

    async def start(self, connection_fd: int, timeout_s: float) -> None:
        """Fork a REPL that uses `connection_fd`, after all processes of the last one were killed."""
        self._forget_last()
        await self._ask(control.Started, control.Start(self.seed), connection_fd, timeout_s=timeout_s)

    async def prepare_checkpoint(self, number: int) -> str | None:
        """Have init prepare a checkpoint, which the REPL makes before its next block. Return why it can make none now,
        as one clause; else None."""
        return (await self._ask(control.Prepared, control.Checkpoint(number))).problem

    async def prepare_fork(self, needs_hub: bool, control_fd: int, connection_fd: int, bell_fd: int) -> None:
        """Have init prepare a fork of the REPL, see `ForkRepl`. Raise ForkRefused if there can be none now."""
        fds = control_fd, connection_fd, bell_fd
        if (problem := (await self._ask(control.Prepared, control.ForkRepl(needs_hub), *fds)).problem) is not None:
            raise ForkRefused(f"{NOT_FORKED}: {problem}")

    async def forked(self, timeout_s: float) -> None:
        """Wait until this worker, which is a fork, has its processes. Raise ForkRefused if they cannot be forked,
        WorkerDied if they have ended."""
        await self._exchange([], control.Started, timeout_s=timeout_s)

    async def resume(self, checkpoint: int, connection_fd: int) -> None:
        """Have the checkpoint of that number go on as the REPL, with `connection_fd`, after `stop`. Raise SandboxFailed
        if it is not there."""
        self._forget_last()
        if not (await self._ask(control.Handed, control.Resume(checkpoint), connection_fd)).taken:
            raise SandboxFailed("there is no such checkpoint any more")

    def _forget_last(self) -> None:
        """Forget how the last REPL has ended."""
        self.died = None
        self._begun_at = -math.inf

    @property
    def is_begun(self) -> bool:
        """Whether init has had a `Begin` just now, and a block may start that it hears of later, if it lasts.

        Not for the first block of a REPL process, which init does not watch before; nor if bytes were written since,
        which would count against the block; nor if a control group has to forget earlier kills.
        """
        return time.monotonic() - self._begun_at < BEGINS_AGAIN_S and self.group is None

    def begin(self, cpu_s: float, is_late: bool = False) -> None:
        """Have init watch closely, since a block starts, or runs since a moment ago. It and the processes it leaves may
        use `cpu_s` seconds of CPU time until the next block."""
        if self.group is not None:
            self.group.new_kills()
        self._begun_at = time.monotonic()
        self.init.say(control.Begin(cpu_s=cpu_s, is_late=is_late))

    async def hand(self, context: ContextPieces) -> None:
        """Hand the memfds of a context to the REPL, which takes them before its next block. Raise ContextRefused if too
        many wait there, WorkerDied if init has ended."""
        await self.init.bring(context)
        said: list[_Said] = [(control.Hand(), fd) for fd, _ in context]
        answers = await self._exchange(said, *[control.Handed] * len(said))
        if not all(isinstance(each, control.Handed) and each.taken for each in answers):
            raise ContextRefused("a REPL takes no more contexts before its next block: run one first")

    async def interrupt(self, block: int) -> None:
        """Send SIGINT to the REPL if it runs the block of this number. The signal is queued before any later message
        arrives."""
        await self._ask(control.Interrupted, control.Interrupt(block=block))

    async def drain(self) -> None:
        """Wait until all that was written to descriptors 1 and 2 so far has been passed to `on_written`."""
        await self._ask(control.Drained, control.Drain())

    async def stop(self, explain: bool = False) -> control.Stopped:
        """Kill the REPL and all that it started, but for its checkpoints; return when they have ended and their last
        output was passed on, with the numbers of the checkpoints. If init is to `explain`, it looks at the REPL first,
        and its state is returned, too."""
        stopped = await self._ask(control.Stopped, control.Stop(explain=explain))
        self.died = None
        return stopped

    async def open_file(self, request: control.OpenToRead | control.OpenToWrite) -> int:
        """Have init open a regular file of the scratch folder; return a descriptor for the caller to close. Raise
        FileRefused with the rest of a sentence about it."""
        answers = await self._sent([(request, None)], (control.Opened,), ANSWER_TIMEOUT_S)
        try:
            (opened,) = await asyncio.shield(answers)
        except asyncio.CancelledError:
            answers.add_done_callback(_close_opened)
            raise
        assert isinstance(opened, control.Opened)
        try:
            await self.init.fetch(opened.fd)
        except BaseException:
            os.close(opened.fd)
            raise
        return opened.fd

    async def list_folder(self, path: list[bytes], after: bytes) -> control.Listed:
        """Return the entries of a folder below the scratch folder. Raises `FileRefused` as `open_file` does."""
        return await self._ask(control.Listed, control.ListFolder(path, after))

    async def remove_file(self, path: list[bytes]) -> None:
        """Have init remove a file of the scratch folder. Raises `FileRefused` as `open_file` does."""
        await self._ask(control.Removed, control.RemoveFile(path))

    def run_program(self, cwd: list[bytes], *fds: int) -> "RunningProgram":
        """Have init start a program, see `RunProgram`. The caller keeps its copies of the descriptors."""
        self._programs_started += 1
        number = self._programs_started
        ended: asyncio.Future[control.ProgramEnded | None] = self._loop.create_future()
        if self.gone.is_set():
            ended.set_result(None)
        else:
            self._programs[number] = ended
            self.init.say(control.RunProgram(number, cwd), *fds)
        return RunningProgram(number, ended)

    async def end_program(self, program: "RunningProgram") -> None:
        """Kill a program and all that it started; return when they have ended. Has no effect once it has ended. If init
        does not answer, kill the whole worker, and raise SandboxFailed."""
        if not program.ended.done():
            self.init.say(control.EndProgram(program.number))
            await asyncio.wait({program.ended}, timeout=PROGRAM_END_S)
        if not program.ended.done():
            await self.kill()
            raise SandboxFailed(f"a program did not end within {PROGRAM_END_S:g} s, and its worker was killed")

    async def kill(self) -> None:
        """Kill init, and return when the whole worker is gone. Raises `SandboxFailed` if a process does not end."""
        await self.init.kill()

    # -- what init says ----------------------------------------------------------------------------------------------

    async def _ask(self, kind: type[A], message: control.Control, *fds: int, timeout_s: float = ANSWER_TIMEOUT_S) -> A:
        """Send a message with descriptors beside it, and return the answer."""
        (answer,) = await self._exchange([(message, *fds)], kind, timeout_s=timeout_s)
        assert isinstance(answer, kind)
        return answer

    async def _exchange(
        self, messages: Sequence[_Said], *kinds: type[control.Control], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[control.Control]:
        """Send messages, each with the descriptor beside it, and return the answers to all of them."""
        return await asyncio.shield(await self._sent(messages, kinds, timeout_s))

    async def _sent(
        self, messages: Sequence[_Said], kinds: Sequence[type[control.Control]], timeout_s: float
    ) -> "asyncio.Task[list[control.Control]]":
        """Send messages in the turn of this exchange, and return a task that takes the answers.

        The task goes on if the caller is cancelled: an answer left over would be taken for that of the next message.
        """
        await self._exchanging.acquire()
        try:
            for message, *fds in messages:
                self.init.say(message, *(fd for fd in fds if fd is not None))
            answers = self._loop.create_task(self._answers_of(kinds, timeout_s))
        except BaseException:
            self._exchanging.release()
            raise
        answers.add_done_callback(self._exchanged)
        return answers

    async def _answers_of(self, kinds: Sequence[type[control.Control]], timeout_s: float) -> list[control.Control]:
        return [await self._answer(kind, timeout_s) for kind in kinds]

    def _exchanged(self, answers: "asyncio.Task[list[control.Control]]") -> None:
        self._exchanging.release()
        if not answers.cancelled():
            answers.exception()  # read, or asyncio would report it as never retrieved if its caller was cancelled

    async def _answer(self, kind: type[A], timeout_s: float) -> A:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._answers.get()
        except TimeoutError:
            await self.kill()
            raise SandboxFailed(f"the worker's init did not answer within {timeout_s:g} s, and was killed") from None
        if isinstance(message, kind):
            return message
        if isinstance(message, OSError):
            raise refused_by_machine("a descriptor from a worker cannot be taken", message)
        if isinstance(message, control.Refused):
            raise FileRefused(message.reason, message.kind)
        if isinstance(message, control.Failed):
            if message.layer is not None:
                raise unavailable(self._level, message.layer, message.reason, message.code)
            if message.step == "load":
                raise ContextRefused(message.reason)
            if message.step == "fork":
                raise ForkRefused(f"{NOT_FORKED}: {_FORK_ERRORS.get(message.code, message.reason)}")
            raise SandboxFailed(f"a worker could not {message.step}: {message.reason}")
        if message is None:
            self._answers.put_nowait(None)  # so that the next exchange does not wait for an init that has ended
        raise WorkerDied("the worker's init ended before it answered")

    def heard(self, message: control.FromInit, fds: list[int]) -> None:
        """Take a message of init, see `InitListener`."""
        match message:
            case control.Opened() if fds:
                self._answers.put_nowait(control.Opened(fd=fds[0]))
            case control.Written():
                self._begun_at = -math.inf
                self.on_written(message)
            case control.Burned():
                self.on_burned(message.cpu_s)
            case control.Checkpointed():
                self.on_checkpointed(message)
            case control.Died() | control.Exceeded():
                self.died = self._at_the_groups_limit() or message
                self.on_change()
            case control.ProgramEnded():
                self._program_ended(message)
            case _:
                self._answers.put_nowait(message)

    def unheard(self, error: OSError | None) -> None:
        """Learn that init says no more, see `InitListener`."""
        self._answers.put_nowait(error)

    def _program_ended(self, said: control.ProgramEnded) -> None:
        ended = self._programs.pop(said.number, None)
        if ended is not None:
            ended.set_result(said)
            return
        self._answers.put_nowait(control.Failed(step="speak", reason="its init named a program that does not run"))
        self.init.send_kill()

    def is_past_its_groups_limit(self) -> bool:
        """Whether the kernel has killed a process of the REPL's group during this block, maybe not the REPL itself."""
        if self.died is None:
            self.died = self._at_the_groups_limit()
        return self.died is not None

    def _at_the_groups_limit(self) -> control.Exceeded | None:
        """Return the limit of the REPL's group if the kernel has killed a process of the group since the last call."""
        if self.group is None or not self.group.new_kills():
            return None
        return control.Exceeded("memory_bytes", self.group.limit_bytes, self.group.limit_bytes, control.LastSeen())

    def ended(self, why: str | None) -> None:
        """Learn that init has ended, and with it all processes of the worker."""
        self.why_gone = why or self.why_gone
        self.gone.set()
        for ended in self._programs.values():
            ended.set_result(None)
        self._programs.clear()
        self.on_change()
        self.on_written = self.on_burned = self.on_change = _ignore  # the last block's, which has this worker
        self.on_checkpointed = _ignore


class RunningProgram(NamedTuple):
    """A program that runs beside a REPL. Wait for `ended` without cancelling it: None says that the worker is gone."""

    number: int
    ended: "asyncio.Future[control.ProgramEnded | None]"


def _close_opened(exchange: "asyncio.Task[list[control.Control]]") -> None:
    """Close the descriptor of a file whose caller was cancelled."""
    if exchange.cancelled() or exchange.exception() is not None:
        return
    for answer in exchange.result():
        if isinstance(answer, control.Opened) and answer.fd >= 0:
            os.close(answer.fd)


def _ignore(*_news: object) -> None:
    """Ignore the event: the default callback."""
