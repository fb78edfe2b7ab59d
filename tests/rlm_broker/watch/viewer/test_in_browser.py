"""The page of a file in Chromium, as a reader uses it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.watch.messages import RunStatus
from rlm_broker.watch.viewer.live import live_app
from rlm_broker.watch.viewer.page import write_page
from scripts.chromium import Tab
from tests.support.asgi_server import http_server
from tests.support.browser import READY, Browser, browser
from tests.support.traces import Written, small

pytestmark = pytest.mark.browser
HOSTILE = "</script><script>document.title='taken'</script><!-- <b> \u2028 \x1b[31m \ud800 <img src=x onerror=alert(1)>"
SELECTED = "document.querySelector('#tree .is-selected .name')?.textContent"
TRANSCRIPT = "document.getElementById('transcript').innerText"
FOUND = "document.documentElement.dataset.searched === {!r} && document.getElementById('found-facts').textContent"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture
def shown(chromium: Browser, tmp_path: Path) -> Callable[..., Tab]:
    """Opens the page of a trace."""

    def show(trace: Written, place: str = "", **window: Any) -> Tab:
        page = tmp_path / "run.html"
        write_page(trace.to(tmp_path / "run.jsonl"), page)
        tab = chromium.tab()
        chromium.wait(tab.open(f"{page.as_uri()}{place}", **window))
        chromium.wait(tab.until(READY))
        return tab

    return show


def test_hostile_texts_are_text_and_a_file_makes_no_request(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """Markup, separators, escapes and half characters in each text of a trace are shown as they are, in each view."""
    tab = shown(small(HOSTILE, [HOSTILE] * 4))
    visible = HOSTILE.replace("\ud800", "\\ud800")
    assert chromium.wait(tab.until("document.querySelector('#transcript .question pre')?.textContent")) == visible
    chromium.wait(tab.until("document.querySelector('#transcript .source')?.textContent.includes('onerror')"))
    assert chromium.wait(tab.run("document.querySelectorAll('img, script:not([type]), #transcript b').length")) == 1
    assert chromium.wait(tab.run("document.title")).startswith("</script><script>")
    chromium.wait(tab.press("2", "3", "1", "/"))
    assert tab.messages == []
    assert [request.partition(":")[0] for request in tab.requests] == ["file"]


def test_branch_is_named_by_the_turn_that_it_goes_on_from(chromium: Browser, shown: Callable[..., Tab]) -> None:
    whole = small()
    for tree, before in (("u", "t"), ("v", "elsewhere")):
        written = Written(tree)("run_started", question="?", model="m", metadata={}, branch_of=before, after_turn=1)
        whole.lines += written.lines
    tab = shown(whole)
    names = chromium.wait(
        tab.run("[...document.querySelectorAll('#tree .kind-run .name')].map((it) => it.textContent)")
    )
    assert names[-2:] == [
        "Run 1 of tree 2, after turn 1 of tree 1",
        "Run 1 of tree 3, after turn 1 of a run of another trace",
    ]


def test_keys_walk_the_tree(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """Arrows and letters move through the tree; e goes to the failure; Enter and Esc change the side."""
    tab = shown(small())

    def after(*keys: str) -> Any:
        chromium.wait(tab.press(*keys))
        return chromium.wait(tab.run(SELECTED))

    assert chromium.wait(tab.run(SELECTED)) == "Run 1"
    assert after("ArrowDown") == "Turn 1"
    assert after("j", "j") == "Block 1"
    assert after("ArrowLeft", "j") == "Block 2"
    assert after("k", "ArrowRight", "ArrowRight") == "Batch of 2"
    assert after("ArrowLeft") == "Block 1"
    assert after("End") == "Block 2"
    assert after("Home", "e") == "Block 2"
    chromium.wait(tab.press("Enter"))
    assert chromium.wait(tab.run("document.activeElement.id")) == "transcript"
    chromium.wait(tab.press("Escape"))
    assert chromium.wait(tab.run("document.activeElement.id")) == "tree"
    chromium.wait(tab.press("?"))
    assert chromium.wait(tab.run("document.getElementById('help').open"))
    assert chromium.wait(tab.run("document.querySelectorAll('#help dt').length")) > 8
    chromium.wait(tab.press("?", "2"))
    assert chromium.wait(tab.run("document.getElementById('transcript').hidden"))
    described = "document.getElementById(document.getElementById('tree').getAttribute('aria-activedescendant'))"
    assert chromium.wait(tab.run(f"{described}.getAttribute('aria-selected')")) == "true"


def test_transcript_has_all_of_a_run(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """The transcript shows the prompt, reply, code, output, errors and sub-calls; equal calls are one item."""
    tab = shown(small(), height=4_000)
    texts = ("Which failed?", "Look.", "The reply.", "print(1)", "Traceback: it was 0", "That one.")
    for part in (*texts, "Batch of 2 calls", "\u00d7 3", "Run 1.1", "lookup"):
        chromium.wait(tab.until(f"{TRANSCRIPT}.includes({part!r})"))
    assert chromium.wait(tab.run("document.querySelectorAll('#transcript .sub-head').length")) == 5
    chromium.wait(tab.run("document.querySelectorAll('#transcript .sub-head')[2].click()"))
    chromium.wait(tab.until(f"{TRANSCRIPT}.includes('3 equal calls: 4, 5, 6')"))
    chromium.wait(tab.until("document.querySelector('#transcript .sub-body .prompt')?.innerText === 'equal'"))


def test_link_restores_the_place(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """The address of a place leads to it, in its view, in a new window."""
    trace = small()
    tab = shown(trace)
    chromium.wait(tab.press("End", "3"))
    address = chromium.wait(tab.run("location.hash"))
    assert address == "#at=1/b2&view=totals"
    again = shown(trace, address)
    assert chromium.wait(again.run(SELECTED)) == "Block 2"
    assert not chromium.wait(again.run("document.getElementById('totals').hidden"))
    assert "By depth" in chromium.wait(again.run("document.getElementById('totals').innerText"))
    chromium.wait(again.run("location.hash = '#at=1.1'"))
    chromium.wait(again.until(f"{SELECTED} === 'Run 1.1'"))
    unknown = shown(trace, "#at=9/b9&view=none")
    assert chromium.wait(unknown.run(SELECTED)) == "Run 1"


def test_search_finds_text_in_any_piece(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """Search finds what is in compressed pieces, over their ends, in any case, and opens it where it is."""
    trace = Written()("run_started", question="Q", model="m")("iteration_started", number=1)
    filler = "".join(f"line {number} of füller\n" for number in range(10_000))
    trace("block_started", iteration=1, block=1, code="pass")
    for number in range(1, 5):
        trace.call(number, f"{number} {filler} the needle {number} {filler}", f"reply {number}", block=1)
    trace.call(5, "abc", "def", block=0)
    tab = shown(trace)
    assert chromium.wait(tab.run("document.getElementsByClassName('texts-piece').length")) > 2
    chromium.wait(tab.press("/", *"NEEDLE 3"))
    assert chromium.wait(tab.until(FOUND.format("NEEDLE 3"))) == "Found in 1 text."
    chromium.wait(tab.press("Enter"))
    chromium.wait(tab.until("CSS.highlights.get('found')?.size > 0"))
    seen = "[...CSS.highlights.get('found')].some(range => { const y = range.getBoundingClientRect().top; return y > 0 && y < innerHeight })"
    chromium.wait(tab.until(seen))
    assert chromium.wait(tab.run("location.hash")) == "#at=1/c3&q=NEEDLE+3"
    chromium.wait(tab.press("/", "Escape", "/", *"füller"))
    assert chromium.wait(tab.until(FOUND.format("füller"))) == "Found in 4 texts."
    times = chromium.wait(tab.run("document.querySelector('.result-where').textContent"))
    assert times.endswith("20,000 times")
    chromium.wait(tab.press("/", "Escape", "/", *"abcd"))
    assert (
        chromium.wait(tab.until(FOUND.format("abcd"))) == "Found in no text."
    )  # it would begin in one and end in the next


def test_timeline_draws_and_selects(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """The timeline has a bar for each place; a click selects it; calls at the same time are stacked."""
    tab = shown(small(), "#view=timeline", is_dark=True)
    painted = """(() => { const canvas = document.querySelector('canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const colours = new Set(); for (let at = 0; at < data.length; at += 4 * 97) colours.add(data.slice(at, at + 4).join());
      return colours.size })()"""
    assert chromium.wait(tab.until(f"{painted} > 6 && {painted}")) > 6
    place = chromium.wait(
        tab.run(
            "(({x, y, width}) => [x + width / 2, y + 36])(document.querySelector('canvas').getBoundingClientRect())"
        )
    )
    chromium.wait(tab.press("j", "j", "j"))
    for kind in ("mousePressed", "mouseReleased"):
        chromium.wait(
            tab.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
        )
    chromium.wait(tab.until(f"{SELECTED} === 'Run 1'"))
    chromium.wait(tab.press("+", "-", "0", "z"))
    assert [message for message in tab.messages if "getImageData" not in message] == []


def test_odd_traces_are_shown_as_far_as_they_go(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """A trace without its end, of two trees, and with its events in the wrong order, twice or without a beginning."""
    trace = small()
    trace.lines = [line for line in trace.lines[:-1] if line["event"] != "block_ended"]
    trace.lines.append({**trace.lines[0], "event": "events_missed", "count": 7})
    tab = shown(trace)
    notes = chromium.wait(tab.run("document.getElementById('notes').innerText"))
    assert "The trace ends before its run did." in notes
    assert "7 events came faster than they were read" in notes
    assert "did not end" in chromium.wait(tab.run("document.getElementById('tree').innerText"))
    trace, second = small("one"), small("two")
    trace.lines += [{**line, "tree": "other"} for line in second.lines]
    tab = shown(trace, "#at=2:1/b2")
    assert chromium.wait(tab.run("document.getElementById('title').textContent")) == "2 run trees"
    assert chromium.wait(tab.run("location.hash")) == "#at=2:1/b2"
    chromium.wait(tab.press("Home", "ArrowLeft", "j"))
    assert chromium.wait(tab.run(SELECTED)) == "Run 1 of tree 2"
    trace = small()
    lines = trace.lines
    trace.lines = [*reversed(lines), *lines, *lines[10:], *({**line, "run": "1.7.3"} for line in lines)]
    tab = shown(trace, "#at=1.7.3")
    assert chromium.wait(tab.run(SELECTED)) == "Run 1.7.3"
    chromium.wait(tab.press("2", "3", "1", "End"))
    assert tab.messages == []


def test_failed_or_remembered_call_is_not_counted(chromium: Browser, shown: Callable[..., Tab]) -> None:
    """The page counts calls that were answered and paid, as the command line does, and names what ended the run."""
    trace = Written()("run_started", question="Why?", model="m", metadata={}).call(1, "Look.", "It is.", block=0)
    trace("call_started", call=2, requested_model=None, prompt="And?", block=0)
    trace("call_ended", call=2, model="m", usage={}, duration_s=0.1, response="", error="gone")
    trace("call_started", call=3, requested_model=None, prompt="And?", block=1)
    free = {"total_calls": 0, "total_cost": 0.0}
    trace("call_ended", call=3, model="m", usage=free, duration_s=0.0, response="It was.", is_remembered=True)
    trace("run_ended", response=None, error="gone", iterations=2, duration_s=1.0, usage={}, kind="provider")
    facts = chromium.wait(shown(trace).run("document.getElementById('facts').textContent"))
    assert "1 call," in facts.replace(" · ", ", ")
    assert "failed: provider" in facts


def test_list_tells_that_it_is_read(chromium: Browser) -> None:
    """The list of runs says that it is read until the first answer comes, and then how each run has ended."""
    answered = asyncio.Event()

    class Source:
        async def runs(self) -> Sequence[RunStatus]:
            await answered.wait()
            facts: Any = {"id": "a", "pid": 7, "question": "Why?", "model": "m", "turn": 1}
            return [RunStatus(state="provider", doing="", doing_since=0, started=0, ended=1, **facts)]

        async def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
            raise LookupError(run, after)
            yield b""

        async def stop(self, run: str, now: bool) -> bool:
            raise LookupError(run, now)

    with http_server(live_app(Source())) as server:
        tab = chromium.tab()
        chromium.wait(tab.open(f"{server.url}/"))
        text = "document.getElementById('runs')?.innerText"
        chromium.wait(tab.until(f"{text} === 'Reading ...'"))
        server.loop.call_soon_threadsafe(answered.set)
        chromium.wait(tab.until(f"({text}).includes('failed: provider')"))
