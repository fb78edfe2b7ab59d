"""`/v1/containers` by OpenAI's own client: live REPLs that are executed in, interrupted, and end by themselves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from rlm_broker import Limits, ServeSettings
from tests.support.fds import memfds
from tests.support.processes import living_below
from tests.support.service import Served, serving
from tests.support.waiting import WAIT_S, until


@pytest.fixture
async def aclient(served: Served, client: openai.OpenAI) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key=served.key, max_retries=0) as aclient:
        yield aclient


async def run(http: httpx.AsyncClient, id: str, code: str, **given: Any) -> dict[str, Any]:
    answer = await http.post(f"/containers/{id}/execute", json={"code": code, **given})
    assert answer.status_code == 200, answer.text
    block: dict[str, Any] = answer.json()
    return block


async def test_variables_and_files_live_on(aclient: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    file = await aclient.files.create(file=("table.csv", b"a,b\n1,2\n"), purpose="assistants")
    made = await aclient.containers.create(
        name="mine", file_ids=[file.id], memory_limit="1g", expires_after={"anchor": "last_active_at", "minutes": 5}
    )
    assert (made.object, made.status, made.name, made.memory_limit) == ("container", "running", "mine", "1g")
    assert made.expires_after is not None
    assert made.expires_after.minutes == 5
    await aclient.files.delete(file.id)
    await run(http, made.id, "rows = open('table.csv').read().split()")
    block = await run(http, made.id, "rows", value=True)
    assert block["value"] == ["a,b", "1,2"]
    found = await aclient.containers.retrieve(made.id)
    assert (found.id, found.memory_limit) == (made.id, "1g")
    assert [each.id async for each in aclient.containers.list(name="mine")] == [made.id]
    assert [each async for each in aclient.containers.list(name="other")] == []
    await aclient.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await aclient.containers.retrieve(made.id)


async def test_interrupt_ends_a_block_and_keeps_variables(aclient: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    id = (await aclient.containers.create(name="")).id
    code = "x = 1\nprint('begun', flush=True)\nwhile True: pass"
    async with http.stream("POST", f"/containers/{id}/execute", json={"code": code, "stream": True}) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: output"
        second = await http.post(f"/containers/{id}/execute", json={"code": "1"})
        assert (second.status_code, second.json()["error"]["code"]) == (409, "busy")
        assert (await http.post(f"/containers/{id}/interrupt")).json()["id"] == id
        data = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    assert json.loads(data[-1])["block"]["status"] == "interrupted"
    assert (await run(http, id, "print(x)"))["stdout"] == "1\n"


async def test_client_that_leaves_interrupts_its_block(aclient: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    id = (await aclient.containers.create(name="")).id
    code = "x = 1\nprint('begun', flush=True)\nwhile True: pass"
    async with http.stream("POST", f"/containers/{id}/execute", json={"code": code, "stream": True}) as answer:
        assert await anext(answer.aiter_lines()) == "event: output"

    async def goes_on() -> bool:
        answer = await http.post(f"/containers/{id}/execute", json={"code": "print(x)"})
        return answer.status_code == 200 and answer.json()["stdout"] == "1\n"

    async with asyncio.timeout(WAIT_S):
        while not await goes_on():
            await asyncio.sleep(0.01)


async def test_killed_code_ends_no_container(aclient: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """More often than a run may have its REPL restarted."""
    id = (await aclient.containers.create(name="")).id
    await run(http, id, "open('kept', 'w').write('yes')")
    for _ in range(Limits().max_repl_restarts + 2):
        assert (await run(http, id, "import os; os.kill(os.getpid(), 9)"))["status"] == "killed"
    assert (await run(http, id, "print(open('kept').read())"))["stdout"] == "yes\n"


async def test_least_recently_used_makes_room(
    served: Served, aclient: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    ids = [(await aclient.containers.create(name=str(number))).id for number in range(3)]
    await run(http, ids[0], "1")
    newest = (await aclient.containers.create(name="3")).id
    assert {each.id async for each in aclient.containers.list()} == {ids[0], ids[2], newest}
    with pytest.raises(openai.NotFoundError):
        await aclient.containers.retrieve(ids[1])
    blocks = [asyncio.create_task(run(http, id, "while True: pass")) for id in (ids[0], ids[2], newest)]
    await until(lambda: all(held.users for held in served.parts.repls.all()))
    with pytest.raises(openai.RateLimitError, match="all 3 REPLs are in use"):
        await aclient.containers.create(name="4")
    for id in (ids[0], ids[2], newest):
        await aclient.containers.delete(id)
    await asyncio.wait(blocks)


async def test_idle_container_ends_by_itself() -> None:
    with serving(settings=ServeSettings(container_idle_s=0.3)) as served:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.key) as aclient:
            id = (await aclient.containers.create(name="")).id
            await until(lambda: len(served.parts.repls) == 0)
            with pytest.raises(openai.NotFoundError):
                await aclient.containers.retrieve(id)


async def test_other_key_has_no_such_container(served: Served, aclient: openai.AsyncOpenAI) -> None:
    id = (await aclient.containers.create(name="")).id
    path = f"/containers/{id}"
    async with httpx.AsyncClient(base_url=served.base_url, headers=served.headers_of("bob")) as bob:
        assert (await bob.get("/containers")).json()["data"] == []
        answers = [
            await bob.get(path),
            await bob.delete(path),
            await bob.post(f"{path}/execute", json={"code": "1"}),
            await bob.post(f"{path}/interrupt"),
            await bob.get(f"{path}/files"),
            await bob.post(f"{path}/files", files={"file": ("a", b"x")}),
        ]
    assert [answer.status_code for answer in answers] == [404] * 6
    assert {answer.json()["error"]["code"] for answer in answers} == {"not_found"}
    said = f"there is no container {id!r}: it was deleted, was idle too long, or never existed"
    assert {answer.json()["error"]["message"] for answer in answers} == {said}


async def test_repl_of_an_ended_run_is_a_container(
    served: Served, aclient: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    await aclient.containers.create(name="")
    repls = served.parts.repls

    async def held() -> str:
        repl = served.parts.rlm.sandbox.repl("a context")
        await repl.__aenter__()
        return repls.hold(
            repls.all()[0].owner, repl, lambda: repl.__aexit__(None, None, None), run="run_1", prefix="cntr_"
        ).id

    id = await asyncio.to_thread(lambda: served.run(held()))
    listed = {each.id: each async for each in aclient.containers.list()}
    assert listed[id].to_dict()["run"] == "run_1"
    assert (await run(http, id, "print(context)"))["stdout"] == "a context\n"


async def test_bad_container_is_refused(http: httpx.AsyncClient) -> None:
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({}, None, "name"),
        ({"name": "x" * 300}, None, "name"),
        ({"name": "a", "memory_limit": "4g"}, None, "memory_limit"),
        ({"name": "a", "memory_limit": "2g"}, None, "memory_limit"),
        ({"name": "a", "memory_limit": "1g", "limits": {"memory_bytes": 1 << 20}}, None, "memory_limit"),
        ({"name": "a", "expires_after": {"anchor": "last_active_at", "minutes": 11}}, None, "expires_after.minutes"),
        ({"name": "a", "expires_after": {"anchor": "created_at", "minutes": 1}}, None, "expires_after.anchor"),
        ({"name": "a", "network_policy": {"type": "allowlist", "allowed_domains": ["x"]}}, None, "network_policy.type"),
        ({"name": "a", "skills": []}, None, "skills"),
    ]
    for body, code, param in cases:
        answer = await http.post("/containers", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param), (body, error)


async def test_unknown_file_leaves_no_container(
    served: Served, aclient: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/containers", json={"name": "a", "file_ids": ["file-none"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "file_ids")
    assert [each async for each in aclient.containers.list()] == []
    assert len(served.parts.repls) == 0


async def test_many_containers_leave_nothing(aclient: openai.AsyncOpenAI) -> None:
    with_one = []  # processes of one container and of all that is ready beside it: 15 that are left would be more

    async def one() -> None:
        made = await aclient.containers.create(name="")
        with_one.append(len(living_below()))
        await aclient.containers.delete(made.id)

    for _ in range(2):
        await one()
    before, processes = memfds(""), max(with_one)
    for _ in range(15):
        await one()
    await until(lambda: len(living_below()) <= processes)
    assert memfds("") <= before
