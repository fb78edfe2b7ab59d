"""The server as a whole: its envelope of errors, its models, its lifespan, and other applications around it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from rlm_broker import RLM, ConfigurationError, KeySettings, ScriptedClient
from rlm_broker.serve.app import Service
from rlm_broker.serve.settings import ServeSettings
from tests.support.service import Served, serving
from tests.support.waiting import until_now


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("logs")
    (folder / "app.log").write_text("one\ntwo\n")
    keys: dict[str, dict[str, Any]] = {"ann": {"rights": ("run", "execute")}, "bob": {"models": ("small",)}}
    rlm = RLM("offline", models={"small": "offline", "at@sign": "offline"})
    with serving(rlm, ServeSettings(contexts={"logs": str(folder)}), keys=keys) as running:
        yield running


def test_openais_client_lists_the_models_of_its_key(served: Served) -> None:
    def names(key: str) -> list[str]:
        with openai.OpenAI(base_url=served.base_url, api_key=served.keys[key]) as client:
            return [model.id for model in client.models.list()]

    models = ["offline", "small", "at@sign"]
    assert names("ann") == [*models, *(f"{name}@logs" for name in models), *(f"{name}@plain" for name in models)]
    assert names("bob") == ["small", "small@logs", "small@plain"]


def test_models_are_found_by_name_or_refused(served: Served) -> None:
    for name, key, status, why in (
        *((name, "ann", 200, f'"id":"{name}"') for name in ("offline", "at@sign", "small@logs", "at@sign@logs")),
        ("smal", "ann", 404, "there is no model 'smal'; did you mean small?"),
        ("small@log", "ann", 404, "there is no context 'log'; did you mean logs?"),
        ("offline", "bob", 403, "may not use the model 'offline'"),
    ):
        answer = httpx.get(f"{served.base_url}/models/{name}", headers=served.headers_of(key))
        assert (answer.status_code, why in answer.text) == (status, True), name


def test_unknown_paths_and_methods_have_the_envelope(served: Served) -> None:
    for method, path, status, code, allowed in (
        ("GET", "/v1/nope", 404, "not_found", None),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed", "POST"),
    ):
        answer = httpx.request(method, served.url + path, headers=served.headers)
        assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["code"] == code


def test_small_conveniences(served: Served) -> None:
    """Each answer has an id, a model was made when the server was opened, and the address itself leads to the viewer."""
    with openai.OpenAI(base_url=served.base_url, api_key=served.key) as client:
        model = client.models.retrieve("small")
        assert str(model._request_id).startswith("req_")
        assert 0 <= time.time() - model.created < 3_600
    assert httpx.get(served.url).headers["location"] == "/viewer/"


async def test_service_lives_within_another_application() -> None:
    """Its own lifespan does not run there, so the application enters it."""
    service = Service(RLM("offline"))

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    app = Starlette(routes=[Mount("/rlm", service)], lifespan=lifespan)
    headers = {"authorization": f"Bearer {service.made_key}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get("/rlm/health")).status_code == 503
        async with lifespan(app):
            assert (await client.get("/rlm/health")).status_code == 200
            assert (await client.get("/rlm/ready")).json() == {"status": "ready"}
            assert (await client.get("/rlm/v1/models", headers=headers)).status_code == 200
            assert (await client.get("/rlm/v1/models")).status_code == 401


async def test_rlm_of_another_event_loop_is_refused() -> None:
    rlm = RLM("offline")
    await asyncio.to_thread(rlm.__enter__)
    try:
        with pytest.raises(ConfigurationError, match="was opened on another event loop"):
            await Service(rlm).__aenter__()
    finally:
        await asyncio.to_thread(rlm.close)


async def test_start_that_fails_is_told_to_the_asgi_server() -> None:
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, str]) -> None:
        sent.append(message)

    service = Service(RLM("offline"), ServeSettings(contexts={"logs": "/no/such/folder"}))
    await service({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]
    assert sent == [
        {"type": "lifespan.startup.failed", "message": "serve.contexts.logs: /no/such/folder does not exist"}
    ]


async def test_draining_server_is_not_ready() -> None:
    service = Service(RLM("offline"))
    transport = httpx.ASGITransport(service)
    async with service, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await service.drain()
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is about to end")
        assert (await client.get("/health")).status_code == 200
    async with service, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/ready")).status_code == 200  # opened again


def test_client_that_has_left_is_no_failure_of_the_server() -> None:
    """A client counts as 499 that leaves while it sends its body, or while it waits for its answer."""
    code = b'{"code": "while True: pass"}'
    with serving() as own:
        for body, sent in ((code, len(code)), (code, 5)):
            head = f"POST /v1/execute HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {own.key}\r\n"
            with socket.create_connection(("127.0.0.1", own.port)) as connection:
                connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:sent])
                if sent == len(body):
                    until_now(lambda: own.parts.places._places.taken == 1)

        def counted() -> str:
            return httpx.get(f"{own.url}/metrics", headers=own.headers).text

        until_now(lambda: 'route="/v1/execute",status="499"} 2.0' in counted())
        assert 'status="500"' not in counted()


def test_metrics_are_read_by_keys_with_the_right(served: Served) -> None:
    assert httpx.get(f"{served.url}/metrics", headers=served.headers_of("bob")).status_code == 403
    with serving() as own:
        httpx.get(f"{own.base_url}/models", headers=own.headers)
        answer = httpx.get(f"{own.url}/metrics", headers=own.headers)
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        requests = {sample.labels["route"]: sample.value for sample in families["rlm_broker_http_requests"].samples}
        assert requests["/v1/models"] == 1
        assert {"rlm_broker_queued_runs", "rlm_broker_active_runs", "rlm_broker_warm_repls"} <= families.keys()


async def test_keys_that_cannot_be_kept_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", "a-key-of-some-length")
    unpriced = ScriptedClient(["FINAL(1)"])
    unpriced.is_priced = False
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (unpriced, {"usd_a_day": 1}, "usd_a_day cannot be kept: the price of model 'scripted'"),
        ("offline", {"models": ("oflin",)}, r"serve.keys.ann.models: there is no model 'oflin'; did you mean"),
    ]
    for model, given, why in cases:
        settings = ServeSettings(keys={"ann": KeySettings(key="env:ANNS_KEY", **given)})
        with pytest.raises(ConfigurationError, match=why):
            await Service(RLM(model), settings).__aenter__()
