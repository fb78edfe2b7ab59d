"""A killed REPL runs its earlier blocks again: its variables and files come back, and nothing is paid or done twice."""

import asyncio
import base64
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from rlm_broker import RLM, ConfigurationError, Limits, ReplLimits, ReplRecord, Sandbox
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.sandbox import repl_blocks
from rlm_broker.sandbox.blocks import record
from rlm_broker.sandbox.blocks.record import RecordedBlock, keys_of
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.workers.source import StartedWorker
from rlm_broker.values.remembered import Remembered
from sandbox_worker.wire.frames import PREFIX
from sandbox_worker.wire.messages import Provide, Query, Slot, encode
from tests.support.launcher import needs_strict
from tests.support.places import PROJECT
from tests.support.tables import table

pytestmark = pytest.mark.filterwarnings("ignore::rlm_broker.IsolationWarning")
LIMITS = ReplLimits(checkpoint="never", interrupt_grace_s=0.5, memory_bytes=256 << 20, later_context_bytes=1 << 30)
KILL = "import os; os._exit(3)"


class Answers:
    """A handler of queries that counts the prompts, and never gives one answer twice."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, query: Query) -> list[Slot]:
        if query.background:
            await asyncio.sleep(3600 if "never" in query.texts else 0)
        first = len(self.asked)
        self.asked += query.texts
        return [Slot(f"answer {first + number}") for number in range(len(query.prompts))]


@pytest.fixture(scope="module", params=["strict", "standard", "process"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, request.param, warm=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def standard() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, "standard", warm=0) as opened:
        yield opened


@pytest.fixture
def repl(standard: Sandbox) -> Iterator[SandboxedRepl]:
    with standard.repl("the context") as opened:
        yield opened


BLOCKS = [
    "import random, threading\nnumbers = iter(range(9)); next(numbers)\nsquare = lambda x: x * x\nprint(square, context)",
    "drawn = random.random(); lock = threading.Lock(); lock.acquire()\nprint(drawn, numbers)",
    "single = llm_query('one')\nmany = llm_query_batched(['two', 'two', 'three'])\nprint(single)",
    "first = price('lens'); second = price('lens')",
    "1 / 0",
    "import sys; kept = 5; sys.exit(4)",
    "from_input = input()",
]
CHECK = "print(next(numbers), square(3), drawn, lock.locked(), single, many, first, second, kept, from_input, limit)"


def test_variables_come_back_and_nothing_is_paid_or_done_twice(sandbox: Sandbox) -> None:
    answers, bought = Answers(), list[str]()

    def price(name: str) -> int:
        bought.append(name)
        return len(bought)

    with sandbox.repl("the context", answers, tools={"price": price}) as repl:
        for code in BLOCKS:
            repl.execute(code, stdin="given\n")
        repl.provide({"limit": 10})
        asked = list(answers.asked)
        assert asked == ["one", "two", "two", "three"]
        block = repl.execute(KILL)
        assert (block.status, block.blocks_undone, repl.replayed) == ("killed", 1, (len(BLOCKS), None))
        expected = f"1 9 {repl.get('drawn')} True answer 0 ['answer 1', 'answer 2', 'answer 3'] 1 2 5 given 10\n"
        assert repl.execute(CHECK).stdout == expected
        assert (answers.asked, bought) == (asked, ["lens", "lens"])
        # What came after the replay comes back as well.
        repl.execute("more = llm_query('one')")
        assert repl.execute(KILL).blocks_undone == 1
        assert repl.get("more") == "answer 4"
        assert repl.record.blocks == len(BLOCKS) + 2


def test_files_of_blocks_and_of_the_host_come_back_as_they_were(sandbox: Sandbox) -> None:
    with sandbox.repl() as repl:
        repl.files.write("given.txt", b"host ")
        repl.execute("for _ in range(2): open('log.txt', 'a').write(open('given.txt').read())")
        repl.files.write("given.txt", bytearray(b"later "))
        repl.execute("open('log.txt', 'a').write(open('given.txt').read()); import os; os.remove('given.txt')")
        block = repl.execute(f"open('log.txt', 'a').write('killed'); open('of the killed', 'w'); {KILL}")
        assert (block.blocks_undone, repl.replayed.blocks) == (1, 2)
        assert "Files that the killed block wrote are gone" in (block.error or "")
        assert [each.name for each in repl.files.list("")] == ["log.txt"]
        assert repl.files.read("log.txt") == b"host host later "
        block = repl.execute(KILL)  # which wrote none
        assert (block.blocks_undone, "Files" in (block.error or "")) == (1, False)


def test_blocks_find_what_they_were_given_then(repl: SandboxedRepl) -> None:
    repl.provide({"given": "first"})
    repl.execute("seen = [given, 'context_1' in globals()]")
    repl.provide({"given": "second"})
    repl.add_context("another")
    repl.execute("seen += [given, context_1]")
    repl.provide({"given": "third"})
    assert repl.execute(KILL).blocks_undone == 1
    assert repl.execute("print(seen, given)").stdout == "['first', False, 'second', 'another'] third\n"


DIFFERS = {
    "prints": ("print(is_again)", "block 3 printed or raised something else"),
    "asks": ("is_again and llm_query('again')", "block 3 asked what the record has no answer to"),
    "dies": ("is_again and os._exit(1)", "block 3 was killed when it ran again: its process ended by itself"),
    "takes longer": ("import time; is_again and time.sleep(600)", "block 3 did not end in 1 s this time"),
}


@table("what", DIFFERS)
def test_different_outcome_ends_the_replay_there(standard: Sandbox, what: str) -> None:
    code, why = DIFFERS[what]
    answers = Answers()
    with standard.repl(answer=answers) as repl:
        repl.execute("import os; x = 1; own = os.getpid()")
        repl.provide({"first": repl.get("own")})  # the second block: it only reads
        repl.execute(f"is_again = first != own\n{code}")
        repl.execute("y = 1")
        block = repl.execute(KILL)
        assert why in (block.error or "")
        assert block.blocks_undone == 3
        assert repl.execute("print(x, 'y' in globals(), 'is_again' in globals())").stdout == (
            f"1 False {what != 'dies'}\n"
        )
        assert not answers.asked
        # The next replay has the block as it came out last, and ends before one that was stopped.
        assert repl.execute(KILL).blocks_undone == (1 if what in ("prints", "dies") else 3)


def test_interrupted_block_ends_the_replay(repl: SandboxedRepl) -> None:
    repl.execute("x = 1")
    repl.execute("while True: pass", timeout_s=0.2)
    repl.execute("y = 1")
    block = repl.execute(KILL)
    assert (block.blocks_undone, repl.replayed) == (3, (1, "block 2 was interrupted"))
    assert repl.record.blocks == 1
    assert repl.execute("print(x, 'y' in globals())").stdout == "1 False\n"


def test_too_long_blocks_are_not_run_again(standard: Sandbox) -> None:
    for most_s, why in ((0.2, "longer than max_replay_s = 0.2 s"), (0, "")):
        with standard.repl(limits=LIMITS.replace(max_replay_s=most_s)) as repl:
            repl.execute("import time; time.sleep(0.3); x = 1")
            block = repl.execute(KILL)
            assert block.blocks_undone is None
            assert (block.error or "").endswith(why)
            assert repl.execute("'x' in globals()").stdout == "False\n"
            assert repl.record.blocks == (1 if most_s else 0)


def test_long_texts_are_not_kept_for_a_replay(repl: SandboxedRepl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ENTRY_BYTES", record.MAX_BYTES // 2)
    repl.execute("x = 1")
    assert [repl.get("x") for _ in range(3)] == [1, 1, 1]  # which takes no room
    assert repl.record.blocks == 1
    for _ in range(2):
        repl.execute("x = 1")
    assert repl.record.blocks == 0
    block = repl.execute(KILL)
    assert (block.blocks_undone, repl.replayed) == (None, (0, "the record of its blocks has more than 64 MiB"))


def test_answers_of_a_batch_for_any_model_are_found_without_a_search(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [str(number) for number in range(50)]
    answers = [(record.asked("rlm", each, model=record.ANY_MODEL), Slot(each * 2)) for each in prompts]
    block = record.RecordedBlock(f"said = rlm_query_batched({prompts})", answers=answers)
    asked = Mock(wraps=record.asked)
    monkeypatch.setattr(record, "asked", asked)
    with standard.repl(record=ReplRecord([block])) as repl:
        assert repl.get("said") == [each * 2 for each in prompts]
    assert asked.call_count == 2 * len(prompts)


def test_interrupted_blocks_count_for_the_bound_of_a_record(
    repl: SandboxedRepl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ENTRY_BYTES", record.MAX_BYTES // 2)
    for _ in range(3):
        repl.execute("while True: pass", timeout_s=0.05)
    assert repl.record.problem == "the record of its blocks has more than 64 MiB"


@needs_strict
def test_program_ends_the_replay_there(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS) as repl:
        repl.execute("x = 1")
        repl.run(["true"])
        repl.execute("y = 1")
        block = repl.execute(KILL)
        assert (block.blocks_undone, repl.replayed) == (2, (1, "a program of `run` may have changed its files"))


ON_TOP = {
    "runs": ("y = 2", 1, None),
    "has files": ("y = 2; open('file', 'w')", 3, "its blocks since the checkpoint may have changed files"),
    "dies": ("y = 2; os.getpid() == first or os._exit(1)", 2, "block 3 was killed when it ran again"),
}


@needs_strict
@table("what", ON_TOP)
def test_blocks_since_a_checkpoint_run_again_on_top_of_it(open_sandbox: Sandbox, what: str) -> None:
    code, undone, why = ON_TOP[what]
    with open_sandbox.repl(limits=LIMITS.replace(checkpoint="each")) as repl:
        repl.execute("import os, threading, time; x = [1]; first = os.getpid()")
        repl.execute("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()")  # no checkpoint any more
        repl.execute(code)
        block = repl.execute(KILL)
        assert block.blocks_undone == undone
        assert (repl.replayed.problem or "").startswith(why or "")
        assert repl.execute("print(x, 'y' in globals())").stdout == f"[1] {what == 'runs'}\n"


THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
"""Code after which no checkpoint is made."""


@needs_strict
def test_block_that_was_not_sent_is_not_counted_since_the_checkpoint(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(limits=LIMITS.replace(checkpoint="each")) as repl:
        for code in ("n = 0", "n += 1", f"n += 1\n{THREAD}"):
            repl.execute(code)
        assert repl.execute("n += 1  # \ud800").status == "error"
        assert repl.execute(KILL).blocks_undone == 1
        assert repl.get("n") == 2


@needs_strict
@pytest.mark.parametrize("then", ["another block", "a rollback"])
async def test_cancelled_rollback_loses_no_block(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    begun, resume = asyncio.Event(), StartedWorker.resume

    async def resumed(*arguments: Any) -> Any:
        begun.set()
        return await resume(*arguments)

    monkeypatch.setattr(StartedWorker, "resume", resumed)
    limits = LIMITS.replace(checkpoint="each", keep_checkpoints=2)
    async with Sandbox(limits, "strict", warm=0) as sandbox, sandbox.repl() as repl:
        for code in ("n = 0", "n += 1", f"n += 1\n{THREAD}", "n += 1"):
            await repl.aexecute(code)
        running = asyncio.create_task(repl.aexecute(KILL))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        if then == "a rollback":
            assert (await repl.arollback(), repl.record.blocks) == (3, 1)
        assert await repl.aget("n") == (3 if then == "another block" else 0)
        assert (await repl.aexecute(KILL)).blocks_undone == 1
        assert await repl.aget("n") == (3 if then == "another block" else 0)


async def cancelled(repl: SandboxedRepl, code: str, also_init: bool = False) -> None:
    """Cancel the caller of a block once it has printed, and kill its init just before."""
    begun = asyncio.Event()
    running = asyncio.create_task(repl.aexecute(code, on_output=lambda *_: begun.set()))
    await begun.wait()
    if also_init:
        assert repl.pid is not None
        os.kill(repl.pid, 9)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_refused_rollback_after_a_cancelled_block_leaves_the_variables() -> None:
    async with Sandbox(LIMITS, "standard", warm=0) as sandbox, sandbox.repl() as repl:
        repl.kills_when_cancelled = True
        await repl.aexecute("x = 1")
        await cancelled(repl, "print(1, flush=True)\nwhile True: pass")
        with pytest.raises(ConfigurationError):
            await repl.arollback()
        assert await repl.aget("x") == 1


async def test_file_written_after_a_lost_worker_loses_no_variables() -> None:
    async with Sandbox(LIMITS, "standard", warm=0) as sandbox, sandbox.repl() as repl:
        repl.kills_when_cancelled = True
        await repl.aexecute("x = 1")
        worker = repl._worker.worker
        await cancelled(repl, "print(1, flush=True)\nwhile True: pass", also_init=True)
        await worker.gone.wait()
        await repl.files.awrite("file", b"text")
        assert await repl.aget("x") == 1
        assert await repl.files.aread("file") == b"text"


def test_repl_that_its_blocks_have_ruined_is_replaced(repl: SandboxedRepl) -> None:
    repl.execute("x = 1")
    assert [repl.execute(KILL).blocks_undone for _ in range(2)] == [1, 1]
    block = repl.execute(KILL)
    assert (block.blocks_undone, repl.replayed.blocks) == (None, 0)
    assert "it was killed 3 times in a row" in (block.error or "")
    assert repl.execute("print('x' in globals(), context)").stdout == "False the context\n"


def test_children_in_the_background_have_their_answers_or_an_error(standard: Sandbox) -> None:
    answers = Answers()
    with standard.repl(answer=answers) as repl:
        repl.execute("done, never = rlm_start('soon'), rlm_start('never')\nprint(done.result(), never.done)")
        assert repl.execute(KILL).blocks_undone == 1
        block = repl.execute("print(done.result(), '|', never.result())")
        assert block.stdout == "answer 0 | Error: it ended with the REPL that had started it\n"
        assert answers.asked == ["soon"]


async def test_query_of_many_children_makes_its_digests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Query]()

    def counted(query: Query, model: str | None = None) -> list[bytes]:
        made.append(query)
        return keys_of(query, model)

    monkeypatch.setattr(repl_blocks, "keys_of", counted)
    again = repl_blocks.BlockAgain.__new__(repl_blocks.BlockAgain)
    again.answers = Remembered()
    prompts = [str(number) for number in range(500)]
    slots = await again._off_the_clock(Query("1:1", "rlm", prompts, background=True))
    assert (len(slots), len(made)) == (500, 2)


async def test_cancelled_callers_repl_has_its_variables_at_the_next_block() -> None:
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('on', flush=True)\nwhile True: pass"
    async with Sandbox(LIMITS, "standard", warm=0) as sandbox, sandbox.repl() as repl:
        await repl.aexecute("x = 1")
        await cancelled(repl, deaf)
        assert await repl.aget("x") == 1


async def test_cancelled_replay_ends_and_begins_again_at_the_next_block() -> None:
    async with Sandbox(LIMITS, "standard", warm=0) as sandbox, sandbox.repl() as repl:
        await repl.aexecute("import os; x = 1; own = os.getpid()")
        repl.provide({"first": await repl.aget("own")})
        await repl.aexecute("import time; first == own or time.sleep(0.5)")
        running = asyncio.create_task(repl.aexecute(KILL))
        while not isinstance(repl._blocks.run, repl_blocks.BlockAgain):
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await repl.aget("x") == 1
        assert (await repl.aexecute(KILL)).blocks_undone == 1  # the third replay, after two kills


READS = """
import sys
from rlm_broker import ReplRecord, Sandbox
with (
    Sandbox(isolation="standard", warm=0) as sandbox,
    sandbox.repl("the context", tools={"price": None or (lambda name: 7)}, record=ReplRecord.load(sys.argv[1])) as repl,
):
    print(*repl.replayed, *repl.get("drawn", "single", "many", "first", "kept", "limit"))
    repl.execute("more = price('lens')")
    repl.execute("import os; os._exit(1)")
    print(*repl.replayed, *repl.get("drawn", "limit", "more"))
"""


def test_other_process_goes_on_from_a_saved_record(standard: Sandbox, tmp_path: Path) -> None:
    with standard.repl("the context", Answers(), tools={"price": lambda name: len(name)}) as repl:
        for code in BLOCKS:
            repl.execute(code, stdin="given\n")
        repl.provide({"limit": 10})
        repl.execute("kept += limit")
        drawn = repl.get("drawn")
        repl.record.save(tmp_path / "record")
        assert repl.record.until(4).blocks == 4
    assert stat.S_IMODE((tmp_path / "record").stat().st_mode) == 0o600
    command = [sys.executable, "-c", READS, str(tmp_path / "record")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"8 None {drawn} answer 0 ['answer 1', 'answer 2', 'answer 3'] 4 15 10"
    assert second == f"9 None {drawn} 10 7"


def saved(entry: object) -> bytes:
    """Return a file of a record that has this entry."""
    return json.dumps({"format": "rlm-broker record 1", "seed": None, "entries": [entry]}).encode()


def frame(missing_bytes: int, name: str) -> str:
    """Return the frame of a value, whose prefix announces more bytes than there are."""
    payload = encode(Provide(name, msgspec.Raw(b"1")))
    return base64.b64encode(PREFIX.pack(len(payload) + missing_bytes) + payload).decode()


UNREADABLE = {
    "none": (None, "cannot be read: No such file"),
    "text": (b"x = 1", "is no record of a REPL that this version reads"),
    "another version": (b'{"format":"rlm-broker record 2","entries":[]}', "is no record of a REPL"),
    "nested": (b"[" * 100_000, "is no record of a REPL"),
    "negative time": (saved({"type": "block", "code": "", "seconds": -1e9}), r"Expected `float` >= 0.0"),
    "no number": (saved({"type": "block", "code": "\ud800", "seconds": float("nan")}), r"Expected `float` >= 0.0"),
    "negative block": (saved({"type": "block", "code": "", "number": -7}), "Expected `int` >= 0"),
    "large block": (saved({"type": "block", "code": "", "number": 10**60}), "Expected `int` <="),
    "no message": (saved({"type": "given", "frames": {"a": "/////w=="}}), "is no record of a REPL"),
    "short frame": (saved({"type": "given", "frames": {"a": frame(9, "a")}}), "the value 'a' is malformed"),
    "many entries": (saved(1)[:-2] + b",1" * record.MAX_FILE_VALUES + b"]}", "has more than .* values"),
    "another name": (saved({"type": "given", "frames": {"b": frame(0, "a")}}), "the value 'b' is malformed"),
}


def test_named_pipe_without_a_writer_is_no_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        ReplRecord.load(tmp_path / "pipe")


@pytest.mark.parametrize("blocks", [-1, 1.0, "1", None, True])
def test_record_has_a_whole_number_of_first_blocks(blocks: object) -> None:
    with pytest.raises(ConfigurationError, match="give a number of blocks, from 0 on"):
        ReplRecord().until(cast("int", blocks))


@table("kind", UNREADABLE)
def test_file_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    content, why = UNREADABLE[kind]
    if content is not None:
        (tmp_path / "record").write_bytes(content)
    with pytest.raises(ConfigurationError, match=why) as refused:
        ReplRecord.load(tmp_path / "record")
    assert "\n" not in str(refused.value)


def test_block_that_cannot_be_sent_ends_the_replay(standard: Sandbox) -> None:
    with standard.repl(record=ReplRecord([RecordedBlock("x = '\ud800'")])) as repl:
        assert (repl.replayed.problem or "").startswith("block 1 cannot be sent")


async def test_killed_run_goes_on_with_its_variables() -> None:
    client = ScriptedClient(
        [
            "```repl\npart = llm_query('one')\nprint(part)\n```",
            "part of the answer",
            "```repl\nimport os; os._exit(1)\n```",
            "```repl\nFINAL(part)\n```",
        ]
    )
    async with RLM(client, limits=Limits(checkpoint="never"), sandbox=Sandbox(isolation="standard", warm=0)) as rlm:
        completion = await rlm.acompletion("the context", "Which part?")
    assert completion.response == "part of the answer"
    assert len(client.requests) == 4
    assert "Your variables are as they were before this block." in str(completion.messages)
