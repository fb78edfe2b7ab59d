"""Whole runs with models behind real HTTP: many at once, recorded and replayed, followed, and without a leak."""

import asyncio
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.client_queue import Serving
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.recording import Recording
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.models.model import Model
from rlm_broker.broker.models.models import Models
from rlm_broker.broker.routing import Route
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, ReplayDiverged
from rlm_broker.events.event import CallEnded, CallRetried, CallText, Event
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.sandbox.sandbox import Sandbox, place
from rlm_broker.usage import Usage
from tests.e2e.conftest import MakeRLM
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure, streamed
from tests.support.processes import living_below
from tests.support.waiting import until

WAIT_S = 60


@pytest.fixture
def _many_files() -> Iterator[None]:
    """Both ends of a thousand connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fan_out(prompts: int) -> ScriptedClient:
    code = f"FINAL(sum(a == 'ok' for a in llm_query_batched([f'{{context}} {{n}}' for n in range({prompts})])))"
    return ScriptedClient(lambda _: f"```repl\n{code}\n```", "root")


@pytest.mark.usefixtures("_many_files")
async def test_thousand_calls_are_in_flight_at_once() -> None:
    """The server answers none of them before all have come: were they not sent at the same time, none would return."""
    limits = Limits(max_concurrent_calls=125)
    arrived: list[str] = []
    everybody = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(request: dict[str, Any]) -> Answer:
        arrived.append(request["messages"][0]["content"])
        if len(arrived) == 1000:
            loop.call_soon_threadsafe(everybody.set)
        return completion("ok", delay_s=1000 if len(arrived) < 1000 else 0)

    with FakeOpenAI(answer) as server:
        sub = OpenAICompatibleClient(server.base_url, "slow", max_concurrent=1000)
        async with (
            LMHandler(fan_out(125), other_backend_client=sub) as handler,
            place(Sandbox(limits), listener=handler.listener) as sandbox,
        ):
            rlms = [RLM(handler=handler, sandbox=sandbox, limits=limits) for _ in range(8)]
            runs = asyncio.gather(*(rlm.acompletion(f"context {n}", "?") for n, rlm in enumerate(rlms)))
            await asyncio.wait_for(everybody.wait(), WAIT_S)
            assert server.at_once >= 999
            runs.cancel()
            await asyncio.wait({runs})
        await sub.aclose()
    assert len(set(arrived)) == 1000


async def test_queued_calls_do_not_starve_other_repls() -> None:
    """A REPL that queues 4,000 calls does not starve the other REPL."""
    limits = Limits(max_batch_prompts=4_000, max_concurrent_calls=4_000)
    order: list[str] = []

    def answer(request: dict[str, Any]) -> Answer:
        order.append(request["messages"][0]["content"].split()[0])
        return completion("ok")

    code = "FINAL(len(llm_query_batched([f'{context[0]} {n}' for n in range(context[1])])))"
    root = ScriptedClient(lambda _: f"```repl\n{code}\n```", "root")
    with FakeOpenAI(answer) as server:
        sub = OpenAICompatibleClient(server.base_url, "busy", max_concurrent=4)
        async with (
            LMHandler(root, other_backend_client=sub) as handler,
            place(Sandbox(limits), listener=handler.listener) as sandbox,
        ):
            rlm = RLM(handler=handler, sandbox=sandbox, limits=limits)
            greedy = asyncio.create_task(rlm.acompletion(["greedy", 4_000], "?"))
            await until(lambda: len(order) >= 100)
            modest = [asyncio.create_task(rlm.acompletion([f"modest{n}", 50], "?")) for n in range(3)]
            answers = [(await run).response for run in modest]
            assert not greedy.done()
            greedy.cancel()
            await asyncio.wait({greedy})
        await sub.aclose()
    assert answers == ["50"] * 3
    for name in ("modest0", "modest1", "modest2"):  # each from its own start: they need not come at the same time
        first = order.index(name)
        last = len(order) - 1 - order[::-1].index(name)
        during = Counter(order[first : last + 1])
        assert during[name] == 50
        assert during["greedy"] <= 2 * 50, "one of each session in turn, and what was on its way"


def multi_turn(request: dict[str, Any]) -> Answer:
    last = str(request["messages"][-1]["content"])
    if "characters in all." in last:
        code = "parts = [context[:9], context[9:18]]\nprint(llm_query_batched(parts))\nprint(llm_query('alone'))"
        return completion(f"I ask.\n```repl\n{code}\n```", 100, 20)
    if "Block 1" in last:
        return completion("FINAL(the parts were read)", 150, 5)
    return failure(400, "no thanks") if last == "alone" else completion(last.upper(), 9, 3)


def outcome(done: Completion) -> tuple[Any, ...]:
    return done.response, [turn.blocks[0].stdout for turn in done.trajectory if turn.blocks], len(done.messages)


def test_replay_needs_no_provider(tmp_path: Path, rlm: MakeRLM) -> None:
    """A replay gives the outcome of the recorded run without a provider."""
    file = tmp_path / "run.jsonl"
    events: list[Event] = []
    with FakeOpenAI(multi_turn) as server:
        model = Model(base_url=server.base_url, name="m", usd_per_million_tokens=(1.0, 1.0))
        first = rlm(model, models=Models(record=file)).completion("some text to read", "What is in it?")
        assert len(server.requests) == 5
    replayed = rlm(models=Models(replay=file), on_event=events.append).completion("some text to read", "What is in it?")
    assert outcome(replayed) == outcome(first)
    assert "SOME TEXT" in first.trajectory[0].blocks[0].stdout
    assert "Error: m: HTTP status 400: no thanks" in first.trajectory[0].blocks[0].stdout.replace("\\", "")
    assert first.usage_summary.model_usage_summaries["m"].total_calls == 4
    assert replayed.usage_summary.model_usage_summaries == {"m": Usage(4, 0, 0, 0.0, stored_calls=4)}
    ids = [json.loads(line)["id"] for line in file.read_text().splitlines()[1:]]
    assert [(each["run"], each["block"]) for each in ids] == [("1", 0), ("1", 1), ("1", 1), ("1", 1), ("1", 1)]
    assert len({json.dumps(each) for each in ids}) == 5
    assert sum(isinstance(event, CallEnded) for event in events) == 5


def test_replay_repeats_sets_and_random_numbers(tmp_path: Path) -> None:
    """A replay of code that prints a set and random numbers does not diverge."""
    code = "```repl\nimport random\nprint({word for word in context.split()}, random.random())\n```"
    file, context = tmp_path / "run.jsonl", "alpha beta gamma delta epsilon zeta eta theta"
    RLM(ScriptedClient([code, "FINAL(done)"]), models=Models(record=file)).completion(context, "q")
    for _ in range(2):
        assert RLM(models=Models(replay=file)).completion(context, "q").response == "done"
    with Sandbox(seed=5) as sandbox, pytest.raises(ConfigurationError, match="was made with seed="):
        RLM(models=Models(replay=file), sandbox=sandbox)
    closed = Sandbox()
    assert RLM(models=Models(replay=file), sandbox=closed).completion(context, "q").response == "done"
    assert closed.seed is None  # it had the recorded one while it was open


def test_recording_holds_the_seed_of_the_sandbox(tmp_path: Path) -> None:
    with Sandbox(seed=5) as sandbox:
        RLM(ScriptedClient(["FINAL(x)"]), models=Models(record=tmp_path / "lent"), sandbox=sandbox).completion("c", "q")
    RLM(ScriptedClient(["FINAL(x)"]), models=Models(record=tmp_path / "own"), sandbox=Sandbox(seed=6)).completion(
        "c", "q"
    )
    assert [Recording(tmp_path / name).models.seed for name in ("lent", "own")] == [5, 6]


def test_replay_divergence_shows_the_difference(tmp_path: Path, rlm: MakeRLM) -> None:
    """A replay that asks for another completion ends with the difference."""
    before = living_below()
    file = tmp_path / "run.jsonl"
    with FakeOpenAI(multi_turn) as server:
        rlm(server, models=Models(record=file)).completion("some text to read", "What is in it?")
    with pytest.raises(ReplayDiverged) as diverged:
        rlm(models=Models(replay=file)).completion("some next to read", "What is in it?")
    assert diverged.value.messages
    said = str(diverged.value).splitlines()
    assert "(run 1, block 0, call 1); the nearest recorded is run 1, block 0, call 1:" in said[0]
    assert "-some text to read" in said
    assert "+some next to read" in said
    assert living_below() == before


@pytest.mark.parametrize("stopped_in", ["the root's call", "a call of its code"])
async def test_replay_of_stopped_run_ends_there(tmp_path: Path, stopped_in: str, rlm: MakeRLM) -> None:
    file = tmp_path / "run.jsonl"
    root_answers = stopped_in == "a call of its code"
    replies = [completion("```repl\nprint(llm_query('x'))\n```")] if root_answers else []
    with FakeOpenAI(*replies, Answer(never=True)) as server:
        asks = rlm(server, models=Models(record=file))
        run = asyncio.create_task(asks.acompletion("some text", "?"))
        await until(lambda: len(server.requests) == len(replies) + 1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    with pytest.raises(ReplayDiverged) as ended:
        await rlm(models=Models(replay=file)).acompletion("some text", "?")
    call = "run 1, block 1, call 1" if root_answers else "run 1, block 0, call 1"
    assert str(ended.value) == f"the recording {file} ends here: its run was stopped in this call ({call})"


def test_replay_repeats_the_time_limit(tmp_path: Path, rlm: MakeRLM) -> None:
    """A replay of a run that reached its time limit reaches the limit again."""
    file, limits = tmp_path / "run.jsonl", Limits(run_timeout_s=0.3)
    with FakeOpenAI(Answer(never=True)) as server, pytest.raises(LimitReached, match="run_timeout_s"):
        rlm(server, models=Models(record=file), limits=limits).completion("some text", "?")
    with pytest.raises(LimitReached, match="run_timeout_s"):
        rlm(models=Models(replay=file), limits=limits).completion("some text", "?")


def test_replay_knows_allowed_model_names(tmp_path: Path, rlm: MakeRLM) -> None:
    file = tmp_path / "run.jsonl"
    code = "FINAL(llm_query('x', model='reader') + llm_query('y', model='alias-1') + llm_query('z', model='nobody'))"
    root, reader = ScriptedClient([f"```repl\n{code}\n```"], "root"), ScriptedClient(["one ", "two "], "reading")
    routes = [Route("reader", "alias-*")]
    first = rlm(root, models=Models({"reader": reader}, routes=routes, record=file)).completion("x", "?")
    again = rlm(models=Models(replay=file)).completion("x", "?")
    assert first.response == again.response
    assert str(first.response).startswith("one two Error: code may not call model 'nobody'")
    assert again.usage_summary.model_usage_summaries.keys() == {"root", "reading"}


async def test_call_text_is_streamed(rlm: MakeRLM) -> None:
    """The text of each call is told as it comes."""
    replies = [streamed("```repl\n", "print(llm_query('x'))", "\n```"), streamed("a", "b"), streamed("FINAL(done)")]
    texts: dict[int, list[str]] = {}
    with FakeOpenAI(*replies) as server:
        async for event in rlm(server).stream("x", "?"):
            if isinstance(event, CallText):
                texts.setdefault(event.call, []).append(event.text)
            if isinstance(event, Completion):
                assert event.response == "done"
    assert texts == {1: ["```repl\n", "print(llm_query('x'))", "\n```"], 2: ["a", "b"], 3: ["FINAL(done)"]}


def test_retry_is_an_event(rlm: MakeRLM) -> None:
    """A retry is an event, and the run goes on."""
    events: list[Event] = []
    with FakeOpenAI(failure(429, "slow down", retry_after="0.1"), completion("FINAL(done)")) as server:
        model = Model(base_url=server.base_url, name="m")
        done = rlm(model, on_event=events.append).completion("x", "?")
    assert done.response == "done"
    retried = [event for event in events if isinstance(event, CallRetried)]
    assert [event.attempt for event in retried] == [2]
    assert 0.1 <= retried[0].wait_s <= 0.5
    assert "slow down" in retried[0].reason


def test_pictures_of_code_are_sent_as_data(rlm: MakeRLM) -> None:
    code = (
        "picture = lambda url: [{'type': 'text', 'text': 'what?'}, {'type': 'image_url', 'image_url': {'url': url}}]\n"
        "print(llm_query(picture('data:image/png;base64,AAAA')))\n"
        "print(llm_query(picture('http://169.254.169.254/latest/meta-data')))\n"
        "print(llm_query_batched([picture('data:image/png;base64,AAAA'), picture('file:///etc/passwd')]))\n"
        "for wrong in ([], [{}], [{'type': 'file'}], [5], {'type': 'text'}):\n"
        "    try: llm_query(wrong)\n"
        "    except TypeError as error: print('TypeError')"
    )
    root = ScriptedClient([f"```repl\n{code}\n```", "FINAL(done)"], "root")
    with FakeOpenAI(completion("a cat")) as server:
        done = rlm(root, server).completion("x", "?")
    printed = done.trajectory[0].blocks[0].stdout.splitlines()
    assert printed[0] == "a cat"
    assert printed[1].startswith("Error: an image is given as data:")
    assert printed[2].startswith("['a cat', \"Error: an image is given as data")
    assert printed[3:] == ["TypeError"] * 5
    urls = {request["messages"][0]["content"][1]["image_url"]["url"] for request in server.requests}
    assert urls == {"data:image/png;base64,AAAA"}


def test_pictures_of_the_user_pass_through_untouched(rlm: MakeRLM) -> None:
    content = [{"type": "text", "text": "hi"}, {"type": "custom", "of": {"the": ["provider", 1]}}]
    with FakeOpenAI(completion("seen")) as server:
        model = Model(base_url=server.base_url, name="m")
        done = rlm(model, limits=Limits(max_depth=0)).completion([{"role": "user", "content": content}])
    assert done.response == "seen"
    assert server.requests[0]["messages"] == [{"role": "user", "content": content}]


async def test_direct_client_imports_no_litellm() -> None:
    program = (
        "import sys\n"
        "from rlm_broker import RLM, Limits, Model\n"
        "rlm = RLM(Model(base_url=sys.argv[1], name='m'), limits=Limits(max_depth=0))\n"
        "print(rlm.completion('x').response, 'litellm' in sys.modules)\n"
    )
    with FakeOpenAI(completion("hi")) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, server.base_url, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert out == b"hi False\n"


def test_handler_sets_how_clients_are_called() -> None:
    """A user's own handler may set how its clients are called."""
    with FakeOpenAI(failure(500, "oops")) as server:
        client = OpenAICompatibleClient(server.base_url, "m")
        handler = LMHandler(client)
        handler.serve(client, Serving(max_retries=0))
        with handler, pytest.raises(ModelFailed, match="oops"):
            handler.completion("x")
        with pytest.raises(ConfigurationError, match="give either models or a handler"):
            RLM(handler=handler, models=Models(replay="x"))
    assert len(server.requests) == 1


async def test_concurrent_runs_share_bounds_and_connections(rlm: MakeRLM) -> None:
    """Runs of one `RLM` at the same time share their bounds, and close no other run's connection."""
    with FakeOpenAI(replace(completion("done"), together=2)) as server:
        asks = rlm(Model(base_url=server.base_url, name="m", max_concurrent=2), limits=Limits(max_depth=0))
        answers = await asyncio.gather(*(asks.acompletion(f"{n}") for n in range(8)))
    assert [answer.response for answer in answers] == ["done"] * 8
    assert len(server.requests) == 8
    assert server.at_once == 2


def test_replay_calls_no_client_under_any_policy(tmp_path: Path, rlm: MakeRLM) -> None:
    file = tmp_path / "run.jsonl"
    root = ScriptedClient(["```repl\nFINAL(llm_query('x', model='offline'))\n```"], "root")
    first = rlm(root, models=Models(policy="open", record=file)).completion("x", "?")
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if '"depth":1' not in line) + "\n")
    with pytest.raises(ReplayDiverged):
        rlm(models=Models(replay=file)).completion("x", "?")
    file.write_text("\n".join(lines) + "\n")
    assert rlm(models=Models(replay=file)).completion("x", "?").response == first.response


def test_replay_repeats_a_batch_timeout(tmp_path: Path, rlm: MakeRLM) -> None:
    """The replay of a batch that ran out of time runs out of time again."""
    file = tmp_path / "run.jsonl"

    def answer(request: dict[str, Any]) -> Answer:
        last = str(request["messages"][-1]["content"])
        if "characters in all." in last:
            return completion("```repl\nprint(llm_query_batched([str(n) for n in range(6)], timeout_s=0.5))\n```")
        if "Block 1" in last:
            return completion("FINAL(done)")
        return completion(f"is {last}") if last == "0" else Answer(never=True)

    limits = Limits(max_concurrent_calls=2)
    with FakeOpenAI(answer) as server:
        first = rlm(server, models=Models(record=file), limits=limits).completion("x", "?")
    again = rlm(models=Models(replay=file), limits=limits).completion("x", "?")
    assert outcome(again) == outcome(first)
    printed = first.trajectory[0].blocks[0].stdout
    assert printed.count("not done within timeout_s = 0.5") == 5
    assert "is 0" in printed


async def test_cut_batch_frees_its_places(rlm: MakeRLM) -> None:
    """A batch that is cut off leaves no place of the client taken."""
    root = ScriptedClient(
        [
            "```repl\nprint(llm_query_batched([str(n) for n in range(20)], timeout_s=0.3))\n```",
            "```repl\nFINAL(llm_query('again'))\n```",
        ],
        "root",
    )

    def answer(request: dict[str, Any]) -> Answer:
        return completion("yes") if request["messages"][-1]["content"] == "again" else Answer(never=True)

    with FakeOpenAI(answer) as server:
        sub = Model(base_url=server.base_url, name="m", max_concurrent=2)
        asks = rlm(root, sub, limits=Limits(max_concurrent_calls=4, run_timeout_s=60))
        assert (await asks.acompletion("x", "?")).response == "yes"


def test_replay_repeats_a_full_window(tmp_path: Path, rlm: MakeRLM) -> None:
    """The replay of a run that filled its small window is the run as it was."""
    file = tmp_path / "run.jsonl"
    code = "```repl\nprint('a line of much text\\n' * 3, 'x' * 9_000)\n```"

    def answer(request: dict[str, Any]) -> Answer:
        turns = len(request["messages"]) // 2
        return completion("FINAL(done)" if turns > 8 else f"Turn {turns}.\n{code}", 2_000, 20)

    with FakeOpenAI(answer) as server:
        model = Model(base_url=server.base_url, name="m", context_tokens=6_000)
        first = rlm(model, models=Models(record=file)).completion("some text " * 500, "What?")
    assert first.response == "done"
    assert any("characters cut" in str(message.content) for message in first.messages[3:-2:2])
    again = rlm(models=Models(replay=file)).completion("some text " * 500, "What?")
    assert again.messages[1:] == first.messages[1:]
