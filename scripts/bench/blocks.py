"""Waiting times of code in a REPL: a block's round trip, one query, a batch of queries, a program, its end."""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.messages import Query, Reply, Slot, encode
from scripts.bench.measure import Echo, Effort, Model, by_turns, seconds
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Check, Row, number, side
from scripts.bench.spawning import BLOCK, block_seconds

PROVIDER_S = 0.2
AT_ONCE = 16
DESCENDANTS = 100

HOSTILE = f"""
import os, signal
for n in range(1, 64):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
made = []
for _ in range({DESCENDANTS}):
    made.append(os.fork())
    if made[-1] == 0:
        os.setsid()
        while True: signal.pause()
"""
BY_PARENT = f"""
{HOSTILE}
import time
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
started = time.perf_counter()
for pid in made: os.kill(pid, signal.SIGKILL)
for pid in made: os.waitpid(pid, 0)
print(time.perf_counter() - started)
"""
"""The same descendants, ended by their parent: what the end of that much memory costs the kernel."""


def round_trip(effort: Effort) -> list[Row]:
    """Time one block through the synchronous API, from the call to its result."""
    with (
        Sandbox() as sandbox,
        sandbox.repl() as repl,
        Echo() as echo,
        Peer("Jupyter", "jupyter_repl.py", "jupyter") as jupyter,
        Peer("rlms IPython", "rlms_repl.py", "rlms") as rlms,
        Peer("rlms exec in its own process", "rlms_repl.py", "rlms") as local,
        Peer("DSPy", "dspy_repl.py", "dspy") as dspy,
    ):
        seconds(lambda: block_seconds(repl), 200)
        ours, floor, kernel, ipython, bare, wasm = by_turns(
            effort.times(40),
            lambda: [block_seconds(repl) for _ in range(50)],
            lambda: seconds(lambda: echo.ask(b"x" * 100), 50),
            lambda: jupyter.samples("round_trip"),
            lambda: rlms.samples("round_trip"),
            lambda: local.samples("local_round_trip"),
            lambda: dspy.samples("round_trip"),
        )
        awaited = side("awaited", "ms", _awaited(effort.times(1_000)))
    taken = side(OURS, "ms", ours)
    others = (
        side("100 bytes to a process and back", "ms", floor),
        jupyter.side("ms", kernel),
        rlms.side("ms", ipython),
        local.side("ms", bare),
        dspy.side("ms", wasm),
    )
    note = f"p99 {number(taken.quantile(0.99), 'ms')}; awaited (`aexecute`): {number(awaited.median, 'ms')}"
    waits = awaited.at_most(0.12)
    checks = (taken.at_most(0.25), taken.p99_at_most(1), Check(f"awaited {waits.text}", waits.met))
    return [Row(f"round trip of `{BLOCK}`", taken, others, checks, note)]


def queries(effort: Effort) -> list[Row]:
    """Time `llm_query` and a batch from inside the REPL, with a client that answers at once."""
    prompts = effort.size(1_000)
    one = "for _ in range(50): llm_query('hello')\ntaken = [timed(lambda: llm_query('hello')) for _ in range(200)]"
    many = f"taken = [timed(lambda: llm_query_batched([f'hello {{n}}' for n in range({prompts})])) for _ in range(5)]"
    frame = encode(Query("1:1", "llm", [f"hello {number}" for number in range(prompts)]))
    with Echo() as echo, Echo(_answered) as answering:
        single, floor, batch, batch_floor = by_turns(
            effort.times(8) // 2 or 1,
            lambda: _timed_inside(one),
            lambda: seconds(lambda: echo.ask(b"x" * 100), 200),
            lambda: _timed_inside(many),
            lambda: seconds(lambda: _asked(answering, frame), 5),
        )
    query, whole = side(OURS, "ms", single), side(OURS, "ms", batch)
    return [
        Row(
            "round trip of `llm_query`, no-op client, inside a block",
            query,
            [side("100 bytes to a process and back", "ms", floor)],
            [query.at_most(0.08)],
            f"p99 {number(query.quantile(0.99), 'ms')}",
        ),
        Row(
            f"a batch of {prompts:,} prompts, no-op client",
            whole,
            [side("the same frames, decoded and answered", "ms", batch_floor)],
            [whole.at_most(30)],
        ),
    ]


def slow_provider(effort: Effort) -> list[Row]:
    """Time a batch of 100 prompts where each call takes 200 ms and 16 may be open."""
    program = "taken = [timed(lambda: llm_query_batched([f'hello {n}' for n in range(100)]))]"

    async def provider() -> None:
        await asyncio.sleep(PROVIDER_S)

    async def bare() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def call() -> None:
            async with places:
                await provider()

        await asyncio.gather(*(call() for _ in range(100)))

    ours, floor = by_turns(
        effort.times(3), lambda: _timed_inside(program, provider), lambda: seconds(lambda: asyncio.run(bare()))
    )
    taken = side(OURS, "s", ours)
    ideal = side(f"7 x {PROVIDER_S * 1000:g} ms", "s", [7 * PROVIDER_S])
    others = (ideal, side("asyncio alone", "s", floor))
    what = f"a batch of 100 prompts, provider takes {PROVIDER_S * 1000:g} ms, {AT_ONCE} at a time"
    return [Row(what, taken, others, [taken.at_most_times(1.1, ideal)])]


def kill(effort: Effort) -> list[Row]:
    """Time the kill of a REPL with 100 hostile descendants, from the order to the report of its end."""

    def ours() -> list[float]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sandbox.repl()).execute(HOSTILE)
            return seconds(stack.close)

    def by_parent() -> list[float]:
        with sandbox.repl() as repl:
            return [float(repl.execute(BY_PARENT).stdout)]

    with (
        Sandbox(Limits(max_processes=DESCENDANTS + 28)) as sandbox,
        Peer(f"kill and wait for {DESCENDANTS} forks of a bare python", "bare.py") as bare,
    ):
        ends, same, floor = by_turns(effort.times(20), ours, by_parent, lambda: bare.samples("kill"))
    taken, parents = side(OURS, "ms", ends), side("the same ones, by their parent", "ms", same)
    others = [parents, bare.side("ms", floor)]
    targets = [taken.at_most(30), taken.at_most_times(1.5, parents)]
    return [Row(f"kill with {DESCENDANTS} descendants, to all gone", taken, others, targets)]


def rollback(effort: Effort) -> list[Row]:
    """Time a REPL with 100 MB of variables from its end until one is read, and a block that makes a checkpoint."""
    large = "rows = [f'{n:1000}' for n in range(95_000)]\ncount = len(rows)"
    dies = "import os, time\nprint(time.monotonic(), flush=True); os._exit(1)"

    def from_end(repl: SandboxedRepl, after: Callable[[], object]) -> list[float]:
        died = float(repl.execute(dies).stdout)
        after()
        return [time.monotonic() - died]

    limits = Limits(max_repl_restarts=1_000_000)
    with (
        Sandbox(warm=0) as sandbox,
        sandbox.repl(limits=limits.replace(checkpoint="each")) as kept,
        sandbox.repl(limits=limits.replace(checkpoint="never")) as plain,
        sandbox.repl(limits=limits.replace(checkpoint="never")) as same,
    ):
        kept.execute(large)
        same.execute(large)
        back, fresh, made, with_copy, without = by_turns(
            effort.times(20),
            lambda: from_end(kept, lambda: kept.get("count")),
            lambda: from_end(plain, lambda: plain.execute("1")),
            lambda: from_end(plain, lambda: plain.execute(large)),
            lambda: seconds(lambda: kept.execute("1")),
            lambda: seconds(lambda: same.execute("1")),
        )
    taken = side(OURS, "ms", back)
    others = [side("a fresh REPL, without them", "ms", fresh), side("and to make them again", "ms", made)]
    block, bare = side(OURS, "ms", with_copy), side("the same block without a checkpoint", "ms", without)
    return [
        Row(
            "from a REPL's end until a variable of 100 MB is read",
            taken,
            others,
            [taken.at_most(25), taken.at_most_times(2, others[0])],
        ),
        Row("a block that makes a checkpoint of 100 MB of variables", block, [bare], [block.at_most(25)]),
    ]


def fork(effort: Effort) -> list[Row]:
    """Time a fork of a REPL with 100 MB of variables until it is ready: the first after a block, and a further one."""
    large = "rows = [f'{n:1000}' for n in range(95_000)]\ncount = len(rows)"
    forks: list[SandboxedRepl] = []

    def forked(repl: SandboxedRepl) -> list[float]:
        taken = seconds(lambda: forks.append(repl.fork()))
        forks.pop().close()
        return taken

    first: list[float] = []
    further: list[float] = []
    again: list[float] = []
    with Sandbox(warm=0) as sandbox:
        for _ in range(effort.times(20)):
            with sandbox.repl() as repl:  # each REPL at the same number of moments
                again += seconds(partial(repl.execute, large))
                first += forked(repl)
                further += forked(repl)
    taken, more, made = side(OURS, "ms", first), side(OURS, "ms", further), side("to make them again", "ms", again)
    return [
        Row("a fork of a REPL with 100 MB of variables", taken, [made], [taken.at_most(10)]),
        Row("a further fork at the same moment", more, [taken], [more.at_most(10)]),
    ]


def program(effort: Effort) -> list[Row]:
    """Time `true` as a program beside the code of a REPL, as a process of the host, and as fork, exec and wait."""
    command = ["true"]
    with Sandbox() as sandbox, sandbox.repl() as repl, Peer("fork, exec, wait", "bare.py") as bare:
        repl.run(command)
        ours, hosts, floor = by_turns(
            effort.times(200),
            lambda: seconds(lambda: repl.run(command)),
            lambda: seconds(lambda: subprocess.run(command, check=True)),
            lambda: bare.samples("execute"),
        )
    taken, host = side(OURS, "ms", ours), side("subprocess.run", "ms", hosts)
    others = [host, bare.side("ms", floor)]
    note = f"p99 {number(taken.quantile(0.99), 'ms')}"
    return [Row('`repl.run(["true"])`', taken, others, [taken.at_most_times(3, host)], note)]


# -- parts -----------------------------------------------------------------------------------------------------------


def _timed_inside(program: str, answer: Callable[[], Awaitable[object]] | None = None) -> list[float]:
    """Return the seconds that the program measured in its REPL and left in `taken`."""
    code = f"import json, time\n{_TIMED}\n{program}\nFINAL(json.dumps(taken))"

    def reply(request: LMRequest) -> str:
        return f"```repl\n{code}\n```" if request.is_loop else "ok"

    rlm = RLM(Model(reply, answer), limits=Limits(max_llm_calls=None, max_concurrent_calls=AT_ONCE))
    response = rlm.completion("a context", "how long?").response
    assert response is not None
    taken: list[float] = json.loads(response)
    return taken


_TIMED = """
def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
"""


def _awaited(times: int) -> list[float]:
    async def measure() -> list[float]:
        async with Sandbox() as sandbox, sandbox.repl() as repl:
            taken = []
            for _ in range(times):
                started = time.perf_counter()
                await repl.aexecute(BLOCK)
                taken.append(time.perf_counter() - started)
            return taken

    return asyncio.run(measure())


_decode_query = msgspec.json.Decoder(Query).decode
_decode_reply = msgspec.json.Decoder(Reply).decode


def _answered(data: bytes) -> bytes:
    query = _decode_query(data)
    return encode(Reply(query.id, [Slot("ok") for _ in query.prompts]))


def _asked(answering: Echo, frame: bytes) -> Any:
    return _decode_reply(answering.ask(frame))
