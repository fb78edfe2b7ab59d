"""Counts what one operation costs: page faults, system calls, context switches, frames, bytes and CPU time, by process;
and calls of Python functions in the orchestrator.

    .venv/bin/python -m scripts.bench costs                              # all operations
    .venv/bin/python -m scripts.bench costs spawn run --against HEAD~3   # beside those of a commit

Counts differ by 1 % from one run to the next on a machine however busy; CPU times do by a third. System calls need
strace. The file also runs by itself, with another tree's packages: so it imports public names alone.
"""

import argparse
import asyncio
import collections
import itertools
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlm_broker import RLM

Counts = collections.Counter[str]
Once = Callable[[], Awaitable[object]]
Operation = Callable[[Callable[[], None]], AbstractAsyncContextManager[Once]]

ROLES = ("orchestrator", "fork server", "init", "REPL")
HOW_MANY = {"block": 200, "query": 200, "program": 200, "batch of 100 queries": 40, "batch of 16 items": 10}
"""Operation → how often it is done to be counted, if not `USUALLY` times."""
USUALLY = 60
LOOKS, LOOK_AGAIN_S = 5, 0.01
"""Looks that must find the same processes, and seconds between two looks."""
TRACED = (4, 12)
"""Numbers of operations in the two runs beneath strace, whose difference is taken."""
DESCENDANTS = 20
THREE_TURNS = ("x = len(context)\nprint(x)", "y = x * 2\nprint(y)", "FINAL(str(y))")
_CALLED = re.compile(r"\w+\(")
_MADE = re.compile(r"(?:<\.\.\. )?v?(?:clone3?|fork)\b.* = (\d+)(?: /\* (\d+) in)?")
"""Lines of strace: a call, and the return of one that made a process, whose number for strace is the second one."""
_TCP_INFO = struct.Struct("=128xQ16xII40xQ")
"""bytes_received, data_segs_in, data_segs_out and bytes_sent in `struct tcp_info` (linux/tcp.h)."""


# -- operations: each opens what it needs, and yields what is counted ----------------------------------------------


def _model(look: Callable[[], None], messages: list[dict[str, str]]) -> str:
    """Play a model: three turns for a question, one for a child's or for a question with "at once"."""
    look()
    turn = sum(message["role"] == "assistant" for message in messages)
    told = "".join(message["content"] for message in messages if message["role"] == "user")
    if "child" in told:
        return '```repl\nFINAL(rlm_query("at once"))\n```'
    return f"```repl\n{'FINAL(str(len(context)))' if 'at once' in told else THREE_TURNS[turn]}\n```"


def _rlm(look: Callable[[], None]) -> "RLM":
    from rlm_broker import RLM, Limits

    def on_event(event: object) -> None:
        if type(event).__name__ == "BlockEnded":
            look()

    async def model(messages: list[dict[str, str]]) -> str:
        return _model(look, messages)

    return RLM(model, limits=Limits(max_depth=2), on_event=on_event)


@asynccontextmanager
async def _spawn(look: Callable[[], None], warm: int = 0, *blocks: str) -> AsyncIterator[Once]:
    from rlm_broker import Limits, Sandbox

    async def once() -> None:
        async with sandbox.repl() as repl:
            for code in blocks:
                await repl.aexecute(code)
            look()

    async with Sandbox(Limits(max_processes=DESCENDANTS + 28), warm=warm) as sandbox:
        yield once


@asynccontextmanager
async def _blocks(_look: Callable[[], None], code: str) -> AsyncIterator[Once]:
    from rlm_broker import Sandbox

    async def answer(query: object) -> list[object]:
        from sandbox_worker.wire.messages import Slot

        return [Slot("ok") for _ in getattr(query, "prompts")]  # noqa: B009 - of a class that is not public

    async with Sandbox(warm=0) as sandbox, sandbox.repl("text", answer) as repl:  # type: ignore[arg-type]

        async def once() -> None:
            assert (await repl.aexecute(code)).status == "ok"

        yield once


@asynccontextmanager
async def _programs(_look: Callable[[], None]) -> AsyncIterator[Once]:
    from rlm_broker import Sandbox

    async with Sandbox(warm=0) as sandbox, sandbox.repl() as repl:

        async def once() -> None:
            assert (await repl.arun(["true"])).exit_code == 0

        yield once


@asynccontextmanager
async def _run(look: Callable[[], None], question: str = "what?") -> AsyncIterator[Once]:
    async with _rlm(look) as rlm:

        async def once() -> None:
            assert (await rlm.acompletion("some context", question)).response

        yield once


@asynccontextmanager
async def _batch(look: Callable[[], None], items: int = 1) -> AsyncIterator[Once]:
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        async with _rlm(look) as rlm:

            async def once() -> None:
                given = [{"id": str(each), "context": "some context", "question": "at once?"} for each in range(items)]
                async for result in rlm.batch(given, out=Path(folder) / f"{next(numbers)}.jsonl"):
                    assert result.answer

            yield once


@asynccontextmanager
async def _chat(look: Callable[[], None], stream: bool = False) -> AsyncIterator[Once]:
    import uvicorn

    from rlm_broker.serve.app import Service

    service = Service(_rlm(look))
    server = uvicorn.Server(uvicorn.Config(service, log_config=None, access_log=False))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        asked = {"model": "function", "messages": [{"role": "user", "content": "at once?"}], "stream": stream}
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {service.made_key}\r\n"
        request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

        async def once() -> None:
            writer.write(request)
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            if stream:
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n"), answered
                return
            length = int(answered.partition(b"content-length:")[2].split()[0])
            assert b" 200 " in answered.splitlines()[0], answered + await reader.readexactly(length)
            await reader.readexactly(length)

        yield once
        writer.close()
        server.should_exit = True
        await serving


_BLOCK = "x = 1\nprint(x)"
_HOSTILE = f"import os, time\nfor _ in range({DESCENDANTS}):\n    if not os.fork():\n        time.sleep(1000)"
OPERATIONS: dict[str, Operation] = {
    "spawn": _spawn,
    "warm spawn": lambda look: _spawn(look, 1),
    "spawn with three blocks": lambda look: _spawn(look, 0, *[_BLOCK] * 3),
    "block": lambda look: _blocks(look, _BLOCK),
    "query": lambda look: _blocks(look, "x = llm_query('a')"),
    "batch of 100 queries": lambda look: _blocks(look, "x = llm_query_batched(['a'] * 100)"),
    "program": _programs,
    "run": _run,
    "child run": lambda look: _run(look, "child?"),
    "chat": _chat,
    "streamed chat": lambda look: _chat(look, stream=True),
    "batch of one item": _batch,
    "batch of 16 items": lambda look: _batch(look, 16),
    f"kill with {DESCENDANTS} descendants": lambda look: _spawn(look, 0, _HOSTILE),
}


# -- counting ------------------------------------------------------------------------------------------------------


class Tally:
    """Counts of this process and of all processes below it, from looks at them.

    Take a look while all workers of an operation live. Their end is not counted: init does not wait for the REPL if it
    is killed first, and the kernel then drops what the REPL has spent (`zap_pid_ns_processes`).
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Counts] = {}
        self._last: dict[tuple[str, int], Counts] = {}
        self._own = Counts()

    async def begin(self) -> None:
        """Count from here, once no process has come or gone for some looks."""
        seen = [_processes()]
        while len(seen) < LOOKS or any(each.keys() != seen[-1].keys() for each in seen[-LOOKS:]):
            await asyncio.sleep(LOOK_AGAIN_S)
            seen.append(_processes())
        self._first = self._last = seen[-1] | _connections()
        self._own = Counts()

    def look(self) -> None:
        """Note what all of them have spent by now. What the look itself spends is taken off."""
        before = _own_counts()
        self._last = self._last | _processes() | _connections()
        self._own += _own_counts() - before

    def end(self) -> dict[str, Counts]:
        """Return the counts of each role."""
        self.look()
        found: dict[str, Counts] = {role: Counts() for role in (*ROLES, "connection")}
        for key, counts in self._last.items():
            found[key[0]].update(counts)
            found[key[0]].subtract(self._first.get(key, Counts()))
        found["orchestrator"].subtract(self._own)
        return found


def _own_counts() -> Counts:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_ms = (used.ru_utime + used.ru_stime) * 1000
    return Counts({"page faults": used.ru_minflt, "switches": used.ru_nvcsw + used.ru_nivcsw, "CPU ms": cpu_ms})


def _processes() -> dict[tuple[str, int], Counts]:
    """Return the counts of this process and of all below it, by role and pid."""
    stats: dict[int, list[str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                stats[int(entry.name)] = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()
    children = collections.defaultdict(list)
    for pid, fields in stats.items():
        children[int(fields[1])].append(pid)
    found = {("orchestrator", os.getpid()): _own_counts()}
    level = children[os.getpid()]
    if len(level) == 1 and len(children[level[0]]) <= 1:  # the process outside of the fork server's namespaces
        level = children[level[0]] or level
    for role in ROLES[1:]:
        for pid in level:
            found[role, pid] = _counts(pid, stats[pid][7])
        level = [child for pid in level for child in children[pid]]
    return found


def _counts(pid: int, faults: str) -> Counts:
    switches, cpu_ms = 0, 0.0
    with suppress(OSError):
        switches = sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())))
        cpu_ms = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
    return Counts({"page faults": int(faults), "switches": switches, "CPU ms": cpu_ms})


def _connections() -> dict[tuple[str, int], Counts]:
    """Return segments and bytes of each TCP connection with another process, by inode: a frame is one segment."""
    ends: dict[object, tuple[object, int, tuple[int, ...]]] = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as end:
                    if end.family == socket.AF_INET:
                        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                        ends[end.getsockname()] = end.getpeername(), int(target[8:-1]), _TCP_INFO.unpack(info)
    return {
        ("connection", inode): Counts({"frames": segments_in + segments_out, "bytes": received + sent})
        for peer, inode, (received, segments_in, segments_out, sent) in ends.values()
        if peer not in ends
    }


async def counted(name: str, times: int) -> dict[str, dict[str, float]]:
    """Do an operation `times` times, and return role → what is counted → how many each time."""
    tally = Tally()
    async with OPERATIONS[name](tally.look) as once:
        for _ in range(3):
            await once()
        await tally.begin()
        for _ in range(times):
            await once()
        return {role: {what: n / times for what, n in counts.items()} for role, counts in tally.end().items()}


@contextmanager
def functions_called() -> Iterator[Counts]:
    """Count the calls of Python functions in this thread, as "calls"."""
    found = Counts()

    def count(_frame: object, event: str, _argument: object) -> None:
        found["calls"] += event == "call"

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def function_calls(name: str, times: int, between: int = 0) -> tuple[float, float]:
    """Return the calls of Python functions in the thread of the event loop, for one operation.

    They are counted over `times` operations, and again over as many after `between` further ones.
    """

    async def counted_calls() -> float:
        with functions_called() as found:
            for _ in range(times):
                await once()
        return found["calls"] / times

    async with OPERATIONS[name](lambda: None) as once:
        for _ in range(3):
            await once()
        first = await counted_calls()
        for _ in range(between):
            await once()
        return first, await counted_calls()


async def _done(name: str, times: int) -> None:
    async with OPERATIONS[name](lambda: None) as once:
        for _ in range(times):
            await once()


def _system_calls(command: list[str], tree: str) -> dict[str, float]:
    """Return role → system calls of one operation, from two runs beneath strace."""
    found = [Counts(), Counts()]
    for counts, times in zip(found, TRACED, strict=True):
        with tempfile.NamedTemporaryFile("r") as log:
            strace = ["strace", "-f", "-qq", "--pidns-translation", "-o", log.name, *command, str(times), "uncounted"]
            subprocess.run(strace, check=True, env={**os.environ, "PYTHONPATH": tree})
            lines = log.readlines()
        parents: dict[str, tuple[str, int]] = {}
        for pid, rest in _split(lines):
            if made := _MADE.match(rest):
                parents[made[2] or made[1]] = pid, "CLONE_THREAD" not in rest
        for pid, rest in _split(lines):
            if _CALLED.match(rest):
                counts[_role(_depth(pid, parents))] += 1
    return {role: (found[1][role] - found[0][role]) / (TRACED[1] - TRACED[0]) for role in ROLES}


def _split(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        pid, _, rest = line.partition(" ")
        yield pid, rest.lstrip()


def _depth(pid: str, parents: dict[str, tuple[str, int]]) -> int:
    """Return how many processes stand above it, this one's threads being the same process."""
    depth = 0
    while pid in parents:
        pid, further = parents[pid]
        depth += further
    return depth


def _role(depth: int) -> str:
    return ROLES[0 if depth == 0 else min(max(depth - 1, 1), 3)]


# -- the table -----------------------------------------------------------------------------------------------------


@contextmanager
def _tree_of(commit: str) -> Iterator[str]:
    """Yield a folder with that commit."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", f"{folder}/tree", commit], check=True)
        try:
            yield f"{folder}/tree"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", f"{folder}/tree"], check=True)


def _measured(name: str, tree: str) -> str:
    """Return the line of one operation with the packages of `tree`."""
    command = [sys.executable, "-P", __file__, name]
    times = HOW_MANY.get(name, USUALLY)
    done = subprocess.run(
        [*command, str(times), "counted"], env={**os.environ, "PYTHONPATH": tree}, stdout=subprocess.PIPE, check=True
    )
    found = json.loads(done.stdout)

    def of_each(what: str, digits: int = 0) -> str:
        return _by_role({role: found[role].get(what, 0.0) for role in ROLES}, digits)

    system_calls = _by_role(_system_calls(command, tree)) if shutil.which("strace") else "no strace"
    cells = [of_each("page faults"), system_calls, of_each("switches")]
    cells += [f"{found['connection'].get(what, 0.0):,.1f}" for what in ("frames", "bytes")]
    return " | ".join([*cells, of_each("CPU ms", 2), f"{found['orchestrator']['function calls']:,.0f}"])


def _by_role(counts: dict[str, float], digits: int = 0) -> str:
    return f"{sum(counts.values()):,.{digits}f} ({' '.join(f'{counts[role]:,.{digits}f}' for role in ROLES)})"


def main(arguments: list[str]) -> None:
    """Print the costs of the operations that the command line names, or of all."""
    parser = argparse.ArgumentParser(prog="scripts.bench costs", description="Count what one operation costs.")
    parser.add_argument("names", nargs="*", choices=[[], *OPERATIONS], metavar="NAME", help=", ".join(OPERATIONS))
    parser.add_argument("--against", metavar="COMMIT", help="count the same at this commit, in a worktree beside this")
    options = parser.parse_args(arguments)
    here = str(Path(__file__).parents[2])
    by_role = f"all ({' '.join(ROLES)})"
    print(f"operation | page faults: {by_role} | system calls | switches | frames | bytes | CPU ms | function calls")
    for name in options.names or OPERATIONS:
        print(f"{name} | {_measured(name, here)}", flush=True)
        if options.against:
            with _tree_of(options.against) as tree:
                print(f"{name}, {options.against} | {_measured(name, tree)}", flush=True)


if __name__ == "__main__":
    called, often, how = sys.argv[1:]
    if how == "counted":
        counts_of = asyncio.run(counted(called, int(often)))
        counts_of["orchestrator"]["function calls"] = asyncio.run(function_calls(called, int(often)))[1]
        print(json.dumps(counts_of))
    else:
        asyncio.run(_done(called, int(often)))
