"""Faults of files: truncated at every byte, and used by two processes."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlm_broker import RLM, Models, ScriptedClient
from rlm_broker.broker.cache import Cache
from rlm_broker.broker.clients.base import BaseClient, CallId, LMReply, LMRequest
from rlm_broker.broker.clients.recording import FORMAT, Recorded, RecordedModels, Recorder, Recording, Request
from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.events.trace import TraceWriter
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from rlm_broker.watch.trace_tree import Trace
from scripts.faults import processes
from scripts.faults.cell import Report, Scene

REPLIES = ["```repl\nprint('\N{GRINNING FACE}')\n```", "FINAL(x)"]
ROWS = 40
"""Replies, lines or calls that each of two processes writes."""


def traced(folder: Path) -> Path:
    """A trace of a short run."""
    path = folder / "trace.jsonl"
    with TraceWriter(path) as trace:
        RLM(ScriptedClient(REPLIES), on_event=trace).completion("c", "q")
    return path


def recorded(folder: Path) -> Path:
    """A recording of a short run."""
    path = folder / "recording.jsonl"
    RLM(ScriptedClient(REPLIES), models=Models(record=path)).completion("c", "q")
    return path


def cached(folder: Path) -> Path:
    """A cache of some replies, in one file."""
    path = folder / "cache.sqlite"
    with contextlib.closing(Cache(path)) as cache:
        for number in range(ROWS):
            asyncio.run(cache.put(_key(number), _reply(number)))
    return path


def open_trace(path: Path, size_bytes: int) -> str:
    """Read a trace that was cut: what its whole lines say is shown."""
    whole = path.read_bytes()[:size_bytes].count(b"\n")
    if not whole:
        Trace(path).tree()
        return ""
    try:
        lines = Trace(path).tree()
    except ConfigurationError as error:
        return f"{whole} whole lines, and none is shown: {error}"
    return "" if bool(whole) == bool(lines) else f"{whole} whole lines, and {len(lines)} runs shown"


def open_recording(path: Path, size_bytes: int) -> str:
    """Read a recording that was cut; every call before the cut is there."""
    whole = path.read_bytes()[:size_bytes].count(b"\n") - 1
    calls = len(Recording(path)._calls)
    return "" if calls >= whole else f"{whole} whole calls, and {calls} found"


def open_cache(path: Path, _size_bytes: int) -> str:
    """Use a cache that was cut: it says at once that it is none, or serves and keeps what it can."""
    with contextlib.closing(Cache(path)) as cache:
        for number in range(3):
            found = asyncio.run(cache.get(_key(number)))
            if found is not None and found.text != _reply(number).text:
                return f"a reply that was never given: {found.text!r:.40}"
        asyncio.run(cache.put(_key(ROWS), _reply(ROWS)))
    return ""


def truncated(make: Callable[[Path], Path], look: Callable[[Path, int], str], step: int) -> Scene:
    """Cut the file at every byte, and open it."""

    def scene(folder: Path) -> Report:
        path = make(folder)
        whole, told, wrong = path.read_bytes(), set[str](), list[str]()
        for size in [*range(0, len(whole), step), len(whole)]:
            for beside in folder.glob(f"{path.name}-*"):
                beside.unlink()
            path.write_bytes(whole[:size])
            try:
                if problem := look(path, size):
                    wrong.append(f"at byte {size:,}: {problem}")
            except ConfigurationError as error:
                told.add(_shape(str(error)))
                if "\n" in str(error).strip():
                    wrong.append(f"at byte {size:,}: several lines")
                if size == len(whole):
                    wrong.append(f"the whole file: {error}")
            except BaseException as error:  # noqa: BLE001 - any error is the report
                wrong.append(f"at byte {size:,}: {type(error).__name__}: {error}")
        said = "; ".join(sorted(told)) or "nothing is wrong"
        return Report(f"{len(whole):,} bytes: {said}", not wrong, wrong[:3])

    return scene


def _shape(message: str) -> str:
    """The message without what differs from byte to byte."""
    return "".join("#" if each.isdigit() else each for each in message.rpartition("/")[2])[:80].replace("##", "#")


# -- two processes -----------------------------------------------------------------------------------------------------


def both(work: Callable[[Path, int], str], look: Callable[[Path, Sequence[str]], list[str]]) -> Scene:
    """Have two processes do the same with one file at the same time."""

    def scene(folder: Path) -> Report:
        path = folder / "file"
        asked = [processes.said_by_fork(partial(work, path, number)) for number in range(2)]
        told = [said() for said in asked]
        wrong = look(path, told)
        return Report(" | ".join(told), not any("Error: " in each for each in told if not _ours(each)), wrong)

    return scene


def _ours(said: str) -> bool:
    return said.startswith("ConfigurationError: ")


def write_trace(path: Path, number: int) -> str:
    """Trace a run to a file that another traces to."""
    with TraceWriter(path) as trace:
        for _ in range(3):
            RLM(ScriptedClient(["```repl\nprint('x' * 9999)\n```", "FINAL(x)"]), on_event=trace).completion("c", "q")
        return f"trace {number}: {trace.lost or 'written'}"


def look_at_trace(path: Path, _told: Sequence[str]) -> list[str]:
    """Every line is whole, and the file can be shown."""
    try:
        return [] if Trace(path).tree() else ["the trace"]
    except RlmBrokerError as error:
        return [f"the trace: {error}"]


def write_recording(path: Path, number: int) -> str:
    """Record to a file that another records to."""
    with contextlib.closing(Recorder(path, RecordedModels(FORMAT, "m"))) as recorder:
        for call in range(ROWS):
            recorder.add(
                Recorded(CallId("1", 0, call), Request([{"role": "user", "content": f"{call}"}]), "m", "y" * 99)
            )
        return f"recording {number}: written"


def look_at_recording(path: Path, told: Sequence[str]) -> list[str]:
    """One wrote it, the other was refused."""
    if sum("exists" in each for each in told) != 1:
        return ["the refusal of the second recorder"]
    return [] if len(Recording(path)._calls) == ROWS else ["calls"]


def write_cache(path: Path, number: int) -> str:
    """Keep replies in a cache that another keeps replies in."""
    found = 0
    with contextlib.closing(Cache(path)) as cache:
        for row in range(ROWS):
            asyncio.run(cache.put(_key(row), _reply(row)))
            reply = asyncio.run(cache.get(_key(row)))
            found += reply is not None and reply.text == _reply(row).text
    return f"cache {number}: {found} of {ROWS} found"


def look_at_cache(path: Path, _told: Sequence[str]) -> list[str]:
    """Check that the lines of both are there."""
    with contextlib.closing(Cache(path)) as cache:
        there = sum(asyncio.run(cache.get(_key(row))) is not None for row in range(ROWS))
    return [] if there == ROWS else [f"{ROWS - there} replies"]


class _Asked(BaseClient):
    model_name = fingerprint = "script"

    async def complete(self, _request: LMRequest) -> LMReply:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close no resource: there is none."""


def _key(number: int) -> bytes:
    key = Cache.key(_NO_CACHE, _Asked(), LMRequest((ChatMessage("user", f"prompt {number}"),)))
    assert key is not None
    return key


_NO_CACHE = Cache.__new__(Cache)


def _reply(number: int) -> LMReply:
    return LMReply(f"reply {number} " + "z" * 50, Usage(1, 1, 1))
