"""Runs on a node, with a real sandbox and a real link: they are what they are without a cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

import msgspec
import psutil
import pydantic
import pytest
import pytest_asyncio

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.broker.routing import Route, Routing
from rlm_broker.cluster.agent import shortening
from rlm_broker.cluster.described import system_prompts
from rlm_broker.cluster.messages import Ask, Cancel, Ended, EngineSpec, Happened, Leave, Stop, UseTool
from rlm_broker.cluster.outcomes import read_completion
from rlm_broker.errors import (
    ConfigurationError,
    IsolationUnavailable,
    LimitReached,
    ModelFailed,
    OutputInvalid,
    RunCancelled,
    ValueTooLarge,
)
from rlm_broker.limits import Limits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.tools import Tools
from rlm_broker.watch.board import BOARD
from tests.support.orchestrator import Orchestrator, orchestrated
from tests.support.waiting import for_ever, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LINES = "alpha\nbeta\ngamma\n" * 3_000
COUNTS = "I count.\n```repl\nprint(len(context))\nlines = context.count('\\n')\n```"
ASKS = "```repl\nFINAL(llm_query('how many?') + ' of ' + str(lines))\n```"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[Orchestrator]:
    """One agent for all tests, and the orchestrator's half of it."""
    async with orchestrated(ScriptedClient([])) as (orchestrator, *_):
        yield orchestrator


def of_depth(*loop: str, query: str = "many") -> Callable[[LMRequest], str]:
    """Return a model that replies in the loop of the root in this order, and always the same to a query of code."""
    left = list(loop)
    return lambda request: left.pop(0) if request.depth == 0 else query


async def on_node(
    node: Orchestrator, replies: Any, context: Any = LINES, question: str | None = "How many?", **given: Any
) -> Completion:
    """Answer a question on a node."""
    client = replies if isinstance(replies, ScriptedClient) else ScriptedClient(replies)
    orchestrator = node.prepared(client, given.pop("tools", None), given.pop("output_type", None))
    return await orchestrator.completion(context, question, **given)


def without_times(completion: Completion) -> dict[str, Any]:
    """Return what two equal runs have in common."""
    shown = completion.to_dict()
    del shown["execution_time"], shown["prompt"], shown["root_prompt"]
    for turn in shown["trajectory"]:
        for block in turn["blocks"]:
            del block["execution_time"]
    return shown


async def test_a_run_is_the_same_on_a_node(node: Orchestrator) -> None:
    """The completion, and all that the models were asked, are equal with and without a cluster."""

    def add(a: int, b: int = 2) -> int:
        """Add two numbers.

        The model does not read this paragraph.
        """
        return a + b

    tools = {"add": add, "limit": {"tool": 7, "description": "most lines"}}
    replies = (COUNTS, "```repl\nprint(add(lines), limit)\n```", ASKS)
    here, there = (ScriptedClient(of_depth(*replies), cost_per_call=0.5) for _ in range(2))
    limits = Limits(max_llm_calls=20)
    async with RLM(here, tools=tools, limits=limits) as rlm:
        local = await rlm.acompletion(LINES, "How many?")
    remote = await on_node(node, there, tools=Tools(tools), limits=limits)
    assert remote.response == "many of 9000"
    assert without_times(remote) == without_times(local)
    assert [request.messages for request in there.requests] == [request.messages for request in here.requests]


async def test_a_context_of_any_form_arrives(node: Orchestrator) -> None:
    """A dict, and a text of wide characters, are in a node's REPL what they are here."""
    replies = ["```repl\nFINAL(str(sorted(context)) + context['b'][1])\n```"]
    assert (await on_node(node, replies, {"b": ["x", "ü\U0001f600"], "a": 1})).response == "['a', 'b']ü\U0001f600"
    assert (await on_node(node, ["```repl\nFINAL(context[-2:])\n```"], "a\U0001f600b")).response == "\U0001f600b"


async def test_code_calls_functions_of_the_orchestrator(node: Orchestrator) -> None:
    """Arguments and results keep their types, an error is told, and only what is described can be called."""
    seen: list[Any] = []

    def keep(value: Any) -> tuple[int, bytes]:
        seen.append(value)
        return len(seen), b"kept"

    def fail(n: Annotated[int, pydantic.Field(gt=0)]) -> None:
        raise LookupError(f"no {n}")

    code = """
problems = []
for call in (lambda: fail(3), lambda: fail(0)):
    try:
        call()
    except Exception as error:
        problems.append(str(error))
FINAL(repr(keep({1, 2})) + '|' + '|'.join(problems))
"""
    completion = await on_node(node, [f"```repl\n{code}\n```"], tools=Tools({"keep": keep, "fail": fail}))
    result, raised, refused = (completion.response or "").split("|")
    assert (result, seen) == ("(1, b'kept')", [{1, 2}])
    assert "LookupError: no 3" in raised
    assert "greater than 0" in refused


async def test_children_have_their_own_functions(node: Orchestrator) -> None:
    """A child runs on the node of its parent; its functions are those of children."""
    tools = Tools({"who": lambda: "root"}, {"who": lambda: "child"})

    def reply(request: LMRequest) -> str:
        asks = "```repl\nFINAL(who() + ' and ' + rlm_query('who?'))\n```"
        return asks if request.depth == 0 else "```repl\nFINAL(who())\n```"

    completion = await on_node(node, reply, tools=tools, limits=Limits(max_depth=2))
    assert completion.response == "root and child"
    assert [trace.result_preview for trace in completion.child_traces] == ["child"]


async def test_the_orchestrator_judges_a_typed_answer(node: Orchestrator) -> None:
    """A check that no JSON Schema says is told to the model, as without a cluster."""

    def even(value: int) -> int:
        if value % 2:
            raise ValueError("it is odd")
        return value

    client = ScriptedClient(["FINAL(3)", "FINAL(4)"])
    context = "short"
    completion = await on_node(node, client, context, output_type=Annotated[int, pydantic.AfterValidator(even)])
    assert completion.response == "4"
    assert "it is odd" in str(client.requests[-1].messages[-1].content)
    with pytest.raises(OutputInvalid, match=r"the wanted type: .*it is odd") as raised:
        await on_node(node, ["FINAL(3)"] * 3, context, output_type=Annotated[int, pydantic.AfterValidator(even)])
    assert raised.value.answer == "3"


async def test_instructions_and_prompt_profile_arrive(node: Orchestrator) -> None:
    """The system prompt of each depth, and the prologue, are the user's."""
    said = Instructions(lambda depth: f"You are at depth {depth}.")
    limits = Limits(max_depth=2)
    seen: dict[int, str] = {}

    def reply(request: LMRequest) -> str:
        seen.setdefault(request.depth, str(request.messages[0].content))
        return "```repl\nFINAL(rlm_query('go on'))\n```" if request.depth == 0 else "FINAL(done)"

    systems = system_prompts(said, limits)
    assert (await on_node(node, reply, systems=systems, prologue="Begin.", limits=limits)).response == "done"
    assert seen == {0: "You are at depth 0.", 1: "You are at depth 1."}


async def test_events_come_in_order_before_the_end(node: Orchestrator) -> None:
    """All events of a run arrive before its end, with gapless numbers and with its tree's id."""
    orchestrator = node.prepared(ScriptedClient(of_depth(COUNTS, ASKS)))
    await orchestrator.completion(LINES, "How many?", tells_events=True, tells_text=True)
    assert isinstance(orchestrator.got[-1], Ended)
    events = [
        msgspec.json.decode(event)
        for message in orchestrator.got
        if isinstance(message, Happened)
        for event in message.events
    ]
    assert [event["n"] for event in events] == list(range(1, len(events) + 1))
    assert {event["tree"] for event in events} == {f"tree{orchestrator.got[-1].run}"}
    assert (events[0]["event"], events[-1]["event"]) == ("run_started", "run_ended")


async def test_a_failed_call_keeps_its_cause_and_the_run(node: Orchestrator) -> None:
    """The run has what it had by then, and the error its class and its cause."""
    client = ScriptedClient([COUNTS, ModelFailed("the key is wrong", "provider")])
    with pytest.raises(ModelFailed, match="the key is wrong") as raised:
        await on_node(node, client)
    assert raised.value.cause == "provider"
    assert [turn.blocks[0].stdout for turn in raised.value.trajectory] == ["51000\n"]
    assert raised.value.partial_answer == "I count."
    assert raised.value.isolation is not None


async def test_limits_hold_on_the_node(node: Orchestrator) -> None:
    """A limit that ends the run is told with its numbers."""
    with pytest.raises(LimitReached) as raised:
        await on_node(node, [COUNTS] * 3, limits=Limits(max_llm_calls=2))
    assert (raised.value.limit, raised.value.spent, raised.value.allowed) == ("max_llm_calls", 2, 2)


async def test_a_name_that_code_may_not_use_is_refused(node: Orchestrator) -> None:
    """The node judges names as the orchestrator does, and asks it for none that is refused."""
    root, other = ScriptedClient(["```repl\nFINAL(llm_query('?', model='root'))\n```"], "root"), ScriptedClient([])
    routing = Routing(root, other)
    routing.register("judge", ScriptedClient([], "gpt"))
    routing.add(Route("judge", "gpt-*"))
    orchestrator = node.prepared(root)
    completion = await orchestrator.completion(LINES, "How many?", routing=routing)
    assert len([each for each in orchestrator.got if isinstance(each, Ask)]) == 1
    assert "code may not call model 'root'; allowed: scripted, judge, gpt-*" in (completion.response or "")


async def test_stop_ends_with_the_best_answer(node: Orchestrator) -> None:
    """A stopped run answers with what it had."""
    orchestrator = node.prepared(ScriptedClient([COUNTS, "late"], delay_s=0.3))
    run = await orchestrator.begin(LINES, "How many?", tells_events=True)
    await orchestrator.until(Happened)
    orchestrator.link.post(Stop(run))
    ended = await orchestrator.ended(run)
    assert ended.error is None
    assert ended.completion is not msgspec.UNSET
    assert read_completion(ended.completion).is_stopped


async def test_cancel_ends_the_run_and_its_processes(node: Orchestrator) -> None:
    """A cancelled run leaves its call and its REPL, and says so."""
    orchestrator = node.prepared(ScriptedClient([COUNTS], delay_s=60))
    run = await orchestrator.begin(LINES, "How many?")
    ask = await orchestrator.until(Ask)
    [repl] = BOARD.repls
    pid = repl.pid
    orchestrator.link.post(Cancel(run))
    ended = await orchestrator.ended(run)
    assert (ended.error, ended.is_of_node) == (RunCancelled.__name__, False)
    assert [each for each in orchestrator.got if isinstance(each, Leave)] == [Leave(run, ask.call)]
    assert not BOARD.repls
    await until(lambda: not psutil.pid_exists(pid or 0))  # its parent takes leave of it


def unavailable(*_: object, **__: object) -> None:
    raise IsolationUnavailable("no")


async def test_what_a_node_cannot_do_goes_elsewhere(node: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An isolation that the node cannot give is its fault; settings that no node can use are not."""
    orchestrator = node.prepared(ScriptedClient([]))
    engine = EngineSpec({}, "strict", python="/no/such/folder")
    ended = await orchestrator.ended(await orchestrator.begin("text", "?", engine=engine))
    assert (ended.error, ended.is_of_node) == (ConfigurationError.__name__, False)
    monkeypatch.setattr("rlm_broker.cluster.agent.sandboxes.Sandbox", unavailable)
    ended = await orchestrator.ended(await orchestrator.begin("text", "?", engine=EngineSpec({}, "strict", seed=1)))
    assert (ended.error, ended.is_of_node) == (IsolationUnavailable.__name__, True)


async def test_an_internal_error_is_told(node: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error leaves the orchestrator waiting."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("rlm_broker.cluster.agent.runs.root_run", broken)
    orchestrator = node.prepared(ScriptedClient([]))
    ended = await orchestrator.ended(await orchestrator.begin("text", "?"))
    assert (ended.error, ended.is_of_node) == ("SandboxFailed", True)
    assert "ZeroDivisionError: a mistake" in ended.message


async def test_an_outcome_too_large_is_told(node: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome that no message takes is an error of its run, also if the run has failed."""
    monkeypatch.setattr(shortening, "MOST_BYTES", 10)
    with pytest.raises(ValueTooLarge, match="takes more than 10 bytes"):
        await on_node(node, ["FINAL(4)"], "short")
    with pytest.raises(ValueTooLarge, match="takes more than 10 bytes"):
        await on_node(node, [ModelFailed("no")], "short")


async def test_a_late_function_is_an_error_of_its_call(node: Orchestrator) -> None:
    """The orchestrator ends a function that takes too long, and code goes on."""
    code = "try:\n    wait()\nexcept Exception as error:\n    FINAL(str(error))"
    completion = await on_node(
        node, [f"```repl\n{code}\n```"], tools=Tools({"wait": for_ever}), limits=Limits(tool_timeout_s=0.05)
    )
    assert "wait() took longer than tool_timeout_s = 0.05 s" in (completion.response or "")


async def test_runs_share_a_node(node: Orchestrator) -> None:
    """Many runs at the same time get their own answers."""

    def reply(request: LMRequest) -> str:
        return f"```repl\nFINAL('{request.question} ' + context)\n```"

    orchestrator = node.prepared(ScriptedClient(reply))
    given: Mapping[str, str] = {f"q{number}": f"text {number}" for number in range(12)}
    done = await asyncio.gather(*(orchestrator.completion(text, name) for name, text in given.items()))
    assert [each.response for each in done] == [f"{name} {text}" for name, text in given.items()]


async def test_a_cancelled_tool_call_is_left(node: Orchestrator) -> None:
    """A function whose run has ended is told to end."""
    is_called, is_cancelled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_called.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    tools = Tools({"wait": wait})
    orchestrator = node.prepared(ScriptedClient(["```repl\nwait()\n```"]), tools)
    run = await orchestrator.begin("text", "?")
    await is_called.wait()
    assert isinstance(await orchestrator.until(UseTool), UseTool)
    orchestrator.link.post(Cancel(run))
    await orchestrator.ended(run)
    await is_cancelled.wait()
