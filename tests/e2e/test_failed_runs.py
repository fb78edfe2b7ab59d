"""A run that fails keeps what it was: conversation, turns, usage and partial answer."""

import os
import pickle
import signal
from typing import Any

import pytest

from rlm_broker import (
    RLM,
    LimitReached,
    Limits,
    ModelFailed,
    OutputInvalid,
    RlmBrokerError,
    RunCancelled,
    RunFailed,
    ScriptedClient,
)
from rlm_broker.errors import ReplClosed, WorkerDied
from rlm_broker.events.event import BlockStarted, Event
from rlm_broker.sandbox.sandbox import Sandbox
from tests.e2e.conftest import MakeRLM
from tests.support.tables import table

LOOKS = "an idea\n```repl\nprint(6 * 7)\n```"
HANGS = "more to come\n```repl\nprint('first')\n```\n```repl\nimport time; time.sleep(1000)\n```"


def failed(
    sandbox: Sandbox, kind: type[RunFailed], replies: list[Any], limits: Limits | None = None, **options: Any
) -> RunFailed:
    with pytest.raises(kind) as caught:
        RLM(ScriptedClient(replies), limits=limits, sandbox=sandbox).completion("text", "?", **options)
    return caught.value


@table(
    "kind, replies, limits, options",
    [
        (LimitReached, [LOOKS, LOOKS], Limits(max_llm_calls=1), {}),
        (ModelFailed, [LOOKS, RuntimeError("down")], None, {}),
        (OutputInvalid, [LOOKS, "FINAL(many)"], Limits(max_output_retries=0), {"output_type": int}),
    ],
)
def test_failed_run_carries_its_conversation_turns_and_usage(
    open_sandbox: Sandbox, kind: type[RunFailed], replies: list[Any], limits: Limits | None, options: dict[str, Any]
) -> None:
    error = failed(open_sandbox, kind, replies, limits, **options)
    assert error.partial_answer == ("many" if kind is OutputInvalid else "an idea")
    assert [message.role for message in error.messages][:4] == ["system", "user", "assistant", "user"]
    assert error.messages[2].content == LOOKS
    assert "42" in str(error.messages[3].content)
    assert error.trajectory[0].blocks[0].stdout == "42\n"
    answered = 2 if kind is OutputInvalid else 1
    assert error.usage_summary.total.total_calls == error.usage_by_depth[0].total_calls == answered
    assert error.execution_time > 0


def test_model_that_says_nothing_is_not_asked_until_all_turns_are_gone(open_sandbox: Sandbox) -> None:
    error = failed(open_sandbox, ModelFailed, [LOOKS, "", " ", LOOKS, "", "\n", ""])  # two in a row may come to itself
    assert str(error).endswith(" replied with nothing 3 times in a row: name another model")
    assert (len(error.trajectory), error.partial_answer) == (7, "an idea")


def test_cut_turn_keeps_its_ended_blocks(open_sandbox: Sandbox) -> None:
    error = failed(open_sandbox, LimitReached, [LOOKS, HANGS], Limits(run_timeout_s=1.5))
    assert error.partial_answer == "more to come"
    assert [len(turn.blocks) for turn in error.trajectory] == [1, 1]
    assert error.trajectory[1].blocks[0].stdout == "first\n"


def test_failed_run_includes_its_children(open_sandbox: Sandbox) -> None:
    asks = "```repl\nprint(rlm_query('child'))\n```"
    error = failed(
        open_sandbox, LimitReached, [asks, "FINAL(of the child)", LOOKS], Limits(max_depth=2, max_llm_calls=2)
    )
    assert [child.result_preview for child in error.child_traces] == ["of the child"]
    assert {depth: usage.total_calls for depth, usage in error.usage_by_depth.items()} == {0: 1, 1: 1}


def test_ctrl_c_keeps_the_partial_run(rlm: MakeRLM) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, BlockStarted) and event.block == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RunCancelled) as caught:
        rlm(ScriptedClient([LOOKS, HANGS]), on_event=interrupt).completion("text", "?")
    assert caught.value.partial_answer == "more to come"
    assert len(caught.value.messages) == 5
    assert [len(turn.blocks) for turn in caught.value.trajectory] == [1, 1]
    assert caught.value.usage_summary.total.total_calls == 2


def test_error_outside_a_run_carries_nothing() -> None:
    error = ModelFailed("down")
    assert (error.messages, error.trajectory, error.partial_answer) == ((), (), None)
    assert error.usage_summary.total.total_calls == 0


@table(
    "error",
    [
        LimitReached("max_tokens", 5, 4, "so far"),
        OutputInvalid("no number", "many"),
        ModelFailed("down", "transient", 2.0),
        RunCancelled("so far"),
        WorkerDied("gone"),
        ReplClosed("closed"),
    ],
)
def test_error_survives_pickling(error: RlmBrokerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
