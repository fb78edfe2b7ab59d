"""`POST /v1/execute` over real HTTP: what comes back, what is refused, and that a client that leaves ends its code."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.fds import memfds
from tests.support.felt import Felt
from tests.support.service import Served
from tests.support.waiting import until


def working(served: Served) -> int:
    """Workers that are in use, and not only ready."""
    stats = served.parts.rlm.sandbox.stats()
    return stats.workers - stats.ready


async def executed(http: httpx.AsyncClient, code: str, **given: Any) -> dict[str, Any]:
    answer = await http.post("/execute", json={"code": code, **given})
    assert answer.status_code == 200, answer.text
    block: dict[str, Any] = json.loads(answer.text)
    return block


@pytest.mark.parametrize("stream", [False, True])
async def test_large_value_becomes_json_off_the_loop(served: Served, http: httpx.AsyncClient, stream: bool) -> None:
    """Decoding and writing half a million values is no step of the loop."""
    code = "{'floats': [n / 7 for n in range(400_000)], 'lists': [[n] for n in range(50_000)], 'none': {}}"
    asked = {"code": code, "value": True, "stream": stream}
    assert (await http.post("/execute", json={**asked, "code": "1"})).status_code == 200  # all is imported now
    felt = Felt(served.loop)
    answer = await http.post("/execute", json=asked)
    assert felt.units < 2
    text = answer.text.rpartition("data: ")[2] if stream else answer.text
    block = json.loads(text)["block"] if stream else json.loads(text)
    assert block["value"] == {
        "floats": [n / 7 for n in range(400_000)],
        "lists": [[n] for n in range(50_000)],
        "none": {},
    }


async def upload(http: httpx.AsyncClient, name: str, data: bytes) -> str:
    answer = await http.post("/files", files={"file": (name, data)})
    id: str = answer.json()["id"]
    return id


async def test_block_comes_back_as_exec_prints_it(http: httpx.AsyncClient) -> None:
    code = "import sys\nprint(context['a'], input())\nprint('e', file=sys.stderr)\nvalue = 6 * 7\n(value, '\\ud800')"
    block = await executed(http, code, context={"a": "ä"}, stdin="typed", value=True, variables=True)
    assert (block["status"], block["stderr"], block["value"]) == ("ok", "e\n", [42, "\ud800"])
    assert block["stdout"].startswith("ä typed\n")
    assert {"name": "value", "type": "int", "size": None} in block["variables"]
    failed = await executed(http, "1 / 0")
    assert (failed["status"], failed["error"]) == ("error", "ZeroDivisionError: division by zero")


async def test_display_is_base64_by_its_type(http: httpx.AsyncClient) -> None:
    code = "class P:\n  def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n' + bytes(30)\ndisplay(P())"
    (shown,) = (await executed(http, code))["displays"]
    assert shown["image/png"].startswith("iVBORw0KGgo")


async def test_files_and_contexts_come_from_uploads(http: httpx.AsyncClient) -> None:
    one, two = await upload(http, "one.txt", b"1"), await upload(http, "two.txt", b"2")
    block = await executed(http, "print(open('one.txt').read(), context)", files=[one], context_files=[one, two])
    assert block["stdout"] == "1 {'one.txt': '1', 'two.txt': '2'}\n"
    for id in (one, two):
        await http.delete(f"/files/{id}")


async def test_time_limits_and_limits_of_the_request(http: httpx.AsyncClient) -> None:
    late = await executed(http, "while True: pass", timeout_s=0.2)
    assert (late["status"], late["limit"]) == ("interrupted", "block_timeout_s")
    assert late["error"] == "it ran longer than timeout_s = 0.2 s, waiting for replies not counted"
    block = await executed(
        http,
        "import os; x = os.environ['A']; y = bytearray(1 << 28)",
        limits={"memory_bytes": "128MB"},
        env={"A": "b"},
    )
    assert block["error"] == "MemoryError"


async def test_stream_sends_output_before_the_block(http: httpx.AsyncClient, served: Served) -> None:
    """The second line is printed only when the first one has arrived, which the file tells."""
    code = "print('first', flush=True)\nimport time\nwhile True: time.sleep(0.05); print('.', end='', flush=True)"
    async with http.stream("POST", "/execute", json={"code": code, "stream": True, "timeout_s": 30}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: output"
        assert json.loads((await anext(lines)).removeprefix("data: ")) == {
            "type": "output",
            "stream": "stdout",
            "text": "first\n",
        }
    await until(lambda: not working(served))


async def test_stream_ends_with_the_block(http: httpx.AsyncClient) -> None:
    answer = await http.post("/execute", json={"code": "print(1); 2", "stream": True, "value": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data")]
    assert [event["type"] for event in events][-1] == "block"
    assert "".join(event["text"] for event in events[:-1]) == "1\n2\n"
    assert events[-1]["block"]["value"] == 2


async def test_silent_block_sends_signs_of_life(http: httpx.AsyncClient) -> None:
    answer = await http.post("/execute", json={"code": "import time; time.sleep(0.7)"})
    assert answer.text.startswith("\n")
    assert answer.json()["status"] == "ok"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_leaves_ends_its_code(served: Served, http: httpx.AsyncClient, is_streamed: bool) -> None:
    """Its REPL has ended, and its place is free, though the code reacts to no signal."""
    id = await upload(http, "big.txt", b"x" * 100_000)
    before = memfds("")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    body = {"code": code, "stream": is_streamed, "context_files": [id]}
    asking = [asyncio.create_task(http.post("/execute", json=body)) for _ in range(2)]
    await until(lambda: served.parts.places._places.taken == 2)
    busy = await http.post("/execute", json={"code": "1"})
    assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (429, "busy", "1")
    for task in asking:
        task.cancel()
    await until(lambda: served.parts.places._places.taken == 0 and not working(served))
    assert (await executed(http, "print(1)"))["stdout"] == "1\n"
    await http.delete(f"/files/{id}")
    await until(lambda: memfds("") < before)


async def test_bad_request_is_refused(http: httpx.AsyncClient) -> None:
    cases: list[tuple[Any, int, str | None, str | None]] = [
        ({}, 400, None, "code"),
        ({"code": 1}, 400, None, "code"),
        ({"code": "1", "tiemout_s": 1}, 400, None, "tiemout_s"),
        ({"code": "1", "timeout_s": 0}, 400, None, "timeout_s"),
        ({"code": "1", "timeout_s": 31}, 400, None, "timeout_s"),
        ({"code": "1", "wall_timeout_s": 1e9}, 400, None, "wall_timeout_s"),
        ({"code": "1", "limits": {"memory_bytes": 2 << 30}}, 400, None, "limits"),
        ({"code": "1", "limits": {"cpu": 1}}, 400, None, "limits"),
        ({"code": "1", "limits": {"max_depth": 1}}, 400, None, "limits"),
        ({"code": "1", "context": "a", "context_files": ["file-none"]}, 400, None, "context_files"),
        ({"code": "1", "context_files": ["file-none"]}, 404, "not_found", "context_files"),
        ({"code": "1", "files": ["file-none"]}, 404, "not_found", "files"),
        ({"code": "1", "env": {"A=B": "c"}}, 400, "invalid", None),
        ([], 400, None, None),
    ]
    for body, status, code, param in cases:
        answer = await http.post("/execute", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (body, error)


async def test_context_is_never_a_path_of_the_server(http: httpx.AsyncClient) -> None:
    assert (await executed(http, "print(context)", context="/etc/passwd"))["stdout"] == "/etc/passwd\n"


async def test_right_is_needed_and_files_are_ones_own(served: Served, http: httpx.AsyncClient) -> None:
    id = await upload(http, "a", b"x")
    refused = await http.post("/execute", json={"code": "1"}, headers=served.headers_of("runner"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    others = await http.post("/execute", json={"code": "1", "files": [id]}, headers=served.headers_of("bob"))
    assert others.status_code == 404
    await http.delete(f"/files/{id}")
