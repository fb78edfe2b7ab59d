"""Batches by the library: results as they are done, limits, ends, and going on."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rlm_broker.batch import batch as batches
from rlm_broker.batch.items import BatchItem, BatchResult
from rlm_broker.batch.journal import Journal
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.models.models import Models
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, RunCancelled
from rlm_broker.limits import BatchLimits, Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.batches import CountingModel, items, lines_of
from tests.support.waiting import turns, until, until_now

pytestmark = pytest.mark.filterwarnings("ignore:isolation level 'process'")

PLAIN = Limits(max_depth=0)
"""Limits of runs that are plain completions, which need no REPL."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(isolation="process", seed=1) as opened:
        yield opened


@pytest.fixture
def model() -> CountingModel:
    return CountingModel(lambda text: text.partition("\n")[0][-12:])


@pytest.fixture
def rlm(sandbox: Sandbox, model: CountingModel) -> RLM:
    return RLM(model, sandbox=sandbox, limits=PLAIN)


def test_results_come_with_their_ids_and_are_written(rlm: RLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    batch = rlm.batch(list(items(20)), out=out, max_concurrent=4)
    results = list(batch)
    assert {result.id for result in results} == {f"item {number}" for number in range(20)}
    assert [line["id"] for line in lines_of(out)] == [result.id for result in results]
    assert {result.status for result in results} == {"answered"}
    line = lines_of(out)[0]
    assert line["answer"] == results[0].answer
    assert line["usage"] == {
        "counting": {"total_calls": 1, "total_input_tokens": 10, "total_output_tokens": 5, "total_cost": 0.25}
    }
    assert line["usage_by_depth"].keys() == {"0"}
    seen = batch.progress
    assert (seen.total, seen.done, seen.running, seen.left_s, seen.usage.total_cost) == (20, 20, 0, 0.0, 5.0)


async def test_async_form_takes_an_async_iterable(model: CountingModel) -> None:
    async def asynchronously() -> AsyncIterator[BatchItem]:
        for number in range(5):
            yield BatchItem(f"{number}", "context", "question?", {"n": number})

    async with RLM(model, sandbox="process", limits=PLAIN) as rlm, rlm.batch(asynchronously()) as batch:
        results = {result.id: result async for result in batch}
    assert [results[f"{number}"].metadata for number in range(5)] == [{"n": number} for number in range(5)]
    assert batch.progress.total is None
    assert all(result.completion is not None for result in results.values())


def test_further_call_runs_only_what_is_not_finished(rlm: RLM, model: CountingModel, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    list(rlm.batch(items(5), out=out))
    batch = rlm.batch(items(8), out=out)
    assert {result.id for result in batch} == {"item 5", "item 6", "item 7"}
    assert len(model.calls) == 8
    assert (batch.progress.skipped, batch.progress.done) == (5, 3)
    assert batch.progress.usage.total_calls == 8


def test_other_model_or_question_is_refused(sandbox: Sandbox, rlm: RLM, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    list(rlm.batch(items(2), out=out))
    other = RLM(lambda _: "x", sandbox=sandbox, limits=Limits(max_depth=0, max_iterations=5))
    with pytest.raises(ConfigurationError, match=r"model was 'counting' and is 'function'; limits\.max_iterations was"):
        list(other.batch(items(2), out=out))
    with pytest.raises(ConfigurationError, match="'item 0' has another question or context"):
        list(rlm.batch([{"id": "item 0", "context": "other"}], out=out))
    assert len(lines_of(out)) == 2


def test_failures_are_results_and_do_not_end_it(sandbox: Sandbox, tmp_path: Path) -> None:
    def reply(text: str) -> str:
        if "1" in text:
            raise ValueError("the provider says no")
        return "yes"

    out = tmp_path / "out.jsonl"
    missing = {"id": "missing", "path": str(tmp_path / "missing.txt")}
    rlm = RLM(CountingModel(reply), sandbox=sandbox, limits=PLAIN)
    batch = rlm.batch([*items(3), missing], out=out)
    results = {result.id: result for result in batch}
    assert [results[f"item {number}"].status for number in range(3)] == ["answered", "failed", "answered"]
    assert isinstance(results["item 1"].failure, ModelFailed)
    assert (results["missing"].status, results["missing"].error_kind) == ("failed", "context")
    errors = {line["id"]: line["error"] for line in lines_of(out) if "error" in line}
    assert errors["item 1"] == {"kind": "provider", "message": "the provider says no"}
    assert "missing.txt" in errors["missing"]["message"]
    assert (batch.progress.failed, batch.progress.done) == (2, 4)


def test_outage_is_not_paid_twice(sandbox: Sandbox, tmp_path: Path) -> None:
    """The provider fails at the second turn. The item that is asked again has the answer to the first one."""
    is_up = threading.Event()
    model = CountingModel()

    def reply(_: str) -> str:
        if model.calls and not is_up.is_set():
            raise ValueError("down")
        return "```repl\nprint(1)\n```" if not model.calls else "FINAL(done)"

    model.reply = reply
    rlm, out = RLM(model, sandbox=sandbox), tmp_path / "out.jsonl"
    (failed,) = rlm.batch(items(1), out=out)
    assert (failed.status, failed.error_kind, failed.usage.total_calls) == ("failed", "provider", 1)
    is_up.set()
    (result,) = rlm.batch(items(1), out=out, retry_failed=True)
    assert (result.answer, result.replayed.total_calls, result.usage.total_calls) == ("done", 1, 2)
    assert len(model.calls) == 2


def test_calls_of_a_killed_block_are_paid_once_by_all_processes(sandbox: Sandbox, tmp_path: Path) -> None:
    """The journal has what the killed block has paid for, and its retry takes that from memory in each process."""
    paid, is_up = list[str](), threading.Event()
    asks = "```repl\nprint(*map(llm_query, {}))\n```"
    turns = [asks.format("'ab'").replace("\n```", "; import os; os._exit(1)\n```"), asks.format("'bca'"), "FINAL(done)"]

    def root(request: LMRequest) -> str:
        paid.append(turns[len(request.messages) // 2 - 1])
        if paid[-1] == turns[2] and not is_up.is_set():
            raise ValueError("down")
        return paid[-1]

    def reader(request: LMRequest) -> str:
        paid.append(str(request.messages[-1].content))
        return "read"

    rlm, out = RLM(ScriptedClient(root), ScriptedClient(reader), sandbox=sandbox), tmp_path / "out.jsonl"
    (failed,) = rlm.batch(items(1), out=out)
    assert (failed.status, failed.usage.total_calls) == ("failed", 5)
    is_up.set()
    (result,) = rlm.batch(items(1), out=out, retry_failed=True)
    assert (result.answer, result.replayed.total_calls, result.usage.total_calls) == ("done", 5, 6)
    assert paid == [turns[0], "a", "b", turns[1], "c", turns[2], turns[2]]


class Trained(CountingModel):
    """A model whose replies have token ids."""

    async def complete(self, request: LMRequest) -> LMReply:
        reply = await super().complete(request)
        return msgspec.structs.replace(reply, extra={"token_ids": [len(reply.text)]})


def test_trajectories_have_children_and_token_ids(sandbox: Sandbox, tmp_path: Path) -> None:
    """Those of replayed calls, too."""

    def reply(text: str) -> str:
        if "the task" in text:
            return "FINAL(of the child)"
        return "```repl\nprint(rlm_query('the task', context='a part'))\n```" if "1" not in text else "FINAL(end)"

    out, model = tmp_path / "out.jsonl", Trained(reply)
    rlm = RLM(model, sandbox=sandbox, limits=Limits(max_depth=2))
    (result,) = rlm.batch([{"id": "a", "context": "a text"}], out=out, trajectories=True)
    assert result.answer == "end"
    (line,) = lines_of(out)
    replies = [message for message in line["messages"] if message["role"] == "assistant"]
    assert [message["token_ids"] for message in replies] == [[len(message["content"])] for message in replies]
    (child,) = line["children"]
    assert (child["run"], child["depth"]) == ("1.1", 1)
    assert [message["role"] for message in child["messages"]] == ["system", "user", "assistant"]
    assert child["messages"][-1] == {"role": "assistant", "content": "FINAL(of the child)", "token_ids": [19]}


def test_samples_of_an_item_are_each_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    """Also where a cache has the answer to the first. Further samples are added to what is there."""
    out, model = tmp_path / "out.jsonl", CountingModel()
    model.fingerprint = "counting"
    rlm = RLM(model, sandbox=sandbox, models=Models(cache=tmp_path / "cache"), limits=PLAIN)
    batch = rlm.batch(list(items(2)), out=out, samples=3)
    assert batch.progress.total == 6
    assert sorted((result.id, result.sample) for result in batch) == [
        (f"item {number}", sample) for number in range(2) for sample in range(3)
    ]
    assert len(model.calls) == 6
    more = rlm.batch(items(3), out=out, samples=4)
    assert len(list(more)) == 6
    assert more.progress.skipped == 6
    assert len({(line["id"], line["sample"]) for line in lines_of(out)}) == 12


def test_link_to_a_file_of_results_stays_a_link(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    out, target = tmp_path / "out.jsonl", tmp_path / "elsewhere" / "results.jsonl"
    out.symlink_to(target)
    rlm = RLM(lambda _: "yes", sandbox=sandbox, limits=PLAIN)
    list(rlm.batch([*items(1), {"id": "missing", "path": "missing.txt"}], out=out))
    list(rlm.batch([*items(1), {"id": "missing", "context": "found"}], out=out, retry_failed=True))
    assert out.is_symlink()
    assert {line["id"]: line["status"] for line in lines_of(target)} == {"item 0": "answered", "missing": "answered"}


def test_results_that_had_no_room_come_before_the_end(rlm: RLM, model: CountingModel, tmp_path: Path) -> None:
    """Results that are written down are given out, also where the batch is cancelled before they are taken."""
    out, seen = tmp_path / "out.jsonl", []
    with rlm.batch(items(50), out=out, max_concurrent=2) as batch:
        until_now(lambda: len(lines_of(out)) == 4)
        batch.cancel()
        with pytest.raises(RunCancelled):  # noqa: PT012
            for result in batch:
                seen.append(result.id)
    assert seen == [line["id"] for line in lines_of(out)]
    assert len(model.calls) == 4


def test_budget_holds_over_all_processes(rlm: RLM, model: CountingModel, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(LimitReached, match=r"max_budget_usd = 1 was reached, 1 used"):
        list(rlm.batch(items(50), out=out, limits=BatchLimits(max_budget_usd=1), max_concurrent=4))
    assert len(model.calls) == 4
    with pytest.raises(LimitReached, match=r"max_budget_usd = 1 "):
        list(rlm.batch(items(50), out=out, limits=BatchLimits(max_budget_usd=1)))
    assert len(model.calls) == 4
    with pytest.raises(LimitReached, match=r"max_tokens = 150 was reached, 150 used"):
        list(rlm.batch(items(50), out=out, limits=BatchLimits(max_tokens=150)))
    assert len(model.calls) == 10
    list(rlm.batch(items(40), out=out))
    assert {line["id"] for line in lines_of(out)} == {f"item {number}" for number in range(40)}
    assert len(model.calls) == len(lines_of(out)) == 40


@pytest.mark.parametrize("is_limit", [True, False])
def test_answers_under_way_at_a_soft_end_are_kept(sandbox: Sandbox, tmp_path: Path, is_limit: bool) -> None:
    """Their runs are cancelled, and the answers come from the journal when the batch goes on."""
    out, model = tmp_path / "out.jsonl", CountingModel(lambda _: "yes")
    rlm = RLM(model, sandbox=sandbox, limits=PLAIN)
    batch = rlm.batch(items(3), out=out, limits=BatchLimits(timeout_s=3600))
    model.gate = asyncio.Event()
    with batch:
        loop = batch.event_loop
        assert loop is not None
        until_now(lambda: len(model.open) == 3)
        if is_limit:
            loop.call_soon(lambda: batch._end(LimitReached("timeout_s", 1, 1)))
        else:
            batch.stop()
        until_now(lambda: batch._error is not None)
        loop.call_soon(model.gate.set)
        with pytest.raises(LimitReached if is_limit else RunCancelled):
            list(batch)
    assert lines_of(out) == []
    assert len(model.calls) == 3
    again = rlm.batch(items(3), out=out)
    results = list(again)
    assert len(model.calls) == 3
    assert [result.replayed.total_calls for result in results] == [1, 1, 1]
    assert again.progress.replayed.total_cost == 0.75
    assert again.progress.usage.total_cost == 0.75
    assert all(line["replayed"]["total_calls"] == 1 for line in lines_of(out))


def test_item_that_needs_no_further_call_is_finished_at_a_soft_end(sandbox: Sandbox, tmp_path: Path) -> None:
    out, model, gates = tmp_path / "out.jsonl", CountingModel(lambda _: "yes"), (asyncio.Event(), asyncio.Event())

    def given() -> Iterator[dict[str, Any]]:
        for number, item in enumerate(items(2)):
            until_now(lambda: model.gate is None or bool(gates[0]._waiters))
            model.gate = gates[number]
            yield item

    with RLM(model, sandbox=sandbox, limits=PLAIN).batch(given(), out=out) as batch:
        loop = batch.event_loop
        assert loop is not None
        until_now(lambda: len(model.open) == 2)
        batch.stop()
        loop.call_soon(gates[0].set)
        until_now(lambda: len(lines_of(out)) == 1)
        loop.call_soon(gates[1].set)
        with pytest.raises(RunCancelled):
            list(batch)
    assert len(lines_of(out)) == 1


def test_limit_ends_it_with_the_call_beyond(rlm: RLM, tmp_path: Path) -> None:
    """Each item takes one call of 15 tokens. What the last one has paid for is not lost, and a finished batch ends
    well under any limit."""
    out, bounds = tmp_path / "out.jsonl", BatchLimits(max_tokens=30)
    assert len(list(rlm.batch(list(items(2)), out=out, limits=bounds, max_concurrent=1))) == 2
    assert list(rlm.batch(list(items(2)), out=out, limits=BatchLimits(max_tokens=1, timeout_s=1e-9))) == []
    with pytest.raises(LimitReached, match="max_tokens"):
        list(rlm.batch(list(items(3)), out=out, limits=bounds))
    assert len(lines_of(out)) == 2


def test_time_ends_it_and_counts_on(
    rlm: RLM, model: CountingModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    model.gate = asyncio.Event()
    monkeypatch.setattr(batches, "DRAIN_S", 0.05)
    for _ in range(2):
        with pytest.raises(LimitReached, match=r"timeout_s = 0\.05"):
            list(rlm.batch(items(2), out=out, limits=BatchLimits(timeout_s=0.05)))
        assert model.calls == []
        assert lines_of(out) == []
        model.gate.set()


def test_unpriced_model_is_refused_beside_a_budget(sandbox: Sandbox) -> None:
    rlm = RLM(CountingModel(cost=None), sandbox=sandbox, limits=PLAIN)
    with pytest.raises(ConfigurationError, match="max_budget_usd cannot be kept: the price of model 'counting'"):
        list(rlm.batch(items(5), limits=BatchLimits(max_budget_usd=1)))


def test_results_that_are_not_taken_stop_the_feeding(rlm: RLM, model: CountingModel) -> None:
    pulled: list[int] = []

    def counted() -> Iterator[dict[str, Any]]:
        for number, item in enumerate(items(5_000)):
            pulled.append(number)
            yield item

    with rlm.batch(counted(), max_concurrent=4) as batch:
        results = iter(batch)
        next(results)
        until_now(lambda: len(model.calls) >= 9)
        asyncio.run(turns(200))
        assert len(model.calls) == 9  # one was taken, four wait, and four have no room
        assert len(pulled) < 200


def test_leaving_the_loop_ends_all_runs(rlm: RLM, model: CountingModel, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for _ in rlm.batch(items(5_000), out=out, max_concurrent=4):
        break
    before = len(model.calls)
    asyncio.run(turns(50))
    assert len(model.calls) == before < 20
    Journal(out).close()  # its files are free again


def test_cancel_ends_it_from_any_thread(rlm: RLM, model: CountingModel, tmp_path: Path) -> None:
    model.gate = asyncio.Event()
    batch = rlm.batch(items(5), out=tmp_path / "out.jsonl")

    def cancel() -> None:
        until_now(lambda: len(model.open) == 5)
        batch.cancel()

    threading.Thread(target=cancel).start()
    with pytest.raises(RunCancelled):
        list(batch)
    assert model.open == set()
    assert lines_of(tmp_path / "out.jsonl") == []


def test_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    """Ctrl+C comes while REPLs run code."""
    before = set(psutil.Process().children(recursive=True))
    started = tmp_path / "started"
    code = f"```repl\nopen({str(started)!r}, 'w').close()\nimport time\nwhile True: time.sleep(1)\n```"
    model = CountingModel(lambda _: code)
    rlm = RLM(model, sandbox="process")
    out = tmp_path / "out.jsonl"

    def interrupt() -> None:
        until_now(started.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(RunCancelled):
        list(rlm.batch(items(3), out=out))
    assert set(psutil.Process().children(recursive=True)) <= before
    assert lines_of(out) == []
    assert not rlm.is_open


async def test_closing_the_rlm_ends_its_batch(tmp_path: Path) -> None:
    """Items that were under way stay unfinished."""
    model, out = CountingModel(), tmp_path / "out.jsonl"
    model.gate = asyncio.Event()
    rlm = RLM(model, sandbox="process", limits=PLAIN)
    async with rlm:
        batch = rlm.batch(items(3), out=out)
        taking = asyncio.ensure_future(taken(batch))
        await until(lambda: len(model.open) == 3)
    with pytest.raises(RunCancelled):
        await taking
    assert lines_of(out) == []


async def taken(batch: Any) -> list[BatchResult]:
    return [result async for result in batch]


def test_iterable_that_raises_ends_it_after_its_items(rlm: RLM, tmp_path: Path) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield from items(3)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012
        for result in rlm.batch(failing(), out=tmp_path / "out.jsonl"):
            seen.append(result.id)
    assert sorted(seen) == ["item 0", "item 1", "item 2"]
    assert len(lines_of(tmp_path / "out.jsonl")) == 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_concurrent": 0}, "max_concurrent must be at least 1, not 0"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"settings_changed": True}, "settings_changed needs the file of results: give out"),
        ({"max_concurrent": "4"}, "max_concurrent must be an int, not str"),
        ({"limits": Limits()}, "limits of a batch must be a BatchLimits, not Limits"),
        ({"out": 5}, "out must be a str or PathLike, not int"),
        ({"retry_failed": True}, "retry_failed needs the file of results: give out"),
        ({"fail_fast": 1}, "fail_fast must be a bool, not int"),
        ({"score": 1}, "score must be a function, not int"),
        ({"output_type": 5}, "output_type"),
    ],
)
def test_wrong_arguments_are_refused_at_once(rlm: RLM, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        rlm.batch([], **given)


def test_batch_is_iterated_over_once(rlm: RLM) -> None:
    batch = rlm.batch(items(1))
    assert len(list(batch)) == 1
    with pytest.raises(ConfigurationError, match="a batch runs once"):
        list(batch)
    with rlm.batch(items(1)) as opened:
        assert len(list(opened)) == 1
        with pytest.raises(ConfigurationError, match="iterated over once"):
            list(opened)
    with pytest.raises(ConfigurationError, match="a persistent RLM answers one question at a time"):
        RLM("offline", persistent=True).batch([])


def test_memory_stays_flat(sandbox: Sandbox) -> None:
    """Growth stops after the first items: each further one takes a digest."""
    rlm = RLM(lambda _: "yes", sandbox=sandbox, limits=PLAIN)
    process, seen = psutil.Process(), []
    for number, _ in enumerate(
        rlm.batch(({**item, "context": "x" * 20_000} for item in items(1_500)), max_concurrent=8)
    ):
        if number in (500, 1_499):
            seen.append(process.memory_info().rss)
    assert seen[1] - seen[0] < 8 << 20
