"""A tree of runs as a page, from events of runs that really went on."""

import contextlib
from typing import Any

import pytest

from rlm_broker import RLM, Event, Limits, LMRequest, RunFailed, ScriptedClient
from rlm_broker.events.event import BlockEnded, BlockPrinted, BlockStarted, CallStarted, Replied, RunEnded, RunStarted
from rlm_broker.events.story import MOST_CHARS
from rlm_broker.values.markup import Markup
from rlm_broker.watch import notebook
from rlm_broker.watch.notebook import MAX_BLOCKS, MAX_CALLS, MAX_NOTES, TEXT_CHARS, TreeView
from tests.support.markup import read


def pages(model: Any, **limits: Any) -> tuple[list[Event], list[tuple[str, Markup]]]:
    """Events of a run, and the headline and page after each of them."""
    events: list[Event] = []
    views: list[tuple[str, Markup]] = []
    tree = TreeView()

    def follow(event: Event) -> None:
        events.append(event)
        tree.take(event)
        views.append((tree.headline(), tree.page()))

    with contextlib.suppress(RunFailed):
        RLM(ScriptedClient(model), limits=Limits(**limits), on_event=follow).completion("text", "What?")
    return events, views


def after(kind: type[Event], found: tuple[list[Event], list[tuple[str, Markup]]]) -> tuple[str, Any]:
    """The headline and page after the first event of this kind."""
    place = next(number for number, event in enumerate(found[0]) if isinstance(event, kind))
    headline, page = found[1][place]
    return headline, read(page)


def test_page_goes_with_the_run() -> None:
    def model(request: LMRequest) -> str:
        if not request.is_loop:
            return "yes"
        if request.depth:
            return "FINAL(of the child)"
        return "```repl\nprint('<i>')\nFINAL(llm_query('?') + tool() + rlm_query('<b>child</b>'))\n```"

    events: list[Event] = []
    tools = {"tool": lambda: "yes"}
    rlm = RLM(ScriptedClient(model), limits=Limits(max_depth=2), tools=tools, on_event=events.append)
    rlm.completion("text", "What?")
    tree = TreeView()
    views = []
    for event in events:
        tree.take(event)
        views.append((tree.headline(), tree.page()))
    found = (events, views)
    assert after(RunStarted, found)[0] == "scripted, starting"
    headline, page = after(CallStarted, found)
    assert headline == "scripted, turn 1, 1 call open"
    assert "the model is being asked" in page.text
    assert "turn 1: reply of scripted" in after(Replied, found)[1].text
    assert after(BlockStarted, found)[1].boxes[-1].startswith("print('<i>')")
    assert "turn 1: running" in after(BlockStarted, found)[1].text
    assert after(BlockPrinted, found)[1].boxes[-1] == "<i>\n"
    child = next(number for number, event in enumerate(events) if event.run == "1.1" and isinstance(event, CallStarted))
    assert "1 child run, 1 open" in views[child][0]
    assert "run 1.1: turn 1" in read(views[child][1]).text
    assert "call 2: scripted" in read(views[child][1]).text
    assert "tool tool: returned after" in read(views[child][1]).text
    assert views[child][1].startswith("<details open>")
    headline, html = views[-1]
    assert headline.startswith("scripted, answered after ")
    assert headline.endswith("1 child run, 0 open")
    assert "<details open>" not in html
    assert "<i>" in read(html).boxes
    assert "run 1.1" not in read(html).text


def test_page_is_bounded_over_many_turns_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MAX_TURNS", 3)
    blocks = f"{'`' * 3}repl\nprint('&' * 5_000)\n{'`' * 3}\n" * (MAX_BLOCKS + 2)

    def model(_request: LMRequest) -> str:
        return "<" * 5_000 + "\n" + blocks

    _, views = pages(model, max_iterations=5, max_blocks=1_000)
    page = read(views[-1][1])
    assert "4 later steps not shown" in page.text
    assert "2 earlier turns not shown" in page.text
    assert max(len(html) for _, html in views) < 6 * TEXT_CHARS
    assert all(len(box) < 2 * MOST_CHARS for box in page.boxes)


def test_failures_are_noted_and_the_notes_bounded() -> None:
    def model(request: LMRequest) -> str:
        if request.is_loop:
            return "```repl\nfor _ in range(30): llm_query('<hr>')\n1 / 0\n```"
        raise RuntimeError("<hr>\nsecond")

    found = pages(model, max_iterations=1)
    page = read(found[1][-1][1])
    assert page.text.count("failed: scripted: RuntimeError: <hr>") == MAX_NOTES + MAX_CALLS
    assert "block 1: error after" in page.text
    assert any("ZeroDivisionError: division by zero" in box for box in after(BlockEnded, found)[1].boxes)
    assert isinstance(found[0][-1], RunEnded)
