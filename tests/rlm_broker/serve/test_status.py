"""State of a server: whether it is ready, and in the viewer the runs of each key, and others by its rights."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rlm_broker import RLM
from tests.support.service import Served, serving
from tests.support.stand_ins import Gate
from tests.support.waiting import until_now


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    keys: dict[str, dict[str, Any]] = {"ann": {}, "bob": {}, "eve": {"rights": ("watch", "stop")}}
    with serving(RLM(Gate()), keys=keys) as running:
        yield running


def begun(served: Served, name: str) -> str:
    """Begin a run of a key, which waits for its model."""

    def begin() -> str:
        key = served.service._keys.authenticated(served.headers_of(name)["authorization"])
        hosted = served.parts.runs.begin(key.owner, "text", f"{name} asks")
        hosted.outlive(None)
        return hosted.id

    return served.call(begin)


def runs(served: Served, name: str) -> dict[str, Any]:
    answer = httpx.get(f"{served.url}/viewer/api/runs", headers=served.headers_of(name))
    return {run["id"]: run for run in answer.json()}


def stopped(served: Served, name: str, run: str) -> int:
    body = json.dumps({"run": run, "now": True})
    headers = {**served.headers_of(name), "content-type": "application/json"}
    return httpx.post(f"{served.url}/viewer/api/stop", headers=headers, content=body).status_code


def test_page_needs_no_key_and_its_data_does(served: Served) -> None:
    page = httpx.get(f"{served.url}/viewer/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{served.url}/viewer/api/runs").status_code == 401


def test_keys_see_and_stop_their_own_runs(served: Served) -> None:
    anns, bobs = begun(served, "ann"), begun(served, "bob")
    until_now(lambda: runs(served, "ann")[anns]["question"] == "ann asks")
    assert set(runs(served, "ann")) == {anns}
    assert runs(served, "ann")[anns]["owner"] == "ann"
    assert {anns, bobs} <= set(runs(served, "eve"))
    assert stopped(served, "ann", bobs) == 404
    rows = {"run": bobs, "after": "0"}
    assert httpx.get(f"{served.url}/viewer/api/rows", params=rows, headers=served.headers_of("ann")).status_code == 404
    assert stopped(served, "ann", anns) == 200
    assert stopped(served, "eve", bobs) == 200
    until_now(lambda: {run["state"] for run in runs(served, "eve").values()} == {"cancelled"})


def test_events_of_a_run_are_followed_to_its_end(served: Served) -> None:
    run = begun(served, "bob")
    query = {"run": run, "after": "0"}
    with httpx.stream("GET", f"{served.url}/viewer/api/rows", params=query, headers=served.headers_of("bob")) as rows:
        seen = ""
        for piece in rows.iter_text():
            seen += piece
            if "call_started" in seen:
                stopped(served, "bob", run)
    assert "run_started" in seen


def test_task_in_the_context_is_shown_for_a_question(served: Served) -> None:
    body = {"model": "gate", "input": "Say hello.", "background": True}
    made = httpx.post(f"{served.base_url}/responses", headers=served.headers_of("ann"), json=body).json()
    until_now(lambda: "Say hello." in {run["question"] for run in runs(served, "ann").values()})
    httpx.post(f"{served.base_url}/responses/{made['id']}/cancel", headers=served.headers_of("ann"), json={})
