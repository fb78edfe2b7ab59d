"""The viewer of runs that go on: its HTTP interface, and the page in Chromium with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from threading import Event as ThreadEvent
from threading import Thread
from typing import Any

import aiohttp
import pytest

pytest.importorskip("starlette", reason="needs rlm-broker[serve]")

from rlm_broker.cli.view import Viewer
from rlm_broker.errors import RlmBrokerError
from rlm_broker.watch.messages import RunStatus
from tests.support.browser import browser
from tests.support.traces import small
from tests.support.waiting import until

_COMMON: Any = {"pid": 7, "model": "m", "doing": "", "doing_since": 0, "started": 0, "turn": 1}
GOING = RunStatus(id="going", question="<b>What?</b>", state="running", **_COMMON)
OVER = RunStatus(id="over", question="Why?", state="answered", ended=9, **_COMMON)


class Source:
    """Runs of a test: `over` has ended, `going` goes on as the test adds lines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopped: list[tuple[str, bool]] = []
        self.afters: list[int] = []
        self.followers = 0
        self.breaks = False
        self._lines = [json.dumps(line).encode() for line in small().lines]
        self._going = self._lines[:5]
        self._more = asyncio.Event()

    async def runs(self) -> Sequence[RunStatus]:
        return [GOING, OVER]

    async def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
        self.afters.append(after)
        self.followers += 1
        try:
            if run == "over":
                for line in self._lines[after:]:
                    yield line
                return
            if run != "going":
                raise LookupError(run)
            while True:
                self._more.clear()
                for line in self._going[after:]:
                    yield line
                    after += 1
                if self.breaks:
                    raise RlmBrokerError("the process 7 has ended")
                await self._more.wait()
        finally:
            self.followers -= 1

    async def stop(self, run: str, now: bool) -> bool:
        self.stopped.append((run, now))
        if run == "hung":
            raise RlmBrokerError("the process 7 does not answer")
        return run == "going"

    def go_on(self, *, breaks: bool = False) -> None:
        """Let the run make its further events, or lose its process."""

        def more() -> None:
            self._going, self.breaks = self._lines[:12], breaks
            self._more.set()

        self.loop.call_soon_threadsafe(more)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def link(source: Source) -> Iterator[str]:
    """The link of a viewer with these runs, on a thread of its own."""
    viewer = Viewer("127.0.0.1", 0, source)
    ends = ThreadEvent()

    async def serve() -> None:
        task = asyncio.create_task(viewer.serve())
        await asyncio.to_thread(ends.wait)
        viewer.stop()
        await task

    thread = Thread(target=source.loop.run_until_complete, args=(serve(),))
    thread.start()
    yield viewer.link
    ends.set()
    thread.join()
    source.loop.close()


Ask = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
async def ask(link: str) -> AsyncIterator[Ask]:
    """Sends a request with the key, unless it is given others headers."""
    base, _, key = link.partition("#key=")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:

        async def asked(path: str, method: str = "GET", **options: Any) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
            async with session.request(method, base + path, headers=headers, **options) as answer:
                return answer.status, await answer.text()

        yield asked


def _rows(body: str) -> tuple[list[Any], str]:
    messages = [json.loads(line) for line in body.splitlines() if line]
    assert messages[-1]["end"]
    return [row for each in messages[:-1] for row in each["rows"]], "".join(each["text"] for each in messages[:-1])


async def test_rows_of_a_run_come_with_their_texts(ask: Ask) -> None:
    status, body = await ask("api/rows?run=over&after=0")
    rows, texts = _rows(body)
    assert status == 200
    assert [row[0] for row in rows] == [line["event"] for line in small().lines]
    begin, length = rows[0][5]["question"]
    assert texts.encode()[begin : begin + length] == b"Which failed?"
    rows, texts = _rows((await ask("api/rows?run=over&after=20"))[1])
    assert rows[0][1] == 21
    assert rows[0][5]["response"][0] == 0


async def test_runs_are_listed_and_stopped(ask: Ask, source: Source) -> None:
    _, body = await ask("api/runs")
    assert [(run["id"], run["ended"]) for run in json.loads(body)] == [("going", None), ("over", 9)]
    assert (await ask("api/stop", "POST", json={"run": "going", "now": True}))[0] == 200
    assert (await ask("api/stop", "POST", json={"run": "over"})) == (404, "there is no such run\n")
    assert (await ask("api/stop", "POST", json={"run": "hung"})) == (502, "the process 7 does not answer\n")
    assert source.stopped == [("going", True), ("over", False), ("hung", False)]


async def test_strangers_are_refused(ask: Ask, source: Source) -> None:
    """A wrong key, a page of another origin, and another name for this host get no data, and stop no run."""
    wrong = [({"Authorization": "Bearer wrong"}, 401), ({"Origin": "null"}, 403), ({"Host": "example.com"}, 403)]
    for headers, status in [*wrong, ({"Sec-Fetch-Site": "cross-site"}, 403)]:
        assert (await ask("api/runs", headers=headers))[0] == status, headers
        assert (await ask("api/rows?run=over", headers=headers))[0] == status, headers
        assert (await ask("api/stop", "POST", json={"run": "going"}, headers=headers))[0] == status, headers
    assert source.stopped == []


async def test_bad_requests_have_their_status(ask: Ask) -> None:
    rows = [("api/rows", 400), ("api/rows?run=over&after=-1", 400), ("api/rows?run=over&after=\u00b2", 400)]
    for path, status in [*rows, ("api/rows?run=none", 404), ("api/stop", 405), ("api/none", 404)]:
        assert (await ask(path))[0] == status, path
    assert (await ask("api/stop", "POST", data=b"{}"))[0] == 415
    for body, status in (({}, 400), ({"run": "going", "more": 1}, 400), ({"run": "x" * 5_000}, 413)):
        assert (await ask("api/stop", "POST", json=body))[0] == status, body


async def test_page_has_no_data_and_strict_headers(link: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(link.partition("#")[0]) as answer:
        text = await answer.text()
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["Content-Security-Policy"].endswith("frame-ancestors 'none'")
        assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert link.partition("#key=")[2] not in text


async def test_reader_that_leaves_and_process_that_is_lost_end_the_following(link: str, source: Source) -> None:
    base, _, key = link.partition("#key=")
    asked: Any = {"url": f"{base}api/rows?run=going", "headers": {"Authorization": f"Bearer {key}"}}
    async with aiohttp.ClientSession() as session:
        answer = await session.get(**asked)
        assert json.loads(await answer.content.readline())["rows"]
        assert source.followers == 1
        answer.close()
        await until(lambda: not source.followers)
        answer = await session.get(**asked)
        await answer.content.readline()
        source.go_on(breaks=True)
        last = (await answer.read()).decode().splitlines()[-1]
    assert json.loads(last) == {"end": True, "note": "the process 7 has ended"}


async def test_malformed_event_is_left_out(ask: Ask, source: Source) -> None:
    source._lines[1:3] = [b"[" * 100_000, b'{"event": "replied", "run": "x", "depth": 0}', b"no json"]
    _, body = await ask("api/rows?run=over&after=0")
    rows, _ = _rows(body)
    assert len(rows) == len(small().lines) - 2
    assert "could not be read" in body


@pytest.mark.browser
def test_run_is_followed_and_stopped_in_the_browser(link: str, source: Source) -> None:
    """The page lists runs as text, follows one with the keyboard, and stops it after it has asked."""
    with browser() as chromium:
        tab = chromium.tab()
        chromium.wait(tab.open(link))
        chromium.wait(tab.until("document.querySelectorAll('.run-open').length === 2"))
        assert "<b>What?</b>" in chromium.wait(tab.run("document.getElementById('runs').innerText"))
        assert "key" not in chromium.wait(tab.run("location.hash"))
        chromium.wait(tab.press("j", "Enter"))
        chromium.wait(tab.until("document.querySelectorAll('#tree .row').length === 3"))
        source.go_on()
        chromium.wait(tab.until("document.querySelector('#tree').innerText.includes('Batch of 2')"))
        assert chromium.wait(tab.run("location.hash")) == "#run=going&at=1"
        chromium.wait(tab.until("!document.getElementById('stop').hidden"))
        chromium.wait(tab.run("document.getElementById('stop').click()"))
        chromium.wait(tab.run("document.querySelector('dialog[open] button[value=soon]').click()"))
        chromium.wait(tab.until("document.getElementById('said').textContent === 'The run is being stopped.'"))
        assert source.stopped == [("going", False)]
        chromium.wait(tab.press("Backspace"))
        chromium.wait(tab.until("!document.getElementById('runs').hidden"))
        assert tab.messages == []
        assert {request.partition("?")[0].rpartition("/")[2] for request in tab.requests} <= {
            "",
            "runs",
            "rows",
            "stop",
        }
