"""Properties of a whole tree of runs: their number, what each returns, what is told of each."""

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.events.event import Event, RunStarted
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.watch.callbacks import Callbacks

LONG = "".join(f"{number}," for number in range(100))


def block(code: str) -> str:
    return f"```repl\n{code}\n```"


def test_children_are_counted_over_all_levels_of_the_tree() -> None:
    events: list[Event] = []

    def reply(request: LMRequest) -> str:
        tasks = ["['a', 'b']", "['c', 'd']"]
        return block(
            "FINAL('leaf')" if request.depth == 2 else f"FINAL(str(rlm_query_batched({tasks[request.depth]})))"
        )

    limits = Limits(max_depth=3, max_children_total=3, max_concurrent_children=1)
    response = RLM(ScriptedClient(reply), limits=limits, on_event=events.append).completion("", "?").response
    assert response == str([str(["leaf", "leaf"]), "Error: max_children_total exceeded"])
    assert [event.run for event in events if isinstance(event, RunStarted)] == ["1", "1.1", "1.1.1", "1.1.2"]


def test_children_of_several_blocks_and_parents_are_counted_together(open_sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        if request.depth == 2:
            return block("FINAL('leaf')")
        if request.depth == 1:
            return block("FINAL(rlm_query('y'))")
        return block("kept = [rlm_query('x') for _ in range(3)]") if len(request.messages) == 2 else ROOT_AGAIN

    response = (
        RLM(ScriptedClient(reply), limits=Limits(max_depth=3, max_children_total=5), sandbox=open_sandbox)
        .completion("", "?")
        .response
    )
    refused = "Error: max_children_total exceeded"
    assert response == str(["leaf", "leaf", refused, refused])  # the third child ran, and its own child was refused


ROOT_AGAIN = block("FINAL(str([*kept, rlm_query('x')]))")


@pytest.mark.parametrize("asks", ["rlm_query('x')", "rlm_query_batched(['x'])[0]"])
def test_child_answer_is_cut_at_its_limit(asks: str, open_sandbox: Sandbox) -> None:
    """The answer of a child is cut at its limit, and the cut is named."""

    def reply(request: LMRequest) -> str:
        return block(f"FINAL('{LONG}')" if request.depth else f"FINAL({asks})")

    limits = Limits(max_depth=2, max_result_chars=100)
    done = RLM(ScriptedClient(reply), limits=limits, sandbox=open_sandbox).completion("", "?")
    assert done.response == f"{LONG[:100]}\n... [{len(LONG) - 100} characters cut]"
    assert len(done.child_traces) == 1


def test_child_trace_tells_question_answer_and_failure(open_sandbox: Sandbox) -> None:
    """The trace of a child tells its question, its answer and the reason of its failure."""

    def reply(request: LMRequest) -> str:
        if request.depth == 0:
            return block(f"FINAL(str([rlm_query('{LONG}' + what) for what in ('ZLONG', 'ZFAILS', 'ZEMPTY')]))")
        asked = str(request.messages[1].content)
        if "ZFAILS" in asked and len(request.messages) > 2:
            raise RuntimeError("down")
        if "ZFAILS" in asked:
            return "a first idea\n" + block("1")
        return block("FINAL('')" if "ZEMPTY" in asked else f"FINAL('{LONG}')")

    done = RLM(ScriptedClient(reply), limits=Limits(max_depth=2), sandbox=open_sandbox).completion("", "?")
    long, fails, empty = done.child_traces
    assert [trace.depth for trace in done.child_traces] == [1, 1, 1]
    assert [trace.prompt_preview for trace in done.child_traces] == [LONG[:80]] * 3
    assert (long.result_preview, long.error) == (LONG[:80], None)
    assert (fails.result_preview, fails.error) == ("a first idea", "scripted: RuntimeError: down")
    assert (empty.result_preview, empty.error) == (None, None)
    assert min(trace.duration_s for trace in done.child_traces) > 0
    assert sum(trace.duration_s for trace in done.child_traces) < done.execution_time


def test_child_event_names_the_serving_model(open_sandbox: Sandbox) -> None:
    told: list[tuple[object, ...]] = []

    def reply(request: LMRequest) -> str:
        return block("FINAL(1)" if request.depth else "FINAL(rlm_query('x'))")

    callbacks = Callbacks(
        on_subcall_start=lambda depth, model, preview: told.append((depth, model, preview)),
        on_subcall_complete=lambda depth, model, _seconds, error: told.append((depth, model, error)),
    )
    root, sub = ScriptedClient(reply, "root"), ScriptedClient(reply, "sub")
    RLM(root, sub, limits=Limits(max_depth=2), on_event=callbacks, sandbox=open_sandbox).completion("", "?")
    assert told == [(1, "sub", "x"), (1, "sub", None)]


def test_blocks_after_the_answer_do_not_run(open_sandbox: Sandbox) -> None:
    reply = "\n".join(map(block, ("print('one')", "FINAL('two')", "print('three')")))
    done = RLM(ScriptedClient([reply]), sandbox=open_sandbox).completion("", "?")
    assert done.response == "two"
    assert [ran.code for ran in done.trajectory[0].blocks] == ["print('one')", "FINAL('two')"]


def test_model_is_told_what_was_printed_without_the_code(open_sandbox: Sandbox) -> None:
    client = ScriptedClient([block("print('a' + 'b')  # said once"), block("FINAL(1)")])
    RLM(client, sandbox=open_sandbox).completion("", "?")
    told = str(client.requests[1].messages[-1].content)
    assert "ab" in told
    assert "said once" not in told


def test_batch_at_its_cap_is_answered(open_sandbox: Sandbox) -> None:
    def reply(request: LMRequest) -> str:
        return "fine" if request.depth else block("FINAL(str(llm_query_batched(['a', 'b', 'c'])))")

    response = (
        RLM(ScriptedClient(reply), limits=Limits(max_batch_prompts=3), sandbox=open_sandbox)
        .completion("", "?")
        .response
    )
    assert response == "['fine', 'fine', 'fine']"
