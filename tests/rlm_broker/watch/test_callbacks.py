"""The callbacks of other RLM runtimes."""

import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.watch.callbacks import Callbacks

REPLIES = ["```repl\nanswer['content'] = rlm_query('the child')\n```", "FINAL(of the child)", "FINAL(of the root)"]


def test_turns_and_children_report_start_and_end() -> None:
    told: list[tuple[object, ...]] = []
    callbacks = Callbacks(
        on_subcall_start=lambda *news: told.append(("child", *news)),
        on_subcall_complete=lambda depth, model, seconds, error: told.append(
            ("ended", depth, model, seconds > 0, error)
        ),
        on_iteration_start=lambda *news: told.append(("turn", *news)),
        on_iteration_complete=lambda depth, number, seconds: told.append(("done", depth, number, seconds > 0)),
    )
    RLM(ScriptedClient(REPLIES), limits=Limits(max_depth=2), on_event=callbacks).completion("c", "q")
    assert told == [
        ("turn", 0, 1),
        ("child", 1, "scripted", "the child"),
        ("turn", 1, 1),
        ("done", 1, 1, True),
        ("ended", 1, "scripted", True, None),
        ("done", 0, 1, True),
        ("turn", 0, 2),
        ("done", 0, 2, True),
    ]


def test_callback_error_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def bites(*_news: object) -> None:
        raise RuntimeError("from the callback")

    callbacks = Callbacks(bites, bites, bites, lambda _depth, number, _seconds: seen.append(number))
    done = RLM(ScriptedClient(REPLIES), limits=Limits(max_depth=2), on_event=callbacks).completion("c", "q")
    assert done.response == "of the root"
    assert seen == [1, 1, 2]
    names = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert sorted(names) == ["on_iteration_start", "on_subcall_complete", "on_subcall_start"]
