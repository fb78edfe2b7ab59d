"""Mixed work for a while, and what it costs over time: fails if anything grows.

    .venv/bin/python -m scripts.soak --minutes 20
    .venv/bin/python -m scripts.soak --minutes 0.2 --every 4 --workers 3   # whether it runs

Runs with children, REPLs, templates, shared contexts, cancellations, strangers on the port, killed fork servers and
forked processes share one handler and one sandbox. Between two samples, a REPL is opened with few free descriptors. At
each sample all work has ended, so that what is there then is there for good.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import anyio
import psutil

from rlm_broker import RLM, LMHandler, Sandbox
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import RlmBrokerError
from rlm_broker.limits import Limits
from rlm_broker.usage import Usage
from scripts.faults.descriptors import FREE, limit_descriptors, with_free
from scripts.faults.leftovers import lives

SPARE_BYTES = 24 << 20
"""Growth of unique memory in bytes, from the first third of the samples to the last, that is still flat."""
SPARE = 6
"""The same for descriptors and processes: a fork server or a pooled worker more or less."""
RECORDS = [{"number": number, "text": f"record {number} " * 8} for number in range(40_000)]
LIMITS = Limits(max_depth=2, block_timeout_s=20, call_timeout_s=20, run_timeout_s=120)


@dataclass(frozen=True)
class Sample:
    """Count what is there when all work has ended."""

    at_s: float
    uss_bytes: int
    descriptors: int
    tasks: int
    processes: int
    mounts: int
    folders: int


def sample(started: float) -> Sample:
    """Look at this process and what is below it."""
    process = psutil.Process()
    living = [each for each in process.children(recursive=True) if lives(each)]
    return Sample(
        time.monotonic() - started,
        process.memory_full_info().uss,
        process.num_fds(),
        len(asyncio.all_tasks()),
        len(living),
        sum("rlm-broker" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        len(list(Path(tempfile.gettempdir()).iterdir())),
    )


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return what the last third of the samples has more of than the first."""
    third = max(1, len(samples) // 3)
    problems = []
    for name in (each.name for each in fields(Sample) if each.name != "at_s"):
        first, last = (max(getattr(each, name) for each in part) for part in (samples[:third], samples[-third:]))
        spare = {"uss_bytes": SPARE_BYTES, "descriptors": SPARE, "processes": SPARE}.get(name, 0)
        if last > first + spare:
            problems.append(f"{name}: from {first:,} to {last:,}")
    return problems


class Model:
    """Asks, starts children, and answers. It keeps no request."""

    model_name = "soak"

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request."""
        await asyncio.sleep(0.002)
        return LMReply(_said(request), Usage(1, 10, 5))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


def _said(request: LMRequest) -> str:
    if not request.is_loop:
        return "answered"
    if request.depth:
        return "```repl\nFINAL(llm_query('a part') + context[:3])\n```"
    if not any(message.role == "assistant" for message in request.messages):
        return "```repl\nsaid = llm_query_batched([f'part {n}' for n in range(20)])\nprint(len(context))\n```"
    return "```repl\nFINAL(rlm_query_batched(['one', 'two']) + said)\n```"


class Soak:
    """The work, and its sums.

    Attributes:
        done: Pieces of work that ended, by kind.
        told: Errors of the project's own that a caller got, by kind and name.
        wrong: What no caller may see.
    """

    def __init__(self, handler: LMHandler, sandbox: Sandbox, contexts: Sequence[StoredContext], seed: int) -> None:
        self.done, self.told = Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self._handler, self._sandbox, self._contexts = handler, sandbox, contexts
        self._rlm = RLM(handler=handler, sandbox=sandbox, limits=LIMITS)
        self._chance = random.Random(seed)
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.run: 20,
            self.repl: 20,
            self.killed_block: 4,
            self.killed_and_rolled_back: 4,
            self.template: 1,
            self.shared_context: 6,
            self.cancelled: 12,
            self.cancelled_at_each_await: 6,
            self.cancelled_by_anyio: 6,
            self.beside_a_forked_process: 2,
            self.stranger: 10,
            self.killed_fork_server: 1,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def work(self, until: float) -> None:
        """Do one piece after the other."""
        while time.monotonic() < until:
            await self.piece(*self._chance.choices(self._kinds, self._weights))

    async def piece(self, kind: Callable[[], Awaitable[None]]) -> None:
        """Do one piece, and count how it ends."""
        name = kind.__name__
        try:
            await kind()
            self.done[name] += 1
        except RlmBrokerError as error:
            self.told[f"{name}: {type(error).__name__}: {str(error)[:70]}"] += 1
        except Exception:  # noqa: BLE001 - any error is counted and shown
            self.wrong.append(f"{name}: {traceback.format_exc()}")

    async def run(self) -> None:
        """One run with children."""
        completion = await self._rlm.acompletion("x" * self._chance.randrange(100_000), "?")
        if "answered" not in (completion.response or "") and not _was_killed(completion.trajectory):
            raise AssertionError(f"a wrong answer: {completion.response}")

    async def repl(self) -> None:
        """Some blocks that keep variables."""
        async with self._sandbox.repl("some text") as repl:
            for number in range(self._chance.randrange(1, 6)):
                block = await repl.aexecute(f"kept = globals().get('kept', 0) + 1\nprint(kept, len(context))\n{number}")
                if block.status == "killed":
                    self.told[f"repl: {block.error}"] += 1
                elif not block.stdout:
                    raise AssertionError(f"a block without its output: {block}")

    async def killed_block(self) -> None:
        """A block that ends itself, and the next one."""
        async with self._sandbox.repl("some text") as repl:
            await repl.aexecute("import os; os._exit(1)")
            await repl.aexecute("print(context)")

    async def killed_and_rolled_back(self) -> None:
        """Blocks that end themselves, in a REPL that goes on from its checkpoint each time."""
        async with self._sandbox.repl("some text", limits=LIMITS.replace(checkpoint="each")) as repl:
            await repl.aexecute("kept = []")
            for number in range(20):
                await repl.aexecute(f"kept.append({number})")
                await repl.aexecute("import os; os._exit(1)")
            block = await repl.aexecute("kept == [*range(20)]", value=True)
            if block.value is not True:
                self.told[f"killed_and_rolled_back: {block.error}"] += 1  # another piece kills fork servers

    async def template(self) -> None:
        """A fork server of its own."""
        template = self._sandbox.template(["a", "b"], imports=["json"], setup="x = len(context)")
        async with template, template.repl() as repl:
            await repl.aexecute("print(x)")

    async def shared_context(self) -> None:
        """A context that is decoded once for all."""
        async with self._sandbox.repl(self._chance.choice(self._contexts)) as repl:
            await repl.aexecute("print(context[-1])")

    def _to_cancel(self) -> Coroutine[Any, Any, None]:
        return self._chance.choice([self.run, self.repl, self.template, self.shared_context])()

    async def cancelled(self) -> None:
        """Any other piece of work, cancelled at some moment."""
        await self._cancelled(again=False)

    async def _cancelled(self, again: bool) -> None:
        task = asyncio.create_task(self._to_cancel())
        await asyncio.wait({task}, timeout=self._chance.uniform(0, 0.2))
        task.cancel()
        while again and not task.done():
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def cancelled_at_each_await(self) -> None:
        """The same, cancelled again in each turn of the loop until it has ended."""
        await self._cancelled(again=True)

    async def cancelled_by_anyio(self) -> None:
        """The same in a scope of anyio, which cancels at each await by itself."""
        with anyio.move_on_after(self._chance.uniform(0, 0.2)):
            await self._to_cancel()

    async def beside_a_forked_process(self) -> None:
        """A REPL that is opened and closed while a process lives that was forked from this one."""
        read_end, write_end = os.pipe()
        if (pid := os.fork()) == 0:
            os.read(read_end, 1)
            os._exit(0)
        try:
            await self.repl()
        finally:
            os.write(write_end, b"x")  # not only closed: the processes of other pieces have copies
            os.close(write_end)
            os.close(read_end)
            os.waitpid(pid, 0)

    async def few_descriptors(self) -> None:
        """A REPL for which there are few free descriptors. No other piece may be under way."""
        with with_free(self._chance.choice(FREE)):
            await self.repl()

    async def stranger(self) -> None:
        """A connection that sends no byte, garbage, or half a frame."""
        reader, writer = await asyncio.open_connection(*self._handler.address)
        said = self._chance.choice([b"", b"\0\0\0\5hello", b"\xff\xff\xff\xff", os.urandom(999), b"\0\0\2\0{"])
        with contextlib.suppress(ConnectionError):
            writer.write(said)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(100), 0.05)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def killed_fork_server(self) -> None:
        """SIGKILL to one of the fork servers, with all that hangs below it."""
        servers = [each for each in psutil.Process().children() if lives(each)]
        if servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._chance.choice(servers).kill()


def _was_killed(trajectory: Sequence[object]) -> bool:
    return "killed" in str(trajectory)


async def soak(minutes: float, every_s: float, workers: int, seed: int) -> int:
    """Work, with a sample now and then; the exit code."""
    started, samples = time.monotonic(), list[Sample]()
    limit_descriptors()
    async with contextlib.AsyncExitStack() as stack:
        handler = await stack.enter_async_context(LMHandler(Model()))
        sandbox = await stack.enter_async_context(Sandbox(LIMITS))
        contexts = [stack.enter_context(store(RECORDS)), stack.enter_context(store(RECORDS[1:]))]
        soaked = Soak(handler, sandbox, contexts, seed)
        while not samples or samples[-1].at_s < minutes * 60:
            until = time.monotonic() + every_s
            await asyncio.gather(*(soaked.work(until) for _ in range(workers)))
            await soaked.piece(soaked.few_descriptors)
            await asyncio.sleep(1)  # workers for the pool are made in the background
            samples.append(sample(started))
            _print(samples[-1], sum(soaked.done.values()))
    after = sample(started)
    print(f"done: {dict(soaked.done)}")
    for told, times in soaked.told.most_common():
        print(f"told {times} times: {told}")
    problems = [*soaked.wrong, *grown(samples[1:] or samples)]
    problems += [f"{after.processes} processes after the end"] if after.processes else []
    for problem in problems:
        print(f"NOT AS IT MUST BE: {problem}")
    return 1 if problems else 0


def _print(found: Sample, done: int) -> None:
    print(
        f"{found.at_s:6.0f} s  {done:6,} done  USS {found.uss_bytes / 1e6:6.1f} MB  descriptors {found.descriptors:3}  "
        f"tasks {found.tasks:2}  processes {found.processes:3}  mounts {found.mounts}  folders {found.folders}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Soak as long as the command line says."""
    parser = argparse.ArgumentParser(prog="scripts.soak", description="Mixed work; fails if anything grows.")
    parser.add_argument("--minutes", type=float, default=20, help="how long (20)")
    parser.add_argument("--every", type=float, default=20, help="seconds of work between two samples (20)")
    parser.add_argument("--workers", type=int, default=6, help="pieces of work at the same time (6)")
    parser.add_argument("--seed", type=int, default=13, help="of what is done when (13)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = folder
        Path(folder).chmod(0o711)
        sys.exit(asyncio.run(soak(options.minutes, options.every, options.workers, options.seed)))


if __name__ == "__main__":
    main()
