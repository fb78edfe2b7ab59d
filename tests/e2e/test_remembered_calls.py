"""Calls that a killed block has paid for: the same run asks for them again at no cost."""

import asyncio
import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from rlm_broker import CallEnded, CallStarted, Event, Limits, ModelFailed, Models, ScriptedClient, Tools
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.events.trace import TraceWriter
from rlm_broker.results import Completion
from rlm_broker.usage import Usage
from rlm_broker.watch.trace_tree import Trace
from tests.e2e.conftest import MakeRLM
from tests.support.fake_openai import Answer, FakeOpenAI, completion

KILL = "\nimport os; os._exit(1)"
DONE = "FINAL(done)"


def block(code: str) -> str:
    return f"```repl\n{code}\n```"


class Reader:
    """Answers each prompt with its number among all that came.

    Attributes:
        asked: Prompts that came, in their order.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.client = ScriptedClient(self, "reader", cost_per_call=0.5)

    def __call__(self, request: LMRequest) -> str:
        self.asked.append(str(request.messages[-1].content))
        if self.asked[-1] == "fails" and self.asked.count("fails") == 1:
            raise ModelFailed("the provider is down")
        return f"{self.asked[-1]} {len(self.asked)}"


def told(done: Completion[Any]) -> list[str]:
    """Return what the root model was told after its turns."""
    return [str(message.content) for message in done.messages[3::2]]


def asks(*prompts: str) -> str:
    return f"print(*map(llm_query, {list(prompts)}))"


def test_retry_pays_for_the_calls_that_had_not_returned(rlm: MakeRLM) -> None:
    events: list[Event] = []
    has_thirty, has_all = threading.Event(), threading.Event()
    seen = set[str]()
    prompts = [f"part {number}" for number in range(50)]
    code = "answers = llm_query_batched([f'part {number}' for number in NUMBERS])\nprint(answers[7], len(set(answers)))"
    dies = "import os, threading\nthreading.Thread(target=lambda: (when(), os._exit(1))).start()\n"
    turns = [dies + code.replace("NUMBERS", "range(50)"), code.replace("NUMBERS", "range(49, -1, -1)"), "FINAL('done')"]

    def answered(event: Event) -> None:
        events.append(event)
        if isinstance(event, CallEnded) and event.batch == 1 and event.done == 30:
            has_thirty.set()

    def when() -> None:
        has_thirty.wait()
        has_all.wait()

    def reply(request: dict[str, Any]) -> Answer:
        said = str(request["messages"][-1]["content"])
        if said not in prompts:
            return completion(block(turns.pop(0)))
        is_late = int(said.split()[1]) >= 30 and said not in seen  # the first time
        seen.add(said)
        if len(seen) == len(prompts):
            has_all.set()
        return Answer(never=True) if is_late else completion(f"about {said}")

    with FakeOpenAI(reply) as server:
        run = rlm(
            server, tools={"when": when}, on_event=answered, limits=Limits(max_llm_calls=73, max_concurrent_calls=50)
        )
        done = run.completion("text", "?")
        asked = Counter(str(request["messages"][-1]["content"]) for request in server.requests)
    assert [asked[prompt] for prompt in prompts] == [1] * 30 + [2] * 20
    assert "30 of its calls are remembered: the same calls again cost nothing." in told(done)[0]
    assert "about part 42 50" in told(done)[1]
    assert done.usage_summary.total == Usage(53, 3 * 53, 5 * 53)
    ended = [event for event in events if isinstance(event, CallEnded) and event.batch == 2]
    remembered = [event for event in ended if event.is_remembered]
    assert (len(ended), len(remembered), ended[-1].done) == (50, 30, 50)
    assert {event.usage for event in remembered} == {Usage(total_cost=0.0)}
    assert {event.response for event in remembered} == {f"about {prompt}" for prompt in prompts[:30]}
    started = [event.call for event in events if isinstance(event, CallStarted)]
    assert started == [*range(1, 104)]


def test_answer_is_given_once_and_only_that_of_a_killed_block(rlm: MakeRLM, tmp_path: Path) -> None:
    """Answers come in their order, a failed call is made again, and the trace tells what was not paid."""
    reader, file = Reader(), tmp_path / "trace.jsonl"
    replies = [asks("a"), asks("a", "fails", "a", "b") + KILL, asks("b", "a", "fails", "a", "a"), asks("b")]
    with TraceWriter(file) as trace:
        root = ScriptedClient([*map(block, replies), DONE])
        done = rlm(root, reader.client, on_event=trace).completion("text", "?")
    assert reader.asked == ["a", "a", "fails", "a", "b", "fails", "a", "b"]
    assert "3 of its calls are remembered" in told(done)[1]
    assert "b 5 a 2 fails 6 a 4 a 7" in told(done)[2]
    assert "remembered" not in told(done)[0] + told(done)[2] + told(done)[3]
    assert done.usage_summary.model_usage_summaries["reader"].total_cost == 0.5 * 7
    assert [each.blocks[0].calls_remembered for each in done.trajectory[:4]] == [0, 3, 0, 0]
    (run,) = Trace(file).runs()
    assert run["calls"] == 5 + 7
    shown = io.StringIO()
    Trace(file).show(shown)
    assert shown.getvalue().count("reader, from memory") == 3


def test_retry_that_is_killed_as_well_leaves_the_same_answers(rlm: MakeRLM) -> None:
    reader = Reader()
    replies = [asks("a") + KILL, asks("a", "b") + KILL, asks("b") + KILL, asks("a", "b")]
    done = rlm(ScriptedClient([*map(block, replies), DONE]), reader.client).completion("text", "?")
    assert reader.asked == ["a", "b"]
    assert ["One of its calls is remembered: the same call again costs nothing." in text for text in told(done)] == [
        *(True, False, True, False)
    ]
    assert "a 1 b 2" in told(done)[3]


def test_calls_of_an_interrupted_block_are_remembered_as_those_of_a_killed_one(rlm: MakeRLM) -> None:
    reader = Reader()
    replies = [asks("a", "b") + "\nwhile True: pass", asks("b", "c", "a", "a")]
    root = ScriptedClient([*map(block, replies), DONE])
    done = rlm(root, reader.client, limits=Limits(block_timeout_s=0.5)).completion("text", "?")
    ended = done.trajectory[0].blocks[0]
    assert (ended.status, ended.calls_remembered) == ("interrupted", 2)
    assert "2 of its calls are remembered: the same calls again cost nothing." in told(done)[0]
    assert "b 2 c 3 a 1 a 4" in told(done)[1]


def test_child_that_is_started_again_goes_on_where_it_had_come(rlm: MakeRLM) -> None:
    """One child had ended, and the other was in its second turn when the block of their parent was killed."""
    calls = list[str]()
    is_late = threading.Event()

    class Model:
        model_name = "model"

        async def complete(self, request: LMRequest) -> LMReply:
            assert request.id is not None
            number = len(request.messages) // 2
            if not request.is_loop:
                calls.append(str(request.messages[-1].content))
                return LMReply("ok", Usage(1))
            calls.append(f"run {request.id.run}, turn {number}")
            if calls[-1] == "run 1.2, turn 2":
                is_late.set()
                await asyncio.Event().wait()
            if request.depth:
                return LMReply(block(asks(f"{request.question} {number}")) if number < 3 else DONE, Usage(1))
            dies = "import os, threading\nthreading.Thread(target=lambda: (when(), os._exit(1))).start()\n"
            code = "print(rlm_query('first'), rlm_query('second'))"
            return LMReply((block(dies + code), block(code), DONE)[number - 1], Usage(1))

        async def aclose(self) -> None:
            pass

    limits = Limits(max_depth=2, max_children_total=4)
    done = rlm(Model(), limits=limits, tools=Tools({"when": is_late.wait})).completion("text", "?")
    first = ["run 1.1, turn 1", "first 1", "run 1.1, turn 2", "first 2", "run 1.1, turn 3"]
    second = ["run 1.2, turn 1", "second 1", "run 1.2, turn 2"]
    again = ["run 1.4, turn 2", "second 2", "run 1.4, turn 3"]
    assert calls == ["run 1, turn 1", *first, *second, "run 1, turn 2", *again, "run 1, turn 3"]
    assert "7 of its calls are remembered" in told(done)[0]
    assert [child.result_preview for child in done.child_traces] == ["done", None, "done", "done"]
    assert done.usage_summary.total_calls == len(calls) - 1


def test_recording_of_a_run_with_a_kill_replays_to_the_same_run(rlm: MakeRLM, tmp_path: Path) -> None:
    reader, file = Reader(), tmp_path / "run.jsonl"
    replies = [asks("a", "b", "a") + KILL, asks("b", "c", "a"), asks("a", "a", "b")]
    root = ScriptedClient([*map(block, replies), DONE], "root")
    first = rlm(root, reader.client, models=Models(record=file)).completion("text", "?")
    assert reader.asked == ["a", "b", "a", "c", "a", "b"]
    events: list[Event] = []
    again = rlm(models=Models(replay=file), on_event=events.append).completion("text", "?")
    assert (again.messages, again.usage_summary.total_calls) == (first.messages, first.usage_summary.total_calls)
    assert sum(isinstance(event, CallEnded) and event.is_remembered for event in events) == 3
